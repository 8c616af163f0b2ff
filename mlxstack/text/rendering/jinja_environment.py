"""Jinja sandbox for chat templates, and static analysis of their variables."""

import datetime
import json
import re
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment

GIVEN = frozenset(
    {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "documents"}
)
"""Globals of every template, which request variables cannot replace."""


OWN = frozenset({"datetime", "functions"})
"""Further values that templates get, unless the request has others."""

NONCHARACTER = re.compile(r"(?<!\\)((?:\\\\)*)\\u(fdd[0-9a-f])")
"""Non-ASCII character that JSON escapes; prompts have marks of it."""


class GenerationBlock(Extension):
    """`{% generation %}`: the assistant's text for training, here its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> SandboxedEnvironment:
    """The environment that published templates are written for.

    Lists may be changed, since templates of some models keep queues in them; a rendering gets
    copies of everything.
    """
    sandbox = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _refuse
    sandbox.globals["strftime_now"] = _now
    return sandbox


def free_variables(source: str) -> dict[str, tuple[str, ...]]:
    """Variables that a template reads, and texts they are compared to.

    Raises jinja2.TemplateError for a source that is no template.
    """
    sandbox = environment()
    tree = sandbox.parse(source)
    names = meta.find_undeclared_variables(tree) - GIVEN - OWN - set(sandbox.globals)
    compared: dict[str, list[str]] = {name: [] for name in sorted(names)}
    for comparison in tree.find_all(nodes.Compare):
        parts = [comparison.expr, *(operand.expr for operand in comparison.ops)]
        texts = [text for part in parts for text in _texts(part)]
        for name in {node.name for part in parts for node in _names(part)} & compared.keys():
            compared[name] += texts
    return {name: tuple(dict.fromkeys(texts)) for name, texts in compared.items()}


def _names(node: nodes.Node) -> list[nodes.Name]:
    own = [node] if isinstance(node, nodes.Name) else []
    return [*own, *node.find_all(nodes.Name)]


def _texts(node: nodes.Node) -> list[str]:
    constants = [node] if isinstance(node, nodes.Const) else node.find_all(nodes.Const)
    return [constant.value for constant in constants if isinstance(constant.value, str)]


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # The filter of Jinja escapes the letters of HTML.
    text = json.dumps(value, ensure_ascii=ensure_ascii, **options)
    # The marks inside of texts are no part of them, so that they must stay what they are.
    if ensure_ascii:
        return NONCHARACTER.sub(_unescaped, text)
    return text


def _unescaped(match: re.Match[str]) -> str:
    return match[1] + chr(int(match[2], 16))


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)


class Today(str):
    """Date of today as text, with functions of Python's `datetime`.

    Some templates take `datetime` for a text, others for the module or the class.
    """

    def __new__(cls) -> "Today":
        """The text of the date."""
        return super().__new__(cls, _now("%b %d %Y"))

    def now(self, *_: Any) -> datetime.datetime:
        """The time now."""
        return datetime.datetime.now().astimezone()

    today = utcnow = now

    def strftime(self, form: str) -> str:
        """The time now in this form."""
        return _now(form)

    @property
    def datetime(self) -> "Today":
        """The class in the module."""
        return self


Renderer = Callable[..., str]


def compiled(source: str) -> Renderer:
    """The rendering of one template, given its variables by name.

    `datetime` is today, and `functions`, where a template reads it, the tools as text.
    """
    sandbox = environment()
    template = sandbox.from_string(source)
    has_functions = "functions" in meta.find_undeclared_variables(sandbox.parse(source))

    def render(**variables: Any) -> str:
        own: dict[str, Any] = {"datetime": Today()}
        if has_functions:
            own["functions"] = _functions(variables.get("tools"))
        return template.render(**{**own, **variables})

    return render


def _functions(tools: Any) -> str:
    """Definitions of functions as text, for templates of before tools."""
    return _to_json([tool["function"] for tool in tools or ()], indent=4)
