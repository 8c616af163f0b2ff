"""Report on a chat template, for the verb `template`."""

from itertools import takewhile
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from mlxstack.core.conversation import Conversation, Message, Role, Tool, ToolCall
from mlxstack.core.errors import BadRequest
from mlxstack.core.interfaces import AnswerFormat, FormatReport
from mlxstack.text.prompt.prompt import PromptMaker
from mlxstack.text.prompt.splicer import NAMELESS, SampledAnswer
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
MAX_REFUSAL = 200
"""Characters of a refusal in a note."""

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


def report(
    prompt_maker: PromptMaker, answer_format: AnswerFormat, tokenizer: Any
) -> TemplateReport:
    """Report on the template of a TokenizerWrapper. Raises Unsupported without one."""
    template = prompt_maker.template
    prompt_maker.text(Conversation((ASKED,)))
    switches = template.switches
    capabilities = template.capabilities
    return TemplateReport(
        format=answer_format.report,
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
        notes=notes(capabilities, answer_format.report),
        reuse=_reuse(prompt_maker, answer_format, tokenizer),
    )


def refusal(prompt_maker: PromptMaker) -> str:
    """Why a single question is refused, or ""."""
    try:
        prompt_maker.text(Conversation((ASKED,)))
    except BadRequest as error:
        return error.message
    return ""


def notes(
    capabilities: TemplateCapabilities, format_report: FormatReport, refused: str = ""
) -> tuple[str, ...]:
    """Limits of the template to know before an agent uses this model.

    `refused`: why it refuses a conversation of one question.
    """
    if refused:
        return (f"no chat is answered: {refused[:MAX_REFUSAL]}",)
    lines = [text for key, text in NOTES.items() if not getattr(capabilities, key)]
    if capabilities.call_text in TEXT_NOTES:
        lines.append(TEXT_NOTES[capabilities.call_text])
    if format_report.source == "fallback" and capabilities.takes_calls:
        lines.append("no format of tool calls was found; JSON in <tool_call> is read")
    if not format_report.is_certain:
        problems = ", ".join(format_report.problems)
        lines.append(f"the format is not certain; not read back: {problems}")
    return tuple(lines)


def _reuse(
    prompt_maker: PromptMaker, answer_format: AnswerFormat, tokenizer: Any
) -> dict[str, float | None]:
    """Reused share of prompt and answer, in and after calls of tools."""
    call = ToolCall("call00001", READ.name, {"path": "src/main.py"})
    turns = [SYSTEM, ASKED]
    shares: dict[str, float | None] = {"tool loop": None, "new user message": None}
    thought = THOUGHT.strip() if answer_format.has_thoughts else None
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
                prompt_maker, answer_format, tokenizer, conversation, answer, after
            )
        except BadRequest:
            return shares
    return shares


def _share(
    prompt_maker: PromptMaker,
    answer_format: AnswerFormat,
    tokenizer: Any,
    conversation: Conversation,
    answer: Message,
    after: Conversation,
) -> float:
    prompt = prompt_maker.make(conversation)
    text = _sampled_text(prompt_maker, answer_format, conversation, prompt, answer)
    added = tokenizer.added_tokens_decoder
    ends = [text.find(added[token].content) for token in tokenizer.eos_token_ids if token in added]
    text = text[: min((end for end in ends if end >= 0), default=len(text))]
    tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
    prompt_maker.remember_answer(NAMELESS, prompt, SampledAnswer(answer, tokens))
    cached = prompt.tokens + tokens
    later = prompt_maker.make(after).tokens
    pairs = zip(cached, later, strict=False)
    n_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return n_same / len(cached)


def _sampled_text(
    prompt_maker: PromptMaker,
    answer_format: AnswerFormat,
    conversation: Conversation,
    prompt: Prompt,
    answer: Message,
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
    marks = answer_format.report.reasoning
    if thought is None or marks is None or thought in text:
        return text
    opens, closes = marks
    if prompt.is_in_thinking:
        opens = ""
    if text.lstrip().startswith(closes.strip()):
        closes = ""
    return f"{opens}{thought}{closes}{text}"
