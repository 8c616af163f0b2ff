"""Grammars of custom tools as patterns of their one argument."""

import logging
from collections.abc import Iterable

from msgspec.structs import replace

from mlxstack.core.conversation import InputGrammar, Tool
from mlxstack.text.grammar.lark_builder import whole_text
from mlxstack.text.grammar.lark_pattern import NoPattern, lark_pattern

log = logging.getLogger("mlxstack.service")


def with_patterns(tools: Iterable[Tool]) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """Tools with the patterns of their grammars, and paths of grammars without."""
    enforced: list[Tool] = []
    left_out: list[str] = []
    for tool in tools:
        if tool.input_grammar is None:
            enforced.append(tool)
            continue
        pattern = pattern_of(tool.input_grammar)
        if pattern is None:
            left_out.append(f"{tool.name}/format")
            enforced.append(tool)
            continue
        (name, schema), *_ = tool.parameters["properties"].items()
        properties = {name: {**schema, "pattern": f"^(?:{whole_text(pattern)})$"}}
        enforced.append(replace(tool, parameters={**tool.parameters, "properties": properties}))
    return tuple(enforced), tuple(left_out)


def pattern_of(grammar: InputGrammar) -> str | None:
    """Regular expression of the texts of a grammar, if there is one."""
    if grammar.syntax == "regex":
        return grammar.definition
    if grammar.syntax != "lark":
        return None
    try:
        return lark_pattern(grammar.definition)
    except NoPattern as error:
        log.info("the grammar of a custom tool has no pattern: %s", error)
        return None
