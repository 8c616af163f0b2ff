"""The matrix of docs/models.md: features of the formats of chat templates, measured.

The templates are those of the tests. MLX_STACK_FORMATS names a folder of published ones, which
enter by name and result only; without it their rows stay as they are.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlxstack.core.conversation import Conversation, Message, Role, Tool, ToolCall
from mlxstack.core.errors import BadRequest
from mlxstack.core.response_parts import ArgumentsPart
from mlxstack.features.formats.answer_reader import AnswerReader
from mlxstack.features.formats.output_format import OutputFormat
from mlxstack.text.assembly import assemble_text, template_report
from mlxstack.text.prompt.prompt import PromptMaker
from mlxstack.text.prompt.report import TemplateReport
from mlxstack.text.tokens.cached_tokenizer import common_length
from tests.environment import option
from tests.features.formats.formats import FORMATS, made_tokenizer
from tests.features.formats.invented import INVENTED, NESTED
from tests.features.formats.test_derived_formats import ANSWERS, TOOLS, message
from tests.matrix.table import with_products
from tests.text.test_published_templates import tokenizer_of

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN = "<!-- templates: drawn by `make docs` -->"
END = "<!-- end of templates -->"
FORMS = {
    "json": "JSON between marks (Qwen3, Hermes, Granite 4)",
    "coder": "XML with tags for arguments (Qwen3-Coder, Qwen3.5, Nemotron 3)",
    "keys": "keys and values between marks (GLM-4.5 to 4.7)",
    "endless": "name and JSON without an end (Mistral, Devstral)",
    "letters": "XML elements with attributes (MiniMax-M2)",
    "channels": "channels (GPT-OSS)",
    "sections": "sections after the content, typed arguments (Kimi K3)",
    "prefixed": "nested tags behind a prefix token (MiniMax-M3)",
    "statements": "Python calls (Olmo 3, SmolLM3)",
    "rows": "rows of JSON (MiniMax-M1)",
    "ledger": "a JSON list (Command A, Phi-4, Nemotron v2)",
}
COLUMNS = (
    "template", "calls", "parallel", "nested", "thoughts kept", "arguments stream", "forced",
    "reuse in a tool loop",
)  # fmt: skip
STEP = ({"label": "a", "steps": [1, 2]}, {"label": "b, c", "steps": []})
PLAN = Tool(
    "plan",
    "Plans.",
    {
        "type": "object",
        "properties": {
            "tasks": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "label": {"type": "string"},
                        "steps": {"type": "array", "items": {"type": "integer"}},
                    },
                },
            }
        },
    },
)
LONG = " ".join(["def main():"] * 40)


def page() -> str:
    """The page with the matrix that is measured now."""
    text = with_products(PAGE.read_text(encoding="utf-8"))
    before, _, behind = text.partition(BEGIN)
    old, _, after = behind.partition(END)
    forms = {**FORMATS, **INVENTED, **NESTED}
    rows = [row(label, made_tokenizer(forms[name])) for name, label in FORMS.items()]
    lines = [*_table(rows), "", "Published templates:", "", *(_published() or _kept(old))]
    return f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{after}"


def row(label: str, tokenizer: Any) -> Sequence[str]:
    """The cells of one template."""
    output_format = OutputFormat(tokenizer)
    prompt_maker = assemble_text(tokenizer).prompt_maker
    reading = template_report(tokenizer)
    answers = [message(name) for name in ANSWERS if name != "two"]
    n_read = sum(_is_read(output_format, prompt_maker, answer) for answer in answers)
    call = ToolCall("callid001", "plan", {"tasks": list(STEP)})
    return (
        label,
        "yes" if n_read == len(answers) else f"{n_read} of {len(answers)}",
        "yes" if _is_read(output_format, prompt_maker, message("two")) else "one per turn",
        _yes(
            _is_read(output_format, prompt_maker, Message(Role.ASSISTANT, "", tool_calls=(call,)))
        ),
        _kept_thoughts(reading),
        "yes" if _n_pieces(output_format, prompt_maker) > 1 else "whole",
        _yes(output_format.call_marks is not None),
        _share(reading.reuse.get("tool loop")),
    )


def _is_read(output_format: OutputFormat, prompt_maker: PromptMaker, answer: Message) -> bool:
    """Whether calls are read as the template writes them; parallel ones may get turns."""
    text = _written(output_format, prompt_maker, answer)
    reader = AnswerReader(output_format.description, (*TOOLS, PLAN))
    parts = [*reader.feed(text), *reader.finish()]
    calls = [(call.name, call.arguments) for part in parts for call in getattr(part, "calls", ())]
    return calls == [(call.name, call.arguments) for call in answer.tool_calls]


def _n_pieces(output_format: OutputFormat, prompt_maker: PromptMaker) -> int:
    """Number of pieces in which a long argument comes before its end."""
    call = ToolCall("callid001", "edit", {"path": "a.py", "old": LONG})
    text = _written(output_format, prompt_maker, Message(Role.ASSISTANT, "", tool_calls=(call,)))
    reader = AnswerReader(output_format.description, TOOLS)
    parts = [
        part for start in range(0, len(text), 4) for part in reader.feed(text[start : start + 4])
    ]
    return sum(isinstance(part, ArgumentsPart) for part in parts)


def _written(output_format: OutputFormat, prompt_maker: PromptMaker, answer: Message) -> str:
    """An answer as the template writes it; "" if it refuses."""
    asked = Conversation((Message(Role.USER, "hi"),), (*TOOLS, PLAN))
    whole = Conversation((*asked.messages, answer), asked.tools, add_generation_prompt=False)
    try:
        prompt = prompt_maker.text(asked)
        text = prompt_maker.text(whole)
    except BadRequest:
        return ""
    n_same = common_length(prompt, text)
    # The prompt may open another mark, which the answer shares the beginning of.
    start = n_same if n_same == len(prompt) else max(text.rfind("<", 0, n_same), 0)
    text = text[start if text.find(">", start) >= n_same else n_same :]
    added = output_format.tokenizer.added_tokens_decoder
    ends = [added[token].content for token in output_format.eos if token in added]
    return text[: min((text.find(end) for end in ends if end in text), default=len(text))]


def _kept_thoughts(reading: TemplateReport) -> str:
    if reading.keeps_thoughts_by:
        return "by " + ", ".join(f"`{key}`" for key in reading.keeps_thoughts_by)
    return "yes" if (reading.reuse.get("new user message") or 0) >= 0.99 else "in a tool loop"


def _published() -> list[str]:
    folder = option("FORMATS")
    rows = []
    for template in sorted(Path(folder, "models/templates").glob("*.jinja")) if folder else ():
        with TemporaryDirectory() as temporary:
            rows.append(row(template.stem, tokenizer_of(template, Path(temporary))))
    return list(_table(rows)) if rows else []


def _kept(old: str) -> list[str]:
    """The rows of published templates that the page has."""
    match = re.search(r"Published templates:\n\n(.*?)\n*\Z", old, re.DOTALL)
    return match[1].strip().splitlines() if match else []


def _table(rows: Iterable[Sequence[str]]) -> Iterable[str]:
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|" + " --- |" * len(COLUMNS)
    for cells in rows:
        yield f"| {' | '.join(cells)} |"


def _yes(is_true: bool) -> str:
    return "yes" if is_true else "no"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
