"""What the output of a model can contain, worked out once per tokenizer."""

from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from msgspec import Struct, field

from mlxstack.core.conversation import Tool
from mlxstack.text import harmony
from mlxstack.text.grammar.forced_tool_call import CallDelimiters
from mlxstack.text.grammar.tool_call_formats import format_of
from mlxstack.text.parsers import format_name, parser_of
from mlxstack.text.special_tokens import markers_of, nameless
from mlxstack.text.token_bytes import TokenBytes
from mlxstack.text.tool_call_parser import Parser

NORMAL, REASONING, TOOL = "normal", "reasoning", "tool"
Transitions = dict[str, list[tuple[str, str]]]


class TokenizerMarkers(Struct, frozen=True):
    """The attributes of a tokenizer that mlx-lm's text state machine is built from."""

    has_thinking: bool = False
    think_start: str | None = None
    think_end: str | None = None
    has_tool_calling: bool = False
    tool_call_start: str | None = None
    tool_call_end: str | None = None
    structural_markers: tuple[str, ...] = ()
    response_transitions: Transitions = field(default_factory=dict)


class ParseOptions(Struct, frozen=True):
    """How an answer is to be heard.

    `tools` are all offered tools, deferred ones too; without any, the marks of a tool call are
    words, as llama-server has it. `stops` count in the answer, not in thoughts or calls.
    `is_in_thinking` and `before` come from the prompt. `is_raw` gives a text completion:
    nothing is a marker and nothing is trimmed.
    """

    tools: tuple[Tool, ...] = ()
    stops: tuple[str, ...] = ()
    is_in_thinking: bool = False
    before: tuple[int, ...] = ()
    is_raw: bool = False


class ModelMarkers(Struct, frozen=True):
    """How one family of models marks what it says; the machines are mlx-lm's.

    `format` names the form of the calls, "" if it has none. A block of calls begins with
    `call_start`, or right after `call_header` if there is one. `optional_marks` may stand in a
    sampled call where the template writes none.
    """

    initial: str | None
    call_start: str
    call_end: str
    parser: Parser
    format: str
    marks: tuple[str, ...]
    with_tools: Any
    without_tools: Any
    call_header: str = ""
    optional_marks: tuple[str, ...] = ()


class OutputFormat:
    """Made from a mlx-lm TokenizerWrapper, shared by all responses of the model.

    `eos` and `hidden` are tokens that never become text; the hidden ones only matter inside a
    tool call, whose parser may need them. `special` are all that carry no text of their own.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.eos = frozenset(tokenizer.eos_token_ids)
        self.n_vocab = len(tokenizer)
        is_harmony = harmony.speaks_harmony(tokenizer)
        self.model_markers = accent_of(tokenizer)
        self.pieces = TokenBytes(tokenizer)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special = frozenset(at for at, token in added.items() if token.special)
        self.hidden = frozenset(
            at
            for at in self.special
            if not any(added[at].content in m for m in self.model_markers.marks)
        )

        self.has_headers = is_harmony
        self.answer_tokens = self._answer_tokens()
        self.thought_tokens = _single(tokenizer.think_start_tokens)
        self.call_tokens = _single(tokenizer.tool_call_start_tokens)
        self.call_opening = self._call_opening()
        self.message_opening = self._message_opening()
        self.call_sequences = self._call_sequences()
        self.call_marks = self._call_marks(nameless(tokenizer))

    def _answer_tokens(self) -> tuple[int, ...]:
        """The tokens after which the answer itself begins."""
        if not self.has_headers:
            return tuple(self.tokenizer.think_end_tokens or ())
        return tuple(self.tokenizer.encode(harmony.ANSWER, add_special_tokens=False))

    def _call_opening(self) -> tuple[int, ...]:
        """The tokens that open a tool call, none if this model is not known to write any."""
        if not self.has_headers:
            return tuple(self.tokenizer.tool_call_start_tokens or ())
        return tuple(self.tokenizer.encode(harmony.CALL_OPENING, add_special_tokens=False))

    def _message_opening(self) -> tuple[int, ...]:
        """The tokens between an open message and the header of the next, if there are any."""
        if not self.has_headers:
            return ()
        return tuple(self.tokenizer.encode(harmony.NEXT_MESSAGE, add_special_tokens=False))

    def _call_sequences(self) -> tuple[tuple[int, ...], ...]:
        """The sequences of several tokens that only a tool call begins with."""
        if not self.has_headers:
            return (self.call_opening,) if len(self.call_opening) > 1 else ()
        encode = self.tokenizer.encode
        channel = tuple(encode(harmony.CALL_OPENING, add_special_tokens=False))[:2]
        recipient = tuple(encode(f"{harmony.TURN_START} to", add_special_tokens=False))
        return channel, recipient

    def _call_marks(self, special: dict[str, int]) -> CallDelimiters | None:
        """How a forced call is written; None if the form of this model's calls is not known."""
        form = format_of(self.model_markers.format, self.tokenizer.get_vocab())
        if form is None:
            return None
        return CallDelimiters(
            self.model_markers.call_start, self.model_markers.call_end, form, special
        )

    def first_state(self, parse_options: ParseOptions) -> Any:
        """The state of mlx-lm's machine at the beginning of an answer."""
        if parse_options.is_raw:
            return TextStateMachine().make_state(NORMAL)
        machine = (
            self.model_markers.with_tools
            if parse_options.tools
            else self.model_markers.without_tools
        )
        if parse_options.is_in_thinking:
            return machine.make_state(self.model_markers.initial or REASONING)
        # An answer that goes on in the middle of its text has its header in the prompt.
        return machine.make_state(
            (not parse_options.before and self.model_markers.initial) or NORMAL
        )


