"""Request fields that several dialects share, and their limits."""

import json
import math
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar, cast

import msgspec
from msgspec import Meta, Struct, field

from mlxstack.api.caller import CallerFields, caller_of
from mlxstack.api.guards import Connection
from mlxstack.api.response_format import GUIDED, StructuredOutputs, field_constraint
from mlxstack.core.errors import BadRequest, UnknownModel
from mlxstack.core.loops import LoopStops
from mlxstack.core.request import UNLIMITED, SamplingParams
from mlxstack.service.parts.generation_options import MAX_TOP_LOGPROBS, GenerationOptions
from mlxstack.service.service import Service
from mlxstack.text.grammar.schema_grammar import ResponseConstraint

T = TypeVar("T")

MAX_STOPS = 64
MAX_STOP = 1000
MAX_MESSAGES = 20_000
MAX_PARTS = 100_000
MAX_CALLS = 20_000
MAX_TOOLS = 4_000
MAX_BIASES = 300_000
"""More than any vocabulary has tokens."""

BUDGETS = (
    "thinking_budget_tokens", "reasoning_budget_tokens", "thinking_token_budget", "thinking_budget",
)  # fmt: skip
"""Fields of llama-server, of vLLM and of Qwen's cloud."""
CACHE_HEADER = "x-mlx-stack-cache"
"""Header with the value of the field `cache`."""
CACHE_MODES = {"drop": True, "keep": False}
MIN_TOP_P = 1e-6
MAX_BIAS_TEXTS = 1000
MAX_BIAS_TEXT = 1000
TOKEN_ID = re.compile(r"[+-]?[0-9]{1,18}")


EmptyList = Annotated[list[Any], Meta(max_length=0)]
"""An object without keys, as PHP writes it."""
Share = Annotated[float, Meta(ge=0, le=1)]
Factor = Annotated[float, Meta(gt=0)]
"""A penalty, of which 1 is neutral."""
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
"""A number of alternative tokens."""
Stop = str | list[str | None] | None
LogitBias = dict[str, float | bool] | list[list[Any]]


class SchemaFields(Struct, kw_only=True):
    """Schema of a tool under three names.

    They are those of OpenAI's APIs, of Anthropic's and of MCP; some clients pass a tool on under
    the name of another API.
    """

    parameters: dict[str, Any] | EmptyList | None = None
    input_schema: dict[str, Any] | EmptyList | None = None
    mcp_schema: dict[str, Any] | EmptyList | None = field(default=None, name="inputSchema")


class Fields(CallerFields, kw_only=True):
    """Unknown fields are ignored; every field may be absent or null."""

    limits: ClassVar[tuple[str, ...]] = ("n_predict", "max_tokens")
    """Fields that bound the answer; the first one that is set counts."""
    least: ClassVar[int] = 1
    """Smallest bound."""

    model: str | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: Share | None = None
    top_k: int | None = None
    min_p: Share | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: Factor | None = None
    repeat_penalty: Factor | None = None
    repetition_context_size: int | None = None
    repeat_last_n: int | None = None
    logit_bias: LogitBias | None = None
    stop: Stop = None
    ignore_eos: bool | None = None
    n: int | None = None
    n_predict: int | None = None
    id_slot: int | None = None
    cache_prompt: bool | None = None
    cache: Any = None
    timings_per_token: bool | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    thinking_budget_tokens: int | None = None
    reasoning_budget_tokens: int | None = None
    thinking_token_budget: int | None = None
    thinking_budget: int | None = None
    stop_loops: bool | LoopStops | None = None


def options(
    body: Fields, request_id: str, n_logprobs: int | None, connection: Connection, service: Service
) -> GenerationOptions:
    """Generation options of a body.

    Raises BadRequest with the name of the field that cannot work, and as `caller_of` does.
    """
    max_tokens = limit(body)
    biases = _biases(body.logit_bias)
    return GenerationOptions(
        id=request_id,
        max_tokens=max_tokens,
        sampling=sampling(body, service.default_sampling, service.n_ctx, biases, n_logprobs),
        bias_texts=tuple((key, value) for key, value in biases if isinstance(key, str)),
        stop=stops(body.stop, "stop"),
        ignore_eos=bool(body.ignore_eos),
        slot=None if body.id_slot in (None, -1) else body.id_slot,
        use_cache=body.cache_prompt is not False,
        drops_kv=drops_kv(body, connection),
        thinking_budget=thinking_budget(body),
        stop_loops=_stop_loops(body, service.preset.sampling.stop_loops),
        response_format=_constraint(body),
        caller=caller_of(body, connection),
    )


