"""Models of the address: one, or all members of a gateway."""

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import BindingType
from textual.widget import Widget

from mlxstack.tui.actions.action import ActionTarget
from mlxstack.tui.screens.base import BaseScreen, keys_of
from mlxstack.tui.screens.text_page import TextPage
from mlxstack.tui.views import models
from mlxstack.tui.widgets.titled_table import TitledTable


class ModelsScreen(BaseScreen):
    """All models; enter shows one."""

    MODE = "models"
    BINDINGS: ClassVar[list[BindingType]] = [*keys_of(ActionTarget.MODEL, ActionTarget.SERVICE)]
    EXPLAINS: ClassVar[str] = (
        "The models that this address serves. A gateway has several: one that is `unloaded` is "
        "started by its first request, and unloaded when another needs its memory. `memory` is "
        "what it may take, of a service without gateway what it takes.\n\n"
        "The other screens show one of them: `mlx-stack tui NAME` shows another."
    )

    def compose_body(self) -> Iterable[Widget]:
        """One table."""
        yield TitledTable(models.models, "models", target=ActionTarget.MODEL)

    async def open(self, section: str, key: str) -> None:
        """Details of a member."""
        del section
        one = next((one for one in models.members(self.model) if one.id == key), None)
        if one is not None:
            await self.app.push_screen(TextPage("Model", models.details(one)))
