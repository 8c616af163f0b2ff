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
    HELP = "models"

    def compose_body(self) -> Iterable[Widget]:
        yield TitledTable(models.models, "models", target=ActionTarget.MODEL)

    async def open(self, section: str, key: str) -> None:
        """Details of a member."""
        del section
        for member in models.members(self.model):
            if member.id == key:
                await self.app.push_screen(TextPage("Model", models.details(member)))
                return
