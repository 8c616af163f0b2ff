"""Hand-written formats that no rendering of a template explains.

A family is chosen by what a template contains, never by the name of a model.
"""

from collections.abc import Collection

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.features.formats.syntax import (
    ARGUMENTS,
    FALLBACK_CALLS,
    ID,
    NAME,
    CallSyntax,
    Channels,
    DerivedFormat,
    FormatSource,
    GemmaBody,
    JsonBody,
    NamedBody,
    PythonBody,
    ReasoningMarks,
    TaggedBody,
)


class Family(Struct, frozen=True):
    """Output format, and the texts that all its templates contain."""

    contains: tuple[str, ...]
    format: DerivedFormat

    def is_of(self, texts: Collection[str]) -> bool:
        """Whether each of its texts is in one of a template's texts."""
        return all(any(part in text for text in texts) for part in self.contains)


def _family(name: str, contains: tuple[str, ...], calls: CallSyntax, **fields: object) -> Family:
    format_ = DerivedFormat(name, FormatSource.FAMILY, calls=calls)
    return Family(contains, replace(format_, **fields))


HARMONY = Channels(
    starts="<|start|>assistant",
    message="<|message|>",
    ends=("<|end|>", "<|call|>", "<|return|>"),
    reasoning=r"analysis\s*$|analysis\s*<",
    call=r"to=(?P<space>functions\.)?(?P<name>[^\s<>]+)",
    answer="<|channel|>final<|message|>",
)
MUSE = Channels(
    starts="<|start|>assistant",
    message="<|message|>",
    ends=("<|eom|>", "<|eot|>"),
    reasoning=r"to=self",
    call=r"to=(?!user\b|self\b)(?P<name>[^\s<>]+)",
    answer=" to=user<|message|>",
    call_head=" to={name}<|message|>",
)
FUNCTIONARY = Channels(
    starts=">>>",
    message="\n",
    ends=("<|eot_id|>",),
    reasoning=r"(?!)",
    call=r"^(?:>>>)?(?!all\b)(?P<name>[\w.-]+)$",
    answer="all\n",
)
FAMILIES = (
    _family(
        "harmony",
        ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>"),
        CallSyntax(
            NamedBody((NAME, " <|constrain|>json<|message|>")),
            opens="<|channel|>commentary to=functions.",
            closes="<|call|>",
        ),
        channels=HARMONY,
    ),
    _family(
        "muse",
        ("to=self", "<|message|>", "<atem:"),
        CallSyntax(
            TaggedBody(
                (NAME, '">'),
                argument_opens='\n<atem:parameter name="',
                value_opens='">',
                value_closes="</atem:parameter>",
            ),
            section_opens="<atem:function_calls>\n",
            section_closes="\n</atem:function_calls>",
            opens='<atem:invoke name="',
            closes="\n</atem:invoke>",
            between="\n",
        ),
        channels=MUSE,
    ),
    _family("functionary", (">>>all",), CallSyntax(NamedBody((NAME, "\n"))), channels=FUNCTIONARY),
    _family(
        "gemma4",
        ("<|tool_call>call:",),
        CallSyntax(GemmaBody(), opens="<|tool_call>", closes="<tool_call|>"),
        reasoning=ReasoningMarks("<|channel>thought", "<channel|>"),
        strays=("<|channel>", "<|tool_response>"),
    ),
    _family(
        "function_gemma",
        ("<start_function_call>", "<escape>"),
        CallSyntax(
            GemmaBody(quote="<escape>", is_flat=True),
            opens="<start_function_call>",
            closes="<end_function_call>",
        ),
    ),
    _family(
        "kimi_k2",
        ("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        CallSyntax(
            NamedBody((NAME, ":", "{index}", "<|tool_call_argument_begin|>")),
            section_opens="<|tool_calls_section_begin|>",
            section_closes="<|tool_calls_section_end|>",
            opens="<|tool_call_begin|>functions.",
            closes="<|tool_call_end|>",
        ),
    ),
    _family(
        "pythonic",
        ("<|tool_call_start|>",),
        CallSyntax(
            PythonBody(), opens="<|tool_call_start|>", closes="<|tool_call_end|>", between=", "
        ),
    ),
    _family(
        "mistral_ids",
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        CallSyntax(NamedBody((NAME, "[CALL_ID]", ID, "[ARGS]")), opens="[TOOL_CALLS]"),
    ),
    _family(
        "mistral",
        ("[TOOL_CALLS]", "[ARGS]"),
        CallSyntax(NamedBody((NAME, "[ARGS]")), opens="[TOOL_CALLS]"),
    ),
    _family("json_tools", ("<tool_call>", "arguments"), FALLBACK_CALLS),
    _family(
        "bare_json",
        ('"name": ', '"parameters": '),
        CallSyntax(
            JsonBody(
                ('{"name": "', NAME, '", "parameters": ', ARGUMENTS, "}"),
                ("name",),
                ("parameters",),
            )
        ),
    ),
)
"""More particular families come first; the channels are never derived."""