def drops_kv(body: Fields, connection: Connection) -> bool | None:
    """Whether body or header drop the KV; None where both are silent."""
    # LiteLLM has an object in this field.
    name = body.cache if isinstance(body.cache, str) else None
    name = name or connection.headers.get(CACHE_HEADER)
    if name is None:
        return None
    return read_known(CACHE_MODES, name.strip().lower(), "cache")


def bound(n: int, limit: int, name: str, unit: str) -> None:
    """Raise BadRequest for more than `limit` items in a field."""
    if n > limit:
        raise BadRequest(f"{name}: at most {limit} {unit}, got {n}", name)


def n_parts(contents: Iterable[Any]) -> int:
    """Number of parts in all contents that are lists."""
    return sum(len(content) for content in contents if isinstance(content, list))


def _first_set(body: Fields, *fields: str) -> tuple[str, Any]:
    """Name and value of the first field that is set, else None."""
    for name in fields:
        value = getattr(body, name)
        if value is not None:
            return name, value
    return "", None


def _constraint(body: Fields) -> ResponseConstraint | None:
    """Constraint by the fields of llama-server and vLLM. Raises BadRequest."""
    guided = {kind: getattr(body, f"guided_{kind}") for kind in GUIDED}
    return field_constraint(body.grammar, body.json_schema, body.structured_outputs, guided)


def limit(body: Fields) -> int | None:
    """Token limit of the response, None without one. Raises BadRequest."""
    name, value = _first_set(body, *body.limits)
    if value is not None and value != UNLIMITED and value < body.least:
        raise BadRequest(
            f"{name} is {value}; it must be at least {body.least}, or -1 for no limit", name
        )
    return cast(int | None, value)


def thinking_budget(body: Fields) -> int | None:
    """Maximum number of reasoning tokens, or None; negative ones are UNLIMITED."""
    _, budget = _first_set(body, *BUDGETS)
    if budget is None:
        return None
    return max(cast(int, budget), UNLIMITED)


def _stop_loops(body: Fields, default: LoopStops) -> bool:
    """Whether repetitions end the answer; never by default with `ignore_eos`."""
    choice = body.stop_loops
    if choice is None:
        return default is LoopStops.AUTO and not body.ignore_eos
    return choice is True or choice is LoopStops.AUTO


def converted(value: Any, kind: type[T], path: str) -> T:
    """Value of the field `path` as a type. Raises BadRequest."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        reason, _, inner = str(error).partition(" - at `$")
        path = (path + inner.removesuffix("`")).removeprefix(".")
        raise BadRequest(f"{path}: {reason}", path) from None


def read_known(table: Mapping[str, T], name: str, param: str) -> T:
    """Entry of a table by a client's name for it. Raises BadRequest."""
    if name not in table:
        raise BadRequest(f"{param} is {name!r}; known are {', '.join(table)}", param)
    return table[name]


def refuse(body: Struct, names: Iterable[str], reason: str = "") -> None:
    """Raise BadRequest for a field of these that is set."""
    for name in names:
        if getattr(body, name):
            raise BadRequest(f"{name} is not supported{reason}", name)


def only_one(n: int | None) -> None:
    """Raises BadRequest where an answer has one choice."""
    if n not in (None, 1):
        raise BadRequest(f"n is {n}; one choice per request is served", "n")


def n_logprobs(has_logprobs: bool | None, n_top: int | None) -> int | None:
    """Number of alternatives by `logprobs` and `top_logprobs`."""
    if not has_logprobs:
        return None
    return n_top or 0


