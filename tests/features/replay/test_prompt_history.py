"""A prompt is the template's outside of replayed answers, whatever a service remembers.

Its text depends on the request alone. Only answers and calls that were sampled for the same
conversation may have other tokens, and these are the sampled ones.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.conversation import Conversation, Message, Role, Tool
from mlxstack.core.engine_events import FinishReason, RequestFinished, RequestTimings, TokenSampled
from mlxstack.core.request import Request
from mlxstack.core.response_parts import ContentPart, ReasoningPart, ToolCallPart
from mlxstack.features.formats.answer_format import ModelAnswerFormat
from mlxstack.service.calls.generation import Generation, assistant_message
from mlxstack.service.parts.generation_options import GenerationOptions
from mlxstack.text.assembly import assemble_text
from mlxstack.text.tokens.cached_tokenizer import Prompt
from tests.features.formats.formats import respelled
from tests.text.conftest import CHATML, CHATML_ADDED, CHATML_SPECIAL, byte_level, loaded

USER = Role.USER
ASSISTANT = Role.ASSISTANT
TOOL = Role.TOOL
ACT = Tool("act", "Acts.", {"type": "object", "properties": {"key": {"type": "string"}}})
OTHER = Tool("other", "Does something else.", {"type": "object", "properties": {}})
OPENING = "<|im_start|>assistant\n"
END = "<|im_end|>"
THOUGHT = "m.reasoning_content and loop.index0 > ns.last"
TEMPLATES = {
    "drops the thoughts of earlier turns": CHATML,
    "keeps thoughts": CHATML.replace(THOUGHT, "m.reasoning_content"),
    "writes no thoughts": CHATML.replace(THOUGHT, "false"),
    "empty thoughts": CHATML.replace(
        "{{- m.content }}",
        "{%- if not m.reasoning_content %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
        "{{- m.content }}",
    ),
}
ASK = Message(USER, "Do it.")
MORE = Message(USER, "Thanks. More?")
CALL = '<tool_call>\n{"name": "act",  "arguments": {"key":  "a"}}\n</tool_call>'


class Answer(Struct, frozen=True):
    """An answer of the model, and the part of it that its client sends back."""

    text: str
    has_thought: bool
    reason: FinishReason
    width: int
    sends_thought: bool
    n_choices: int
    chosen: int


class Wish(Struct, frozen=True):
    """Options of a request beside its messages."""

    thinks: bool
    tools: tuple[Tool, ...]


class Spoken:
    """One model: its service remembers, `bare` forgets everything before each prompt."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.output_format = ModelAnswerFormat(tokenizer)
        self.bare = assemble_text(tokenizer).prompt_maker
        self.random = Random(0)
        self.swap()

    def swap(self) -> None:
        """A new service for the same model: nothing is remembered."""
        self.prompt_maker = assemble_text(self.tokenizer).prompt_maker
        self.sampled: set[tuple[int, ...]] = set()

    def answers(self, turns: Sequence[Message], wish: Wish, answer: Answer) -> list[Message]:
        """The choices of one request."""
        asked = conversation(turns, wish)
        prompt = self.prompt_maker.make(asked)
        closed = "</think>\n\n" if prompt.is_in_thinking else ""
        thought = "Let me see.\n" if answer.has_thought and closed else ""
        return [
            self._answer(asked, prompt, f"{thought}{closed}{answer.text} {at}".rstrip(" 0"), answer)
            for at in range(answer.n_choices)
        ]

    def _answer(self, asked: Conversation, prompt: Prompt, text: str, answer: Answer) -> Message:
        tokens = respelled(self.tokenizer, text, lambda: self.random.randint(1, answer.width))
        eos = frozenset(self.tokenizer.eos_token_ids)
        request = Request(id="r", prompt=prompt, max_tokens=9999, eos=eos)
        text_processor: Any = SimpleNamespace(
            output_format=self.output_format, prompt_maker=self.prompt_maker
        )
        whole = replace(asked, tools=(ACT,))
        generation = Generation(request, GenerationOptions("r"), prompt, text_processor, whole)
        events: list[Any] = [TokenSampled("r", token) for token in (*tokens, min(eos))]
        parts = [part for event in events for part in generation.on_event(event)]
        parts += generation.on_event(RequestFinished("r", answer.reason, RequestTimings()))
        self.sampled.add(answers_of(self, (*prompt.tokens, *tokens))[-1])
        return assistant_message(
            p for p in parts if isinstance(p, ReasoningPart | ContentPart | ToolCallPart)
        )

    def check(self, turns: Sequence[Message], wish: Wish) -> Prompt:
        """The prompt of a request. Raises AssertionError if it breaks the law."""
        asked = conversation(turns, wish)
        hot = self.prompt_maker.make(asked)
        cold = self.bare.make(asked)
        assert hot.text == cold.text
        hot_answers, cold_answers = (answers_of(self, one.tokens) for one in (hot, cold))
        assert outside(self, hot.tokens) == outside(self, cold.tokens)
        pairs = list(zip(hot_answers, cold_answers, strict=True))
        assert (hot_answers != cold_answers) == (hot.n_replayed > 0)
        assert all(self.is_replayed(tokens, own) for tokens, own in pairs if tokens != own)
        return hot

    def is_replayed(self, tokens: tuple[int, ...], own: tuple[int, ...]) -> bool:
        """Whether an answer, or else each call in it that differs from `own`, was sampled."""
        if tokens in self.sampled:
            return True
        text, calls = self._calls(tokens)
        own_text, own_calls = self._calls(own)
        known = [call for one in self.sampled for call in self._calls(one)[1]]
        return text == own_text and all(call in (*own_calls, *known) for call in calls)

    def _calls(self, tokens: Sequence[int]) -> tuple[list[int], list[tuple[int, ...]]]:
        """The tokens between the calls of an answer, and those of each call."""
        opens, closes = (self.encode(f"<{slash}tool_call>")[0] for slash in ("", "/"))
        text: list[int] = []
        calls: list[tuple[int, ...]] = []
        start: int | None = None
        for at, token in enumerate(tokens):
            if token == opens:
                start = at
            if start is None:
                text.append(token)
            elif token == closes:
                calls.append(tuple(tokens[start:at]))
                start = None
        return text, calls

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))


