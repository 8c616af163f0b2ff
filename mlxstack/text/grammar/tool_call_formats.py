"""How each family of models writes its tool calls, for the grammar of a forced one.

One form per parser of mlx-lm, which reads the calls back; the marks around them are the parser's.
"""

import json
import re
from collections.abc import Callable, Container

from msgspec import Struct

from mlxstack.core.conversation import Tool
from mlxstack.text.grammar.lark_builder import LarkBuilder, quoted
from mlxstack.text.grammar.python_and_gemma_calls import (
    function_gemma_call,
    gemma_call,
    python_call,
)
from mlxstack.text.grammar.tagged_calls import EDGE_SPACES, NULL, TagFormat, tagged

Writer = Callable[[Tool, LarkBuilder], str | None]


class ToolCallFormat(Struct, frozen=True):
    """`call` writes one call of a tool; it gives None if the family has no words for it.

    `between` stands between calls that share a pair of marks; None: each has marks of its own.
    `opens` and `closes` stand inside the marks, around all calls. `is_last`: nothing follows a
    call.
    """

    call: Writer
    between: str | None = None
    opens: str = ""
    closes: str = ""
    is_last: bool = False


def json_call(before: str, after: str, names: str = ".+") -> Writer:
    """The writer of calls with JSON between `before`, which holds `{name}`, and `after`."""

    def call(tool: Tool, builder: LarkBuilder) -> str | None:
        if not re.fullmatch(names, tool.name):
            return None
        arguments = builder.json({"type": "object", **tool.parameters}, {})
        return f"{builder.call_opening(before, tool.name)} {arguments} {builder.literal(after)}"

    return call


def json_object(tool: Tool, builder: LarkBuilder) -> str:
    """A call as one JSON object."""
    named = {"type": "object", **tool.parameters}
    head = f'{{"name": {json.dumps(tool.name)}, "arguments": '
    return f'{quoted(head)} {builder.json(named, {})} "}}"'


GLM = TagFormat(
    opens="{name}\n",
    argument="<arg_key>{key}</arg_key>\n<arg_value>",
    argument_closes="</arg_value>\n",
    closes="",
    never=("</arg_value>", "</tool_call>"),
    avoided=(),
)
FORMS = {
    "json_tools": ToolCallFormat(json_object),
    "qwen3_coder": ToolCallFormat(
        tagged(
            TagFormat(
                opens="<function={name}>\n",
                argument="<parameter={key}>\n",
                argument_closes="\n</parameter>\n",
                closes="</function>",
                never=("</parameter>", "</tool_call>"),
                avoided=(),
            )
        )
    ),
    "glm47": ToolCallFormat(tagged(GLM)),
    "laguna": ToolCallFormat(tagged(GLM)),
    "longcat": ToolCallFormat(
        tagged(
            TagFormat(
                opens="{name}\n",
                argument="<longcat_arg_key>{key}</longcat_arg_key>\n<longcat_arg_value>",
                argument_closes="</longcat_arg_value>\n",
                closes="",
                never=("</longcat_arg_value>", "</longcat_tool_call>"),
                bare='{"name": {name}, "arguments": {}}',
            )
        )
    ),
    "minimax_m2": ToolCallFormat(
        tagged(
            TagFormat(
                opens='<invoke name="{name}">\n',
                argument='<parameter name="{key}">',
                argument_closes="</parameter>\n",
                closes="</invoke>",
                never=("</parameter>", "</invoke>", "</minimax:tool_call>"),
                avoided=(),
            )
        ),
        between="\n",
    ),
    "minicpm5": ToolCallFormat(
        tagged(
            TagFormat(
                opens='"{name}">',
                argument='<param name="{key}">',
                argument_closes="</param>",
                closes="",
                never=("</param>", "</function>", "<![CDATA["),
                avoided=(*EDGE_SPACES, *NULL),
            )
        )
    ),
    "muse_spark": ToolCallFormat(
        tagged(
            TagFormat(
                opens='<atem:invoke name="{name}">\n',
                argument='<atem:parameter name="{key}">',
                argument_closes="</atem:parameter>\n",
                closes="</atem:invoke>",
                never=("</atem:parameter>", "</atem:invoke>", "</atem:function_calls>"),
                guesses=True,
            )
        ),
        between="\n",
    ),
    "kimi_k2": ToolCallFormat(
        json_call(
            "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            r"[^\s:<>]+",
        ),
        between="",
    ),
    "kimi_k3": ToolCallFormat(
        tagged(
            TagFormat(
                opens='<|open|>call tool="{name}" index="{index}"<|sep|>',
                argument='<|open|>argument key="{key}" type="{type}"<|sep|>',
                argument_closes="<|close|>argument<|sep|>",
                closes="<|close|>call<|sep|>",
                never=("<|close|>", "<|open|>"),
                avoided=(),
            )
        ),
        between="",
    ),
    "mistral": ToolCallFormat(json_call("{name}[ARGS]", "", r"[\w-]+"), between="[TOOL_CALLS]"),
    "pythonic": ToolCallFormat(python_call, between=", ", opens="[", closes="]"),
    "function_gemma": ToolCallFormat(function_gemma_call),
    "gemma4": ToolCallFormat(gemma_call),
    "harmony": ToolCallFormat(
        json_call("{name} <|constrain|>json<|message|>", "", r"[^\s<>]+"), is_last=True
    ),
}
OLD_MISTRAL = ToolCallFormat(json_object, between=", ", opens="[", closes="]")


def format_of(parser: str, vocabulary: Container[str]) -> ToolCallFormat | None:
    """The form that a parser reads, None if we know none; `vocabulary` tells old from new."""
    if parser == "mistral" and "[ARGS]" not in vocabulary:
        return OLD_MISTRAL
    return FORMS.get(parser)