def sampling(
    body: Fields,
    defaults: SamplingParams,
    n_ctx: int,
    biases: Sequence[tuple[int | str, float]] = (),
    n_logprobs: int | None = None,
) -> SamplingParams:
    """Sampling parameters: the request's, else those of requests that set none.

    As for llama-server, penalties look at the whole context for a window of -1, and are off for one
    of 0.
    """
    _, repetition = _first_set(body, "repeat_penalty", "repetition_penalty")
    _, window = _first_set(body, "repeat_last_n", "repetition_context_size")
    window = _or_default(window, defaults.window)
    penalties = {
        "repetition_penalty": _or_default(repetition, defaults.repetition_penalty),
        "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
    }
    if window == 0:
        penalties = {"repetition_penalty": 1.0}
    return SamplingParams(
        temperature=max(0.0, _or_default(body.temperature, defaults.temperature)),
        top_p=max(_or_default(body.top_p, defaults.top_p), MIN_TOP_P),
        top_k=max(0, _or_default(body.top_k, defaults.top_k)),
        min_p=_or_default(body.min_p, defaults.min_p),
        seed=_seed(body.seed),
        window=n_ctx if window < 0 else min(max(window, 1), n_ctx),
        logit_bias=tuple((key, value) for key, value in biases if isinstance(key, int)),
        top_logprobs=n_logprobs,
        **penalties,
    )


def _or_default(value: T | None, default: T) -> T:
    return default if value is None else value


def _seed(seed: int | None) -> int | None:
    """Seed as 64 bits, or None for a random (negative) one."""
    if seed is None or seed < 0:
        return None
    return seed % 2**63


def stops(stop: Stop, name: str) -> tuple[str, ...]:
    """Stop strings. Raises BadRequest for too many, or for one too long."""
    if isinstance(stop, str):
        stop = [stop]
    sequences = tuple(filter(None, stop or ()))
    bound(len(sequences), MAX_STOPS, name, "sequences")
    longest = max(map(len, sequences), default=0)
    bound(longest, MAX_STOP, name, "characters per sequence")
    return sequences


def _biases(bias: LogitBias | None) -> list[tuple[int | str, float]]:
    """Logit biases by token id or, as in llama-server, by text.

    The keys of an object are ids where they are numbers. Raises BadRequest.
    """
    if isinstance(bias, dict):
        pairs: list[Any] = [
            (int(key) if TOKEN_ID.fullmatch(key) else key, value) for key, value in bias.items()
        ]
    else:
        pairs = list(bias or ())
    bound(len(pairs), MAX_BIASES, "logit_bias", "entries")
    biases = [_bias_of(pair) for pair in pairs]
    texts = [key for key, _ in biases if isinstance(key, str)]
    if len(texts) > MAX_BIAS_TEXTS or max(map(len, texts), default=0) > MAX_BIAS_TEXT:
        raise BadRequest(
            f"logit_bias may have {MAX_BIAS_TEXTS} texts of {MAX_BIAS_TEXT} characters each; "
            "give token ids",
            "logit_bias",
        )
    return biases


def _bias_of(pair: Any) -> tuple[int | str, float]:
    """llama-server's `false` forbids a token altogether."""
    try:
        key, value = pair
        if (isinstance(key, str) and key) or (isinstance(key, int) and not isinstance(key, bool)):
            if value is False:
                return key, -math.inf
            if math.isfinite(number := float(value)):
                return key, number
    except (TypeError, ValueError, OverflowError):
        pass
    raise BadRequest(
        f"logit_bias: {reprlib.repr(pair)} is not a pair of a token id or text and a finite number",
        "logit_bias",
    )


def schema_of(tool: SchemaFields) -> dict[str, Any]:
    """Schema of a tool under any name."""
    return dict(tool.parameters or tool.input_schema or tool.mcp_schema or {})


def names(service: Service) -> tuple[str, ...]:
    """Model names: alias first, then id, or a folder's last name."""
    return tuple(dict.fromkeys((service.name, service.preset.model.plain_id)))


def resolve_model(service: Service, model: str | None) -> str:
    """Model name to echo. Raises UnknownModel where the preset is strict."""
    if model is None:
        return service.name
    if service.preset.server.strict_models and model not in names(service):
        raise UnknownModel(f"model {model!r} is not served here; this is {service.name!r}")
    return model


def readable(value: Any) -> Any:
    """JSON value without files, and without parts for a vendor's servers."""
    match value:
        case {"type": "base64"}:
            return "[file omitted]"
        case dict():
            return {
                key: readable(field)
                for key, field in value.items()
                if not key.startswith("encrypted_")
            }
        case list():
            return [readable(member) for member in value]
    return value


def part_json(part: dict[str, Any]) -> str:
    """Part of an unknown type as JSON; "" without fields."""
    seen = readable(part)
    if seen.keys() <= {"type"}:
        return ""
    return json.dumps(seen, ensure_ascii=False)
