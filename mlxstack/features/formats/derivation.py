"""Derives the output format of a model from its chat template."""

import hashlib
from typing import Any

from msgspec.structs import replace

from mlxstack.core.conversation import Tool
from mlxstack.features.formats.answer_reader import read_answer
from mlxstack.features.formats.call_derivation import derive_calls
from mlxstack.features.formats.families import FAMILIES
from mlxstack.features.formats.probe_renderings import NAMES, TWO, TYPED, TemplateProbes
from mlxstack.features.formats.reasoning_derivation import derive_reasoning, derive_turn
from mlxstack.features.formats.syntax import (
    FALLBACK_CALLS,
    CallSyntax,
    DerivedFormat,
    FormatSource,
    PublishedBody,
)

MAX_KNOWN = 32
CHECKED: dict[str, dict[str, Any]] = {
    "code": {"key_one": '    if (a < b) {\n        return "x\\n";\n    }\n', "key_two": "\n\né 格"},
    "text like JSON": {"key_one": "5", "key_two": "[1, 2]"},
    "tags": {"key_one": "</parameter>", "key_two": "<tool_call>\n</tool_call> </think>"},
    "no arguments": {},
    **{kind: {f"key_{kind}": value} for kind, value in TYPED.items()},
    "two calls": TWO,
}
_known: dict[bytes, DerivedFormat] = {}


def derive_format(tokenizer: Any) -> DerivedFormat:
    """Output format of a model's TokenizerWrapper, cached by its inputs."""
    probes_source = str(getattr(tokenizer, "chat_template", None) or "")
    added = getattr(tokenizer, "added_tokens_decoder", {})
    spelled = repr((probes_source, sorted((token_id, t.content) for token_id, t in added.items())))
    published = getattr(tokenizer.tool_parser, "__module__", "")
    eos = sorted(tokenizer.eos_token_ids)
    key = hashlib.blake2b(f"{spelled}{published}{eos}".encode(), digest_size=16).digest()
    derived = _known.get(key)
    if derived is None:
        derived = _derive(tokenizer)
        if len(_known) >= MAX_KNOWN:
            _known.clear()
        _known[key] = derived
    return derived


def _derive(tokenizer: Any) -> DerivedFormat:
    probes = TemplateProbes(tokenizer)
    texts = (probes.source, *probes.tokens, str(tokenizer.tool_call_start or ""))
    family = next((row for row in FAMILIES if row.is_of(texts)), None)
    if family is not None and family.format.channels is not None:
        return family.format
    reasoning = derive_reasoning(probes)
    turn = derive_turn(probes, reasoning)
    base = DerivedFormat(
        reasoning=reasoning, wrappers=turn.wrappers, turn_ends=turn.ends, strays=turn.strays
    )
    calls = derive_calls(probes, turn, reasoning)
    if calls is not None:
        derived = replace(base, name=calls.body.kind, source=FormatSource.DERIVED, calls=calls)
        problems = _problems(derived, probes)
        if not problems:
            return derived
        base = replace(base, problems=problems, is_certain=False)
    if family is not None:
        return _completed(family.format, base)
    if (published := _published(tokenizer)) is not None:
        name = str(tokenizer.tool_parser.__module__).rpartition(".")[2]
        return replace(base, name=name, source=FormatSource.MLX_LM, calls=published)
    if calls is not None:
        return replace(derived, problems=base.problems, is_certain=False)
    # The prompt tells the model of a template without calls to write them so.
    fallback = replace(base, name="json", source=FormatSource.FALLBACK, calls=FALLBACK_CALLS)
    return fallback if probes.source else base


def _completed(family: DerivedFormat, base: DerivedFormat) -> DerivedFormat:
    """A family with the marks that were derived where it names none."""
    return replace(
        family,
        reasoning=family.reasoning or base.reasoning,
        wrappers=family.wrappers or base.wrappers,
        turn_ends=family.turn_ends or base.turn_ends,
        problems=base.problems,
    )


def _published(tokenizer: Any) -> CallSyntax | None:
    """The syntax that a parser of mlx-lm reads between its marks."""
    if not tokenizer.has_tool_calling or tokenizer.tool_parser is None:
        return None
    return CallSyntax(
        PublishedBody(parser=tokenizer.tool_parser),
        section_opens=tokenizer.tool_call_start or "",
        section_closes=tokenizer.tool_call_end or "",
    )


def _problems(derived: DerivedFormat, probes: TemplateProbes) -> tuple[str, ...]:
    """The probes whose calls are not read back as they were written."""
    schemas = {"string": {"type": "string"}, **{kind: {"type": kind} for kind in TYPED}}
    keys = {"key_one": "string", "key_two": "string", **{f"key_{kind}": kind for kind in TYPED}}
    parameters = {
        "type": "object",
        "properties": {key: schemas[kind] for key, kind in keys.items()},
    }
    tools = [Tool(name, "", parameters) for name in NAMES]
    problems = []
    for name, arguments in CHECKED.items():
        n_calls = 2 if arguments is TWO else 1
        turn = probes.turn("", probes.calls(*[arguments] * n_calls))
        if turn is None or any(word not in turn for word in (*NAMES[:n_calls], *arguments)):
            # A template may leave null out, or all but one call.
            continue
        text = probes.answer(turn)
        cuts = [text.find(eos) for eos in probes.eos if eos in text]
        read = read_answer(derived, text[: min(cuts)] if cuts else text, tools)
        written = [(name, arguments) for name in NAMES[:n_calls]]
        if [(call.name, call.arguments) for call in read.tool_calls] != written:
            problems.append(name)
    return tuple(problems)
