"""Report on a chat template for `mlx-stack template`."""

from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from mlxstack.core.conversation import Conversation, Message, Role, Tool, ToolCall
from mlxstack.core.errors import BadRequest
from mlxstack.text.formats.answer_reader import read_answer
from mlxstack.text.formats.derivation import derive_format
from mlxstack.text.formats.description import DerivedFormat, FormatSource, ParsedMessage, call_marks
from mlxstack.text.formats.probe_renderings import shared_length
from mlxstack.text.prompt.answer_replay import NAMELESS, SampledAnswer
from mlxstack.text.prompt.prompt import PromptMaker
from mlxstack.text.template.adaptation import CallText, TemplateCapabilities
from mlxstack.text.template.capabilities import losses
from mlxstack.text.tokens.cached_tokenizer import Prompt, common_length

READ = Tool(
    "read_file",
    "Read a file of the project.",
    {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
)
SYSTEM = Message(Role.SYSTEM, "You are a coding agent. " * 8)
ASKED = Message(Role.USER, "Fix the bug in main.py, please.")
RESULT = "def main():\n    return 1\n" * 4
THOUGHT = "The file has to be read first, since the bug may be in any line of it. " * 4
NOTES = {
    "takes_tools": "the template shows no tools; they are written into the system prompt",
    "takes_calls": "the template shows no tool calls; they are written as JSON in <tool_call>",
    "takes_results": "the template shows no results; they are written as user turns",
    "has_system": "the template shows no system prompt; it begins the first user turn",
    "takes_parallel_calls": "the template shows one call per turn; others get turns of their own",
    "takes_references": "the template follows no references; parameters are simplified for it",
}
TEXT_NOTES = {
    CallText.BEFORE: "the template drops or moves text beside a call; it gets a turn before it",
    CallText.RESULT: "the template drops text beside a call; it is quoted before the result",
}


class FormatReport(Struct, frozen=True):
    """Output format, its marks, and its round-trip failures."""

    name: str
    source: str
    is_certain: bool
    problems: tuple[str, ...] = ()
    reasoning: tuple[str, str] | None = None
    calls: tuple[str, ...] = ()
    turn_ends: tuple[str, ...] = ()


class TemplateReport(Struct, frozen=True):
    """Findings on a template; `reuse` is the token share by turn."""

    format: FormatReport
    adaptations: dict[str, Any] = field(default_factory=dict)
    keeps_thoughts_by: dict[str, Any] = field(default_factory=dict)
    thinking_on: dict[str, Any] = field(default_factory=dict)
    thinking_off: dict[str, Any] = field(default_factory=dict)
    effort_levels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    reuse: dict[str, float | None] = field(default_factory=dict)


def report(tokenizer: Any) -> TemplateReport:
    """Report on the template of a TokenizerWrapper. Raises Unsupported without one."""
    prompt_maker = PromptMaker(tokenizer)
    template = prompt_maker.template
    prompt_maker.text(Conversation((ASKED,)))
    switches = template.switches
    capabilities = template.capabilities
    output_format = derive_format(tokenizer)
    return TemplateReport(
        format=_format(output_format),
        adaptations={
            key: value
            for key, value in asdict(capabilities).items()
            if value != getattr(TemplateCapabilities(), key)
        },
        keeps_thoughts_by=dict(switches.keep),
        thinking_on=dict(switches.on),
        thinking_off=dict(switches.off),
        effort_levels=dict(switches.levels),
        lost=tuple(losses(template.probe, capabilities)),
        notes=notes(capabilities, output_format),
        reuse=_reuse(prompt_maker, tokenizer, output_format),
    )


def notes(capabilities: TemplateCapabilities, output_format: DerivedFormat) -> tuple[str, ...]:
    """Limits of the template to know before an agent uses this model."""
    lines = [text for key, text in NOTES.items() if not getattr(capabilities, key)]
    if capabilities.call_text in TEXT_NOTES:
        lines.append(TEXT_NOTES[capabilities.call_text])
    if output_format.source is FormatSource.FALLBACK and capabilities.takes_calls:
        lines.append("no format of tool calls was found; JSON in <tool_call> is read")
    if not output_format.is_certain:
        lines.append(
            f"the format is not certain; not read back: {', '.join(output_format.problems)}"
        )
    return tuple(lines)


def _format(output_format: DerivedFormat) -> FormatReport:
    reasoning = output_format.reasoning
    return FormatReport(
        name=output_format.name,
        source=output_format.source.value,
        is_certain=output_format.is_certain,
        problems=output_format.problems,
        reasoning=None if reasoning is None else (reasoning.opens, reasoning.closes),
        calls=tuple(literal for literal in call_marks(output_format.calls) if literal.strip()),
        turn_ends=output_format.turn_ends,
    )


def _reuse(
    prompt_maker: PromptMaker, tokenizer: Any, output_format: DerivedFormat
) -> dict[str, float | None]:
    """Reused share of prompt and answer, in and after tool loops."""
    call = ToolCall("call00001", READ.name, {"path": "src/main.py"})
    turns = [SYSTEM, ASKED]
    shares: dict[str, float | None] = {"tool loop": None, "new user message": None}
    thought = THOUGHT.strip() if output_format.reasoning or output_format.channels else None
    steps = (
        ("tool loop", Message(Role.ASSISTANT, "", reasoning=thought, tool_calls=(call,)),
         Message(Role.TOOL, RESULT, tool_call_id=call.id)),
        ("new user message", Message(Role.ASSISTANT, "It is fixed.", reasoning=thought),
         Message(Role.USER, "Thank you. Is there another bug?")),
    )  # fmt: skip
    for kind, answer, follows in steps:
        conversation = Conversation(tuple(turns), tools=(READ,), thinking=True)
        turns += [answer, follows]
        after = replace(conversation, messages=tuple(turns))
        try:
            shares[kind] = _share(
                prompt_maker, tokenizer, conversation, answer, after, output_format
            )
        except BadRequest:
            return shares
    return shares


def _share(
    prompt_maker: PromptMaker,
    tokenizer: Any,
    conversation: Conversation,
    answer: Message,
    after: Conversation,
    output_format: DerivedFormat,
) -> float:
    prompt = prompt_maker.make(conversation)
    text = _sampled_text(prompt_maker, conversation, prompt, answer, output_format)
    added = tokenizer.added_tokens_decoder
    ends = [text.find(added[at].content) for at in tokenizer.eos_token_ids if at in added]
    text = text[: min((end for end in ends if end >= 0), default=len(text))]
    tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
    prompt_maker.answers.remember(NAMELESS, prompt, SampledAnswer(answer, tokens))
    cached = prompt.tokens + tokens
    later = prompt_maker.make(after).tokens
    return shared_length(cached, later) / len(cached)


def _sampled_text(
    prompt_maker: PromptMaker,
    conversation: Conversation,
    prompt: Prompt,
    answer: Message,
    output_format: DerivedFormat,
) -> str:
    """Text that a model would sample for a rendered answer."""
    closed = replace(conversation, add_generation_prompt=False)
    asked = prompt_maker.text(closed)
    opened = prompt.text
    written = prompt_maker.text(replace(closed, messages=(*conversation.messages, answer)))
    n_before = common_length(asked, opened)
    opening = opened[n_before:]
    body = written[n_before:]
    n_same = common_length(opening, body)
    # Never in the middle of a mark.
    mark = body.rfind("<", 0, n_same)
    n_same = mark if mark > body.rfind(">", 0, n_same) else n_same
    text = body[n_same:]
    thought = answer.reasoning
    if thought is None or output_format.reasoning is None or thought in text:
        return text
    opens = "" if prompt.is_in_thinking else output_format.reasoning.opens
    closes = output_format.reasoning.closes
    return f"{opens}{thought}{'' if text.lstrip().startswith(closes.strip()) else closes}{text}"


def parsed(
    prompt_maker: PromptMaker, output_format: DerivedFormat, conversation: Conversation, raw: str
) -> ParsedMessage:
    """Parsed raw answer to a conversation. Raises as `make` does."""
    prompt = prompt_maker.make(conversation)
    return read_answer(
        output_format,
        raw,
        conversation.tools,
        is_in_thinking=prompt.is_in_thinking,
        is_open=conversation.continue_final,
    )