def conversation(turns: Sequence[Message], wish: Wish) -> Conversation:
    return Conversation(tuple(turns), tools=wish.tools, thinking=wish.thinks)


def bounds(spoken: Spoken, tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Where the answers of a prompt begin, after their header, and end."""
    opening = spoken.encode(OPENING)
    end = spoken.encode(END)[0]
    n = len(opening)
    starts = [at + n for at in range(len(tokens)) if tuple(tokens[at : at + n]) == opening]
    stops = (next((i for i in range(at, len(tokens)) if tokens[i] == end), None) for at in starts)
    return [(a, len(tokens) if b is None else b) for a, b in zip(starts, stops, strict=True)]


def answers_of(spoken: Spoken, tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """The tokens of the answers of a prompt."""
    return [tuple(tokens[start:stop]) for start, stop in bounds(spoken, tokens)]


def outside(spoken: Spoken, tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """The tokens around the answers of a prompt."""
    edges = [0, *(edge for pair in bounds(spoken, tokens) for edge in pair), len(tokens)]
    return [tuple(tokens[a:b]) for a, b in pairwise(edges)][::2]


@pytest.fixture(params=TEMPLATES)
def spoken(request: pytest.FixtureRequest, tmp_path: Path) -> Spoken:
    tokenizer = byte_level(CHATML_SPECIAL, CHATML_ADDED)
    ends = {"eos_token": END}
    return Spoken(loaded(tmp_path, tokenizer, TEMPLATES[request.param], ends))


answers_st = st.builds(
    Answer,
    text=st.sampled_from(["Yes.", "No  way. ", CALL, f"Look:\n{CALL}", f"{CALL}\n{CALL}"]),
    has_thought=st.booleans(),
    reason=st.sampled_from([FinishReason.EOS, FinishReason.EOS, FinishReason.LENGTH]),
    width=st.sampled_from([1, 2, 9]),
    sends_thought=st.booleans(),
    n_choices=st.sampled_from([1, 1, 2]),
    chosen=st.integers(0, 1),
)
wishes_st = st.builds(Wish, st.booleans(), st.sampled_from([(ACT,), (ACT,), (), (OTHER, ACT)]))
steps_st = st.lists(
    st.tuples(answers_st, wishes_st) | st.just("swap") | st.integers(1, 3), min_size=1, max_size=8
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=steps_st, wish=wishes_st)
def test_no_history_changes_a_prompt_outside_of_replayed_answers(
    spoken: Spoken, steps: list[Any], wish: Wish
) -> None:
    spoken.swap()
    turns = [ASK]
    for step in steps:
        match step:
            case "swap":
                spoken.swap()
            case int(n_rounds):
                turns = turns[: max(1, len(turns) - 2 * n_rounds)]
                if turns[-1].role is ASSISTANT:
                    turns.pop()
            case (answer, asked):
                turns += _goes_on(spoken.answers(turns, asked, answer), answer)
                spoken.check(turns, asked)
        spoken.check(turns, wish)


def _goes_on(choices: Sequence[Message], answer: Answer) -> list[Message]:
    """The answer that a client keeps, and its next messages."""
    kept = choices[min(answer.chosen, len(choices) - 1)]
    sent = kept if answer.sends_thought else replace(kept, reasoning=None)
    return [sent, *(Message(TOOL, "r", tool_call_id=c.id) for c in kept.tool_calls)] + (
        [] if kept.tool_calls else [MORE]
    )


WISH = Wish(thinks=True, tools=(ACT,))
YES = Answer("Yes.", True, FinishReason.EOS, 9, False, 1, 0)


def test_a_remembered_thought_comes_back_with_its_answer_only(spoken: Spoken) -> None:
    """Other tools change the place of the answer, so that it is the template's again."""
    acting = replace(YES, text=CALL)
    turns = [ASK, *_goes_on(spoken.answers([ASK], WISH, acting), acting)]
    assert spoken.check(turns, WISH).n_replayed == 1
    assert spoken.check(turns, Wish(thinks=True, tools=(OTHER,))).n_replayed <= 1


def test_a_prompt_that_replays_nothing_is_that_of_a_new_service(spoken: Spoken) -> None:
    turns = [ASK, *_goes_on(spoken.answers([ASK], WISH, YES), YES)]
    spoken.swap()
    hot = spoken.check(turns, WISH)
    assert hot.n_replayed == 0
    assert hot.tokens == spoken.bare.make(conversation(turns, WISH)).tokens
