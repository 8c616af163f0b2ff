"""Descriptions of call syntaxes, as published templates write them."""

from mlxstack.features.formats.families import FAMILIES
from mlxstack.features.formats.syntax import (
    ARGUMENTS,
    ID,
    NAME,
    CallSyntax,
    DerivedFormat,
    JsonBody,
    NamedBody,
    TaggedBody,
)

OBJECT = JsonBody(
    ('{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}"), ("name",), ("arguments",)
)
WITH_ID = (*OBJECT.parts[:4], ', "id": "', ID, '"}')
CODER = TaggedBody((NAME, ">\n"), "\n<parameter=", ">\n", "\n</parameter>")
KEYS = TaggedBody((NAME,), "\n<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>")
INVOKE = TaggedBody((NAME, '">'), '\n<parameter name="', '">', "</parameter>")
TYPED = TaggedBody(
    (NAME, '">'),
    '\n<parameter name="',
    '" string="{type}">',
    "</parameter>",
    types=(("string", "true"), *((one, "false") for one in ("integer", "number", "boolean"))),
)
SYNTAXES = {
    "json_tools": CallSyntax(OBJECT, opens="<tool_call>\n", closes="\n</tool_call>", between="\n"),
    "json_list": CallSyntax(
        JsonBody(WITH_ID, ("name",), ("arguments",), ("id",), is_list=True),
        opens="[TOOL_CALLS]",
        between=", ",
    ),
    "qwen3_coder": CallSyntax(
        CODER, opens="<tool_call>\n<function=", closes="\n</function>\n</tool_call>", between="\n"
    ),
    "glm47": CallSyntax(KEYS, opens="<tool_call>", closes="\n</tool_call>", between="\n"),
    "minimax_m2": CallSyntax(
        INVOKE,
        section_opens="<minimax:tool_call>\n",
        section_closes="\n</minimax:tool_call>",
        opens='<invoke name="',
        closes="\n</invoke>",
        between="\n",
    ),
    "typed": CallSyntax(
        TYPED,
        section_opens="<calls>\n",
        section_closes="\n</calls>",
        opens='<invoke name="',
        closes="\n</invoke>",
        between="\n",
    ),
    "json_text": CallSyntax(
        TaggedBody((NAME, ">"), "<set ", "=", "/>", has_json_text=True),
        opens="<call ",
        closes="</call>",
    ),
    "named_with_id": CallSyntax(NamedBody((NAME, "[CALL_ID]", ID, "[ARGS]")), opens="[TOOL_CALLS]"),
}
FORMATS = {name: DerivedFormat(name, calls=syntax) for name, syntax in SYNTAXES.items()} | {
    one.format.name: one.format for one in FAMILIES if one.format.name != "functionary"
}
