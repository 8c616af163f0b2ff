"""Syntaxes that models write in place of their own."""

from mlxstack.text.formats.syntax import ID, NAME, CallSyntax, JsonBody, NamedBody, TaggedBody

FOREIGN = JsonBody((), ("name",), ("arguments",))
TAGGED = tuple(
    CallSyntax(
        TaggedBody((NAME, end), f"<parameter{sign}", f"{end}{space}", f"{space}</parameter>"),
        opens=f"<{tag}{sign}",
        closes=f"</{tag}>",
    )
    for tag, sign, end, space in (
        ("function", "=", ">", "\n"),
        ("invoke", ' name="', '">', ""),
        ("function", ' name="', '">', "\n"),
    )
)
MARKS = {
    "<tool_call>": "</tool_call>",
    "<tool_calls>": "</tool_calls>",
    "<function_call>": "</function_call>",
    "<function_calls>": "</function_calls>",
    "<tools>": "</tools>",
    "[TOOL_CALLS]": "",
    "<|tool_call|>": "<|/tool_call|>",
    "<|python_start|>": "<|python_end|>",
    "<|python_tag|>": "",
    "functools": "",
}
"""Marks of calls that models write in place of their own."""

ELEMENTS = ("<function=", "<function", "<invoke")
"""Beginnings of calls that are tags."""

NAMED = (NamedBody((NAME, "[CALL_ID]", ID, "[ARGS]")), NamedBody((NAME,)))