def accent_of(tokenizer: Any) -> ModelMarkers:
    """The marks of the model, from its mlx-lm TokenizerWrapper."""
    return _harmony() if harmony.speaks_harmony(tokenizer) else _native(tokenizer)


def stop_state(words: tuple[str, ...]) -> Any:
    """A state that leaves NORMAL for the number of the first word that is complete."""
    edges = [(word, str(at)) for at, word in enumerate(words)]
    machine = TextStateMachine({NORMAL: edges, **{name: [] for _, name in edges}})
    return machine.make_state(NORMAL)


def _single(tokens: Any) -> frozenset[int]:
    """A mark that is one token; of others the first token may begin something else."""
    return frozenset(tokens) if tokens and len(tokens) == 1 else frozenset()


def _harmony() -> ModelMarkers:
    return ModelMarkers(
        initial=harmony.HEADER,
        call_start=harmony.CALL_START,
        call_end="",
        parser=harmony.parse_call,
        format=format_name(harmony.parse_call),
        marks=harmony.MARKS,
        with_tools=TextStateMachine(harmony.TOOL_TRANSITIONS),
        without_tools=TextStateMachine(harmony.TRANSITIONS),
        call_header=harmony.TURN_START,
        optional_marks=harmony.OPTIONAL_MARKS,
    )


def _native(tokenizer: Any) -> ModelMarkers:
    return ModelMarkers(
        initial=tokenizer.response_initial_state,
        call_start=tokenizer.tool_call_start or "",
        call_end=tokenizer.tool_call_end or "",
        parser=parser_of(tokenizer) or _no_parser,
        format=format_name(tokenizer.tool_parser),
        marks=markers_of(tokenizer),
        with_tools=make_text_state_machine(tokenizer),
        without_tools=make_text_state_machine(_silent(tokenizer)),
    )


def _silent(tokenizer: Any) -> TokenizerMarkers:
    """The same tokenizer, if no tools are offered: then a tool call is only text."""
    transitions: Transitions = {
        state: [edge for edge in edges if edge[1] != TOOL]
        for state, edges in tokenizer.response_transitions.items()
    }
    return TokenizerMarkers(
        has_thinking=tokenizer.has_thinking,
        think_start=tokenizer.think_start,
        think_end=tokenizer.think_end,
        structural_markers=tuple(tokenizer.structural_markers),
        response_transitions=transitions,
    )


def _no_parser(text: str, _: Any) -> Any:
    raise ValueError(f"this model has no tool parser for {text!r}")
