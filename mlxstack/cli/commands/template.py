"""`template`: findings about a model's chat template and output format."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxstack.cli.completion import preset_argument
from mlxstack.cli.output import as_json, escaped_json, say, table
from mlxstack.cli.verbs import Json

if TYPE_CHECKING:
    from mlxstack.core.conversation import Conversation
    from mlxstack.core.preset import Preset
    from mlxstack.text.prompt.report import TemplateReport

ModelArgument = Annotated[
    str, preset_argument("Whose template; a folder needs no weights.", "MODEL")
]
Line = Callable[[dict[str, Any]], dict[str, Any]]


def template(
    model: ModelArgument,
    render: Annotated[
        Path | None,
        typer.Option(
            "--render", metavar="FILE",
            help="Print the prompt of each chat body in a JSONL file; - reads stdin.",
        ),
    ] = None,
    parse: Annotated[
        Path | None,
        typer.Option(
            "--parse", metavar="FILE",
            help='Print the message of each {"body": ..., "raw": ...} in a JSONL file.',
        ),
    ] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Report the output format of a model and its template's limits."""
    from mlxstack.engine.loading.tokenizer_folder import load_tokenizer

    preset, folder = _preset_and_folder(model)
    tokenizer = load_tokenizer(folder)
    if not tokenizer.has_chat_template and render is None and parse is None:
        none = "none: a base model, which continues text (/v1/completions)"
        if json:
            as_json({"template": None})
        else:
            table(("WHAT", "FOUND"), [("template", none)])
        return
    if render is not None:
        _each(render, _rendering(preset, tokenizer))
    elif parse is not None:
        _each(parse, _parsing(preset, tokenizer))
    else:
        from mlxstack.text.assembly import template_report

        report = template_report(tokenizer)
        if json:
            as_json(report)
        else:
            _show(report)


def _preset_and_folder(model: str) -> "tuple[Preset, Path]":
    """The preset, and the folder of its tokenizer. Raises SetupError."""
    from mlxstack.config import presets
    from mlxstack.core.preset import ModelSpec, Preset
    from mlxstack.engine.loading.loader import locate
    from mlxstack.host.home import home_from

    folder = Path(model).expanduser()
    if folder.is_dir():
        return Preset(model=ModelSpec(id=str(folder.absolute())), name=folder.name), folder
    preset = presets.load(model, home_from(os.environ), []).preset
    return preset, locate(preset.model)


def _rendering(preset: "Preset", tokenizer: Any) -> Line:
    from mlxstack.text.assembly import assemble_text

    text = assemble_text(tokenizer, preset.sampling.thinking, preset.template)

    def render(body: dict[str, Any]) -> dict[str, Any]:
        prompt = text.prompt_maker.make(_conversation(body))
        return {"prompt": prompt.text, "tokens": list(prompt.tokens)}

    return render


def _parsing(preset: "Preset", tokenizer: Any) -> Line:
    from mlxstack.service.parts.stored_messages import write_call
    from mlxstack.text.assembly import assemble_text

    text = assemble_text(tokenizer, preset.sampling.thinking, preset.template)

    def parse(line: dict[str, Any]) -> dict[str, Any]:
        conversation = _conversation(line["body"])
        prompt = text.prompt_maker.make(conversation)
        message = text.answer_format.read(
            line["raw"],
            conversation.tools,
            is_in_thinking=prompt.is_in_thinking,
            is_open=conversation.continue_final,
        )
        return {
            "role": "assistant",
            "content": message.content,
            "reasoning_content": message.reasoning_content,
            "tool_calls": [write_call(call) for call in message.tool_calls],
            "n_unparsed": message.n_unparsed,
        }

    return parse


def _conversation(body: Any) -> "Conversation":
    """Convert a chat body to a conversation, as the chat endpoint does."""
    import msgspec

    from mlxstack.api.dialects.openai_chat.request_schema import ChatBody
    from mlxstack.api.dialects.openai_chat.to_conversation import conversation
    from mlxstack.api.tool_choice import tool_choice_mode
    from mlxstack.service.parts.generation_options import ToolChoiceMode

    read = msgspec.convert(body, ChatBody)
    result = conversation(read)
    if tool_choice_mode(read.tool_choice) is ToolChoiceMode.NONE:
        return msgspec.structs.replace(result, tools=())
    return result


def _each(file: Path, work: Line) -> None:
    """Print a JSON line per input line, failures included."""
    import msgspec

    from mlxstack.core.errors import StackError

    for text in _lines(file):
        try:
            output = work(msgspec.json.decode(text))
        except StackError as error:
            output = {"error": error.message}
        except (msgspec.MsgspecError, KeyError, TypeError, AttributeError) as error:
            output = {"error": f"invalid line: {error!r}"}
        # A lone surrogate, which JSON can spell, is no UTF-8.
        say(escaped_json(msgspec.json.encode(output, enc_hook=str).decode()))


def _lines(file: Path) -> Iterator[str]:
    if str(file) == "-":
        yield from (line for line in sys.stdin if line.strip())
        return
    with file.open(encoding="utf-8") as lines:
        yield from (line for line in lines if line.strip())


def _show(report: "TemplateReport") -> None:
    rows = [
        ("format", f"{report.format.name} ({report.format.source})"),
        ("reasoning marks", _joined(report.format.reasoning or ())),
        ("call marks", _joined(report.format.calls)),
        ("end of an answer", _joined(report.format.turn_ends)),
        ("thinking on", _settings(report.thinking_on)),
        ("thinking off", _settings(report.thinking_off)),
        ("levels of effort", _settings(report.effort_levels)),
        ("keeps thoughts by", _settings(report.keeps_thoughts_by)),
        ("adapted", _settings(report.adaptations)),
        ("refused or lost", "; ".join(report.lost) or "nothing"),
        *(
            (f"reuse, {kind}", "-" if share is None else f"{100 * share:.0f} %")
            for kind, share in report.reuse.items()
        ),
        *(("note", text) for text in report.notes),
    ]
    table(("WHAT", "FOUND"), rows)


def _joined(texts: tuple[str, ...]) -> str:
    return " ".join(repr(text)[1:-1] for text in texts) or "-"


def _settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key}={_value(value)}" for key, value in settings.items()) or "-"


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "/".join(map(str, sorted(value)))
    return str(value)
