"""Recorded sessions of real agents, rendered by published templates.

MLX_STACK_CAPTURES names a folder of recordings, MLX_STACK_FORMATS one of templates.
"""

from functools import cache
from pathlib import Path

import pytest

from mlxstack.core.conversation import Conversation, Role
from mlxstack.text.assembly import assemble_text
from mlxstack.text.tokens.cached_tokenizer import common_length
from tests.clients.tapes import FOLDER, tapes
from tests.clients.test_recorded import conversation
from tests.text.test_published_templates import EACH, TEMPLATES, tokenizer_of

# They write the tools before the last user message, wherever that is.
MOVES_HEAD = ("Mistral-Small-3.2", "mistralai-Mistral-Nemo")
MIN_TOOL = 0.99
MIN_USER = 0.9
"""Shares of an earlier prompt. The thoughts of a tool loop may go with a new user message."""

pytestmark = pytest.mark.skipif(
    not (FOLDER and TEMPLATES), reason="MLX_STACK_CAPTURES and MLX_STACK_FORMATS name no folders"
)


@cache
def sessions() -> tuple[tuple[str, tuple[Conversation, ...]], ...]:
    """The conversations of each recording; scripts of SDKs say nothing twice."""
    found = ((tape.name, map(conversation, tape.requests)) for tape in tapes())
    return tuple(
        (name, tuple(one for one in said if one is not None))
        for name, said in found
        if "sdks" not in name
    )


@pytest.mark.parametrize("template", EACH, ids=lambda path: path.stem)
def test_no_recorded_request_is_refused_and_later_ones_reuse(
    template: Path, tmp_path: Path
) -> None:
    prompt_maker = assemble_text(tokenizer_of(template, tmp_path)).prompt_maker
    moves_head = template.stem.startswith(MOVES_HEAD)
    n_followed = 0
    for name, conversations in sessions():
        former: list[tuple[Conversation, str]] = []
        for one in conversations:
            text = prompt_maker.text(one)
            for earlier, before in former:
                n = len(earlier.messages)
                if len(one.messages) <= n or one.messages[:n] != earlier.messages:
                    continue
                n_followed += 1
                is_user = any(message.role is Role.USER for message in one.messages[n:])
                if not (is_user and moves_head):
                    least = MIN_USER if is_user else MIN_TOOL
                    assert common_length(before, text) >= least * len(before), name
            former.append((one, text))
    assert n_followed
