"""Random schemas as tools and formats: a grammar or a refusal, and never at another's cost."""

import json
import re
from random import Random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from mlxstack.core.conversation import Tool
from mlxstack.core.errors import BadRequest
from mlxstack.core.preset import ModelSpec, Preset
from mlxstack.features.formats.grammar.forced_tool_call import ForcedCalls
from mlxstack.service.parts.text_assembly import assemble_text_processor
from mlxstack.service.parts.text_processor import TextProcessor
from mlxstack.text.grammar.compile_messages import warned_keywords
from mlxstack.text.grammar.json_rules import JsonRules
from mlxstack.text.grammar.lark_builder import LarkBuilder
from mlxstack.text.grammar.schema_grammar import ResponseConstraint, schema_grammar
from tests.repetition import in_soak
from tests.text.random_schemas import SchemaMaker
from tests.text.test_json_rules import BYTES

GOOD = Tool(
    "weather",
    "",
    {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]},
)
N_SCHEMAS = 40
OF_SEVERAL = ("incompatible types", "stack level exceeded", "sibling keys are not supported")
"""Words of messages about parts that do not go together."""
seeds = pytest.mark.parametrize("seed", [0, *in_soak(*range(1, 40))])


@pytest.fixture(scope="module")
def text_processor(chatml: Any) -> Any:
    made = assemble_text_processor(chatml, Preset(model=ModelSpec(id="tiny")), len(chatml))
    yield made
    made.threads.close(BadRequest("the test is over"))


def schemas(seed: int, fault_rate: float) -> list[dict[str, Any]]:
    return [SchemaMaker(Random(f"{seed} {index}"), fault_rate).root() for index in range(N_SCHEMAS)]


def is_call(text_processor: TextProcessor, rules: Any, city: str) -> bool:
    text = f'\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
    tokens = text_processor.tokenizer.encode(text, add_special_tokens=False)
    return bool(rules.deep_copy().try_consume_tokens(tokens) == len(tokens))


@pytest.mark.slow
@seeds
async def test_a_schema_takes_no_grammar_from_another_tool(
    text_processor: TextProcessor, seed: int
) -> None:
    marks = text_processor.output_format.call_marks
    assert marks is not None
    for schema in schemas(seed, 0.15):
        tools = (GOOD, Tool("odd", "", schema))
        rules = await text_processor.constraints.call_rules(
            ForcedCalls(tools, marks, is_single=True)
        )
        trigger = await text_processor.constraints.free_calls(tools, is_single=False)
        assert trigger is not None, schema
        for one in (rules, trigger.openings[0].rules()):
            assert is_call(text_processor, one, "Paris"), schema
            assert not is_call(text_processor, one, "Rome"), schema


@pytest.mark.slow
@seeds
async def test_a_refused_format_names_the_part_that_its_message_is_about(
    text_processor: TextProcessor, seed: int
) -> None:
    n_refused = 0
    reasons = list[tuple[str, str | None]]()
    for schema in schemas(seed, 0.3):
        try:
            await text_processor.constraints.shape_rules(ResponseConstraint(schema))
        except BadRequest as error:
            n_refused += 1
            reason, _, rest = error.message.partition("; this is at ")
            path = rest.partition(" of the schema")[0]
            assert path, (error.message, schema)
            names = path.split("/")[1:]
            unsatisfiable = re.search("required property '(.*)' is unsat", reason)
            if unsatisfiable is not None:
                assert unsatisfiable[1] in names
            elif not any(text in reason for text in OF_SEVERAL):
                part = alone(schema, names)
                if names[0] == "$defs":
                    part["$ref"] = f"#/$defs/{names[1]}"
                reasons.append((reason, problem(part)))
    assert n_refused > N_SCHEMAS / 8
    for reason, of_part in reasons:
        assert of_part is not None and of_part.splitlines()[0] in reason, (reason, of_part)


def problem(schema: dict[str, Any]) -> str | None:
    try:
        grammar = schema_grammar(schema, "response_format")
    except BadRequest as error:
        return error.message
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    return matcher.get_error() if matcher.is_error() else None


def alone(schema: Any, path: list[str]) -> Any:
    """The schema with nothing but the part at a path, and the names that are required."""
    if not path:
        return schema
    if isinstance(schema, list):
        return [alone(schema[int(path[0])], path[1:])]
    needed = {"required": schema["required"]} if "required" in schema else {}
    return {**needed, path[0]: alone(schema[path[0]], path[1:])}


@pytest.mark.slow
@seeds
def test_a_random_value_of_the_rules_is_valid(seed: int) -> None:
    n_valid = 0
    for index, schema in enumerate(schemas(seed, 0.0)):
        builder = LarkBuilder({})
        try:
            grammar = builder.grammar(JsonRules(builder, schema).value(schema))
        except BadRequest:
            continue
        rules = LLMatcher(BYTES, LLMatcher.grammar_from_lark(grammar), log_level=0)
        text = None if rules.is_error() else written(rules, Random(f"{seed} {index}"))
        if text is not None:
            loose = builder.unenforced | warned_keywords(rules) | {"format"}
            jsonschema.validate(json.loads(text), enforceable_part(schema, loose))
            n_valid += 1
    assert n_valid > N_SCHEMAS / 3


def enforceable_part(schema: Any, loose: set[str]) -> Any:
    """The schema without keywords that the grammar does not enforce."""
    if isinstance(schema, list):
        return [enforceable_part(part, loose) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in ("enum", "const", "default") else enforceable_part(value, loose)
        for key, value in schema.items()
        if key not in loose
    }


def written(rules: LLMatcher, random: Random) -> str | None:
    """A random walk of bytes through the grammar; None for an endless one."""
    text = b""
    while not rules.is_accepting():
        mask = rules.compute_bitmask()
        allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
        assert allowed, text
        closing = [byte for byte in allowed if byte in b'"}],']
        text += bytes([random.choice(closing if closing and len(text) > 60 else allowed)])
        assert rules.consume_token(text[-1])
        if len(text) > 600:
            return None
    try:
        return text.decode()
    except UnicodeDecodeError:
        return None
