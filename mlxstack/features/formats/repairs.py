"""Rows of what models write in place of their syntax.

A row is read as if the template had it; one that no answer needs has no place here.
"""

from msgspec import Struct

from mlxstack.features.formats.syntax import (
    ID,
    NAME,
    CallSyntax,
    JsonBody,
    NamedBody,
    PythonBody,
    TaggedBody,
)

CALL = '{"name": "bash", "arguments": {"command": "ls"}}'
OBJECT = JsonBody((), ("name",), ("arguments",))
"""Call as an object, which any model may write."""


class ForeignSyntax(Struct, frozen=True):
    """Call in the syntax of another model."""

    answer: str
    syntax: CallSyntax


class ForeignMarks(Struct, frozen=True):
    """Marks of another model around calls."""

    opens: str
    closes: str = ""
    inside: str = CALL

    @property
    def answer(self) -> str:
        """An answer with these marks."""
        return f"{self.opens}{self.inside}{self.closes}"


class ForeignKeys(Struct, frozen=True):
    """Keys of an object that is a call, in place of `name` and `arguments`."""

    name: str
    arguments: str

    @property
    def answer(self) -> str:
        """A call with these keys."""
        return f'{{"{self.name}": "bash", "{self.arguments}": {{"command": "ls"}}}}'


def _elements(tag: str, sign: str, end: str, space: str) -> CallSyntax:
    body = TaggedBody((NAME, end), f"<parameter{sign}", f"{end}{space}", f"{space}</parameter>")
    return CallSyntax(body, opens=f"<{tag}{sign}", closes=f"</{tag}>")


SYNTAXES = (
    ForeignSyntax(
        "<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>",
        _elements("function", "=", ">", "\n"),
    ),
    ForeignSyntax(
        '<invoke name="bash">\n<parameter name="command">ls</parameter>\n</invoke>',
        _elements("invoke", ' name="', '">', ""),
    ),
    ForeignSyntax(
        '<function name="bash">\n<parameter name="command">\nls\n</parameter>\n</function>',
        _elements("function", ' name="', '">', "\n"),
    ),
    ForeignSyntax('[bash(command="ls")]', CallSyntax(PythonBody(is_list=False))),
    ForeignSyntax(
        'bash[CALL_ID]123456789[ARGS]{"command": "ls"}',
        CallSyntax(NamedBody((NAME, "[CALL_ID]", ID, "[ARGS]"))),
    ),
    ForeignSyntax('bash\n{"command": "ls"}', CallSyntax(NamedBody((NAME,)))),
)
ELEMENTS = ("<function=", "<function", "<invoke")
"""Beginnings of calls that are tags."""

MARKS = (
    ForeignMarks("<tool_call>", "</tool_call>"),
    ForeignMarks("<tool_calls>", "</tool_calls>", f"[{CALL}]"),
    ForeignMarks("<function_call>", "</function_call>"),
    ForeignMarks("<function_calls>", "</function_calls>", f"\n{SYNTAXES[1].answer}\n"),
    ForeignMarks("<tools>", "</tools>", f"\n{CALL}\n"),
    ForeignMarks("[TOOL_CALLS]", inside='bash[ARGS]{"command": "ls"}'),
    ForeignMarks("<|tool_call|>", "<|/tool_call|>"),
    ForeignMarks("<|python_start|>", "<|python_end|>", '[bash(command="ls")]'),
    ForeignMarks("<|python_tag|>", inside='bash(command="ls")'),
    ForeignMarks("functools", inside=f"[{CALL}]"),
)
KEYS = (
    ForeignKeys("function", "arguments"),
    ForeignKeys("tool", "parameters"),
    ForeignKeys("name", "args"),
    ForeignKeys("name", "input"),
    ForeignKeys("tool_name", "tool_input"),
    ForeignKeys("action", "action_input"),
)
NAME_KEYS = frozenset(row.name for row in KEYS)
ARGUMENT_KEYS = frozenset(row.arguments for row in KEYS)
LIST_KEY = "tool_calls"
"""Key of an object that holds a list of calls."""
