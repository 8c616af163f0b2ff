"""What rules an answer: the shape that was asked for, the call that must be, the thought's end."""

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.conversation import Conversation, Tool
from mlxstack.core.errors import BadRequest
from mlxstack.service.options import Calling, Options
from mlxstack.service.words import Words
from mlxstack.text.forced import Calls
from mlxstack.text.guide import Guide, Passage, closed
from mlxstack.text.prompt import Prompt
from mlxstack.text.voice import Voice

N_TAIL = 16


class Opening(Struct, frozen=True):
    """How an answer begins: after `prompt`, with the tokens `forced` on it."""

    conversation: Conversation
    prompt: Prompt
    forced: tuple[int, ...]


async def guide(words: Words, options: Options, opening: Opening) -> Guide | None:
    """The guide of an answer, None if it may be anything. Raises BadRequest for a bad grammar."""
    if opening.forced:
        return await _call_guide(words, options, opening.conversation.tools)
    rules = None if options.shape is None else await words.shape_rules(options.shape)
    passage = _passage(words, options, opening)
    if rules is None and options.thinking_budget is None and not passage.forbidden:
        return None
    return Guide(passage, rules)


async def text_guide(words: Words, options: Options) -> Guide | None:
    """The same for a text to be continued, in which there are no thoughts."""
    if options.shape is None:
        return None
    rules = await words.shape_rules(options.shape)
    return None if rules is None else Guide(Passage(words.n_vocab), rules)


def required(options: Options, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """The tools of which one must be called. Raises BadRequest for a name that none has."""
    if options.called is None:
        return tools
    found = tuple(tool for tool in tools if tool.name == options.called)
    if options.calling is Calling.REQUIRED and not found:
        raise BadRequest(f"tool_choice: no tool is named {options.called!r}", "tool_choice")
    return found


async def _call_guide(words: Words, options: Options, tools: tuple[Tool, ...]) -> Guide | None:
    """None if this tokenizer cannot be guided; then the beginning alone is forced."""
    marks = words.voice.call_marks
    if marks is None:
        return None
    is_single = options.is_one_call or options.called is not None
    rules = await words.call_rules(Calls(required(options, tools), marks, is_single))
    return None if rules is None else Guide(Passage(words.n_vocab), rules)


def _passage(words: Words, options: Options, opening: Opening) -> Passage:
    voice = words.voice
    has_tools = bool(opening.conversation.tools) and options.calling is not Calling.NONE
    may_think, has_headers = opening.prompt.may_think, _has_headers(voice, opening.prompt)
    before = Passage(
        n_vocab=words.n_vocab,
        eos=voice.eos,
        is_in_thinking=opening.prompt.is_in_thinking or (has_headers and may_think),
        closes=voice.answer_tokens,
        escapes=voice.call_tokens if has_tools else frozenset(),
        budget=options.thinking_budget,
        may_end=has_headers and has_tools,
        headers=_headers(voice, has_tools) if has_headers and not may_think else (),
        forbidden=_forbidden(words, options, opening),
        before=opening.prompt.tokens[-N_TAIL:],
    )
    if before.is_in_thinking or not may_think or closed(before, opening.prompt.tokens[-N_TAIL:]):
        return before
    return replace(before, opens=voice.thought_tokens, may_end=False)


def _has_headers(voice: Voice, prompt: Prompt) -> bool:
    """Whether the answer begins with the header of a message."""
    return voice.has_headers and not prompt.before


def _headers(voice: Voice, has_tools: bool) -> tuple[tuple[int, ...], ...]:
    """The beginnings of an answer that has no thought."""
    calls = (voice.call_opening,) if has_tools else ()
    return (voice.answer_tokens, *calls)


def _forbidden(words: Words, options: Options, opening: Opening) -> tuple[tuple[int, ...], ...]:
    """The token sequences that begin a call, where the client forbids calls."""
    if options.calling is not Calling.NONE or not opening.conversation.tools:
        return ()
    return words.voice.call_sequences
