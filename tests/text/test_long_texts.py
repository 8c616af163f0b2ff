"""Texts that cannot fit the context cost little, however long they are."""

from collections.abc import Callable
from typing import Any

import pytest

from mlxstack.core.conversation import Conversation, Message, Role
from mlxstack.core.errors import TooLong
from mlxstack.text.assembly import assemble_text
from mlxstack.text.prompt.prompt import PromptMaker, TokenizeOptions

N_CTX = 256
LONG = "hello wide world, " * 20_000


def conversation(text: str, role: Role = Role.USER) -> Conversation:
    return Conversation((Message(Role.USER, "hi"), Message(role, text)))


WAYS: dict[str, Callable[[PromptMaker], Any]] = {
    "user": lambda prompt_maker: prompt_maker.make(conversation(LONG)),
    "assistant": lambda prompt_maker: prompt_maker.make(conversation(LONG, Role.ASSISTANT)),
    "many": lambda prompt_maker: prompt_maker.make(
        Conversation((Message(Role.USER, LONG[:99]),) * 3000)
    ),
    "template": lambda prompt_maker: prompt_maker.text(conversation(LONG)),
    "raw": lambda prompt_maker: prompt_maker.plain(LONG),
    "tokenize": lambda prompt_maker: prompt_maker.tokenize(LONG, TokenizeOptions()),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_text_that_cannot_fit_is_hardly_read(
    chatml: Any, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt_maker = assemble_text(chatml, n_ctx=N_CTX).prompt_maker
    before = prompt_maker._encoder.n_scratch
    counted: list[int] = []
    scratch = prompt_maker._encoder._scratch

    def counting(text: str) -> list[int]:
        counted.append(len(text))
        return scratch(text)

    monkeypatch.setattr(prompt_maker._encoder, "_scratch", counting)
    with pytest.raises(TooLong) as refused:
        WAYS[way](prompt_maker)
    assert N_CTX < refused.value.got <= len(scratch(LONG)) + 20_000
    assert prompt_maker._encoder.n_scratch == before, "nothing was tokenized as a whole"
    assert sum(counted) <= 40_000 < len(LONG)


def test_what_may_fit_is_taken(chatml: Any) -> None:
    plain = assemble_text(chatml).prompt_maker
    spaces = " " * 60_000
    for text in ("word " * 40, spaces, "a" * 2000):
        n_tokens = len(plain.make(conversation(text)).tokens)
        prompt_maker = assemble_text(chatml, n_ctx=n_tokens).prompt_maker
        assert prompt_maker.make(conversation(text)) == plain.make(conversation(text))
    assert plain.plain(LONG).tokens, "without a context there is no bound"
