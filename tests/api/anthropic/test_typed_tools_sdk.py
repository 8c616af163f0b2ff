"""Schemas of Anthropic's typed client tools against the types of its own SDK."""

from typing import get_args

from anthropic.types.beta import BetaMemoryTool20250818Command

from mlxstack.api.dialects.anthropic.typed_tools import CLIENT_TOOLS


def test_the_memory_tool_has_the_commands_and_fields_of_the_sdk() -> None:
    union, *_ = get_args(BetaMemoryTool20250818Command)
    commands = {one.model_fields["command"].annotation: one for one in get_args(union)}
    names = {get_args(literal)[0] for literal in commands}
    fields = {name for one in commands.values() for name in one.model_fields}
    _, schema = CLIENT_TOOLS["memory"]
    assert set(schema["properties"]["command"]["enum"]) == names
    assert set(schema["properties"]) == fields
    always = set.intersection(
        *({n for n, f in one.model_fields.items() if f.is_required()} for one in commands.values())
    )
    assert set(schema["required"]) == always == {"command"}
