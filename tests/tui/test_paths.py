"""What a person gives as a file to warm, and what the service answers, may be anything."""

from pathlib import Path
from typing import Any

import pytest

from mlxstack.core.errors import BadRequest
from mlxstack.tui.actions import action_of
from mlxstack.tui.actions.action import ActionContext, Aim
from tests.tui.slot_service import Clerk


@pytest.mark.parametrize("path", ["~nobody-of-this-name/x", "a\0b", "x" * 300, "~", ".json"])
async def test_a_path_that_leads_nowhere_is_told(path: str) -> None:
    with pytest.raises(BadRequest, match="cannot be read"):
        await action_of("warm").do(ActionContext(Clerk(), print), Aim("", path))


async def test_a_chat_that_is_nested_without_end_is_told(tmp_path: Path) -> None:
    file = tmp_path / "deep.json"
    file.write_text("[" * 100_000)
    with pytest.raises(BadRequest, match="cannot be read"):
        await action_of("warm").do(ActionContext(Clerk(), print), Aim("", str(file)))


@pytest.mark.parametrize("deed", ["swap", "warm", "clear", "park", "pin"])
async def test_an_answer_of_few_words_is_no_error(deed: str, tmp_path: Path) -> None:
    class Terse(Clerk):
        async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
            del path, body
            return {}

    file = tmp_path / "words.txt"
    file.write_text("words")
    assert await action_of(deed).do(ActionContext(Terse(), print), Aim("x", str(file)))
