"""What real clients send again is what was begun early: the sessions, replayed as prompts.

`pytest -s` shows the table: tokens begun early, used, and computed while the client waits.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.conversation import Conversation, Message, Role
from mlxstack.features.early_turns.history import MIN_TOKENS
from mlxstack.policy.kv.prefix_index import common_prefix
from mlxstack.text.prompt.splicer import NAMELESS, SampledAnswer
from tests.clients.tapes import Tape, tapes
from tests.clients.test_recorded import conversation
from tests.features.replay.test_answer_replay import Model
from tests.text.conftest import CHATML_ADDED, CHATML_SPECIAL, byte_level, loaded
from tests.text.stripping import STRIPPING

THOUGHT = "I have to look at the file before I can say what is wrong with it. " * 20
MIN_USED = 0.8


class Sums(Struct, frozen=True):
    """Tokens of one session: `n_late` are computed after the arrival, `n_before` without."""

    n_turns: int = 0
    n_begun: int = 0
    n_used: int = 0
    n_late: int = 0
    n_before: int = 0


@pytest.fixture(scope="module", params=STRIPPING)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    tokenizer = byte_level(CHATML_SPECIAL, CHATML_ADDED)
    folder: Path = tmp_path_factory.mktemp("sessions")
    return Model(loaded(folder, tokenizer, STRIPPING[request.param], {"eos_token": "<|im_end|>"}))


def turns(tape: Tape) -> Iterator[tuple[Conversation, Message, Conversation]]:
    """Each conversation, the answer that its client received, and how it went on."""
    talks = [talk for request in tape.requests if (talk := conversation(request)) is not None]
    thinking = [replace(talk, thinking=True) for talk in talks]
    for number, talk in enumerate(thinking):
        n = len(talk.messages)
        follows = (x for x in thinking[number + 1 :] if x.messages[:n] == talk.messages)
        later = next((x for x in follows if len(x.messages) > n + 1), None)
        if later is not None and later.messages[n].role is Role.ASSISTANT:
            yield talk, later.messages[n], later


def sampled(model: Model, asked: Conversation, answer: Message) -> tuple[tuple[int, ...], Message]:
    """The tokens in KV after an answer that was thought about first, and the answer."""
    calls = "".join(
        f'\n<tool_call>\n{{"name": "{call.name}", "arguments": {json.dumps(call.arguments)}}}'
        "\n</tool_call>"
        for call in answer.tool_calls
    )
    prompt = model.prompt_maker.make(asked)
    tokens = model.encode(f"{THOUGHT}\n</think>\n\n{answer.text}{calls}")
    message = replace(answer, reasoning=THOUGHT)
    assert prompt.answer_at is not None
    model.prompt_maker.remember_answer(NAMELESS, prompt, SampledAnswer(message, tokens))
    return prompt.tokens + tokens, message


def replayed(model: Model, tape: Tape) -> Sums:
    sums = Sums()
    for asked, answer, later in turns(tape):
        cached, message = sampled(model, asked, answer)
        begun = model.prompt_maker.expected(asked, message).tokens[:-1]
        start = common_prefix(cached, begun)
        if len(begun) - start < MIN_TOKENS:
            begun = begun[:start]
        real = model.prompt_maker.make(later).tokens
        n_begun = len(begun) - start
        n_shared = common_prefix(begun, real)
        n_cached = common_prefix(cached, real)
        sums = Sums(
            sums.n_turns + 1,
            sums.n_begun + n_begun,
            sums.n_used + max(0, n_shared - start) * (n_begun > 0),
            sums.n_late + len(real) - max(n_shared, n_cached),
            sums.n_before + len(real) - n_cached,
        )
    return sums


def test_sessions_use_what_was_begun_early(model: Model) -> None:
    cached_of = {tape.name: replayed(model, tape) for tape in tapes() if tape.requests}
    sys.stdout.writelines(f"\n{name:48} {sums}" for name, sums in cached_of.items())
    n_begun = sum(sums.n_begun for sums in cached_of.values())
    n_used = sum(sums.n_used for sums in cached_of.values())
    sys.stdout.write(f"\nbegun {n_begun}, used {n_used}\n")
    assert sum(sums.n_turns for sums in cached_of.values())
    assert n_used >= MIN_USED * n_begun
    assert all(sums.n_late <= sums.n_before for sums in cached_of.values())
