"""Request fields that several dialects share, and their limits."""

import json
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypedDict, TypeVar, cast

import msgspec
from msgspec import Meta, Struct

from mlxstack.api.caller import CallerFields, caller_of
from mlxstack.api.guards import Connection
from mlxstack.core.conversation import Message, Role
from mlxstack.core.errors import BadRequest, UnknownModel
from mlxstack.core.image import MediaText
from mlxstack.core.request import SamplingParams
from mlxstack.service.parts.generation_options import (
    MAX_TOP_LOGPROBS,
    UNLIMITED,
    GenerationOptions,
    ToolChoiceMode,
)
from mlxstack.service.service import Service
from mlxstack.text.grammar.response_format import ResponseConstraint

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
MIN_TOP_P = 1e-6
MAX_BIAS_TEXTS = 1000
MAX_BIAS_TEXT = 1000
TOKEN_ID = re.compile(r"[+-]?[0-9]{1,18}")


class TextPart(Struct, frozen=True, tag_field="type", tag="text"):
    """Text part of llama-server's prompt object."""

    text: str


class PromptObject(Struct, frozen=True):
    """llama-server's prompt as an object: a text with images, or text parts in a row."""

    prompt_string: str | None = None
    content: list[TextPart] | None = None
    multimodal_data: list[Any] | None = None


Prompts = str | PromptObject | list[str | int | list[int | str] | PromptObject]
EmptyList = Annotated[list[Any], Meta(max_length=0)]
"""An object without keys, as PHP writes it."""
Share = Annotated[float, Meta(ge=0, le=1)]
Factor = Annotated[float, Meta(gt=0)]
"""A penalty, of which 1 is neutral."""
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
"""A number of alternative tokens."""
TextPrompt = str | tuple[int | str, ...]
Prompt = TextPrompt | MediaText
"""One prompt: a text, token ids and texts in a row, or a text with images."""
Stop = str | list[str | None] | None
LogitBias = dict[str, float | bool] | list[list[Any]]

GUIDED = ("json", "regex", "choice", "grammar")


class StructuredOutputs(TypedDict, total=False):
    """vLLM's constraint of an answer, in the first field that is given."""

    json: dict[str, Any] | str | None
    regex: str | None
    choice: list[str] | None
    grammar: str | None
    json_object: bool | None


class Fields(CallerFields, kw_only=True):
    """Unknown fields are ignored; every field may be absent or null.

    `limits` are the fields that bound the answer, the first one given counts; `least` is the
    smallest bound.
    """

    limits: ClassVar[tuple[str, ...]] = ("n_predict", "max_tokens")
    least: ClassVar[int] = 1

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
        response_format=_shape(body),
        thinking_budget=thinking_budget(body),
        caller=caller_of(body, connection),
    )


def bound(n: int, most: int, name: str, what: str) -> None:
    """Raise BadRequest for more than `most` items in a field."""
    if n > most:
        raise BadRequest(f"{name}: at most {most} {what}, got {n}", name)


def n_parts(contents: Iterable[Any]) -> int:
    """Number of parts in all contents that are lists."""
    return sum(len(content) for content in contents if isinstance(content, list))


def _first_given(body: Fields, *fields: str) -> tuple[str, Any]:
    """Name and value of the first given field; None without one."""
    given = ((name, value) for name in fields if (value := getattr(body, name)) is not None)
    return next(given, ("", None))


def limit(body: Fields) -> int | None:
    """Token limit of the response, None without one. Raises BadRequest."""
    name, value = _first_given(body, *body.limits)
    if value is not None and value != UNLIMITED and value < body.least:
        raise BadRequest(
            f"{name} is {value}; it must be at least {body.least}, or -1 for no limit", name
        )
    return cast(int | None, value)


def thinking_budget(body: Fields) -> int | None:
    """Most tokens of reasoning; a negative number removes the limit."""
    _, budget = _first_given(body, *BUDGETS)
    return None if budget is None or budget < 0 else budget


def _shape(body: Fields) -> ResponseConstraint | None:
    """Constraint by the fields of llama-server and vLLM. Raises BadRequest."""
    if body.grammar:
        return ResponseConstraint(grammar=body.grammar, param="grammar")
    if body.json_schema is not None:
        return ResponseConstraint(body.json_schema, param="json_schema")
    older = {kind: getattr(body, f"guided_{kind}") for kind in GUIDED}
    newer: Mapping[str, Any] = body.structured_outputs or {}
    return _structured(newer, "structured_outputs.") or _structured(older, "guided_")


def _structured(given: Mapping[str, Any], prefix: str) -> ResponseConstraint | None:
    """Constraint of the first field that is given. Raises BadRequest."""
    kind = next((name for name, value in given.items() if value not in (None, False)), "")
    value = given.get(kind)
    param = f"{prefix}{kind}"
    match kind:
        case "":
            return None
        case "regex":
            return ResponseConstraint(regex=value, param=param)
        case "choice":
            return ResponseConstraint(regex="|".join(map(re.escape, value or ())), param=param)
        case "grammar":
            return ResponseConstraint(grammar=value, param=param)
    return ResponseConstraint(_schema(value, param) if kind == "json" else {}, param=param)


def _schema(schema: Any, param: str) -> Any:
    """Schema, which may be the text of one. Raises BadRequest."""
    if not isinstance(schema, str):
        return schema
    try:
        return msgspec.json.decode(schema, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise BadRequest(f"{param} is no schema: {error}", param) from None


def converted(value: Any, kind: type[T], at: str) -> T:
    """Value at `at` as a type. Raises BadRequest with the field's path."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        path = at + place.removesuffix("`")
        raise BadRequest(f"{path}: {what}", path) from None


def refuse(body: Struct, names: Iterable[str], why: str = "") -> None:
    """Raise BadRequest for a given field of these."""
    for name in names:
        if getattr(body, name):
            raise BadRequest(f"{name} is not supported{why}", name)


def only_one(n: int | None) -> None:
    """Raises BadRequest where an answer has one choice."""
    if n not in (None, 1):
        raise BadRequest(f"n is {n}; one choice per request is served", "n")


def n_logprobs(is_wanted: bool | None, n_top: int | None) -> int | None:
    """Number of alternatives by `logprobs` and `top_logprobs`."""
    return n_top or 0 if is_wanted else None


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
    _, repetition = _first_given(body, "repeat_penalty", "repetition_penalty")
    window = _given(body.repeat_last_n, _given(body.repetition_context_size, defaults.window))
    has_penalties = window != 0
    return SamplingParams(
        temperature=max(0.0, _given(body.temperature, defaults.temperature)),
        top_p=max(_given(body.top_p, defaults.top_p), MIN_TOP_P),
        top_k=max(0, _given(body.top_k, defaults.top_k)),
        min_p=_given(body.min_p, defaults.min_p),
        seed=_seed(body.seed),
        repetition_penalty=_given(repetition, defaults.repetition_penalty)
        if has_penalties
        else 1.0,
        presence_penalty=(body.presence_penalty or 0.0) if has_penalties else 0.0,
        frequency_penalty=(body.frequency_penalty or 0.0) if has_penalties else 0.0,
        window=n_ctx if window < 0 else min(max(window, 1), n_ctx),
        logit_bias=tuple((key, value) for key, value in biases if isinstance(key, int)),
        top_logprobs=n_logprobs,
    )


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


def _seed(seed: int | None) -> int | None:
    """Seed as 64 bits, or None for a random (negative) one."""
    return None if seed is None or seed < 0 else seed % 2**63


def stops(stop: Stop, name: str) -> tuple[str, ...]:
    """Stop strings. Raises BadRequest for too many, or for one too long."""
    sequences = tuple(word for word in ([stop] if isinstance(stop, str) else stop or ()) if word)
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
    biases = [_one_bias(pair) for pair in pairs]
    texts = [key for key, _ in biases if isinstance(key, str)]
    if len(texts) > MAX_BIAS_TEXTS or max(map(len, texts), default=0) > MAX_BIAS_TEXT:
        raise BadRequest(
            f"logit_bias may have {MAX_BIAS_TEXTS} texts of {MAX_BIAS_TEXT} characters each; "
            "give token ids",
            "logit_bias",
        )
    return biases


def _one_bias(pair: Any) -> tuple[int | str, float]:
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


def prompts(sent: Prompts, param: str = "prompt") -> tuple[Prompt, ...]:
    """One prompt or several, each of text, token ids, or both.

    As for llama-server, a list that holds a token id is one prompt. Raises BadRequest for an empty
    list.
    """
    if not isinstance(sent, list):
        return (_prompt(sent, param),)
    row = tuple(one for one in sent if isinstance(one, str | int))
    has_ids = any(isinstance(one, int) for one in row)
    if not sent or (has_ids and len(row) < len(sent)):
        raise BadRequest(
            f"{param} must be text, token ids, or a list of texts or of lists of token ids", param
        )
    if has_ids:
        return (row,)
    return tuple(_prompt(one, param) for one in sent)


def text_prompts(sent: Prompts, param: str) -> tuple[TextPrompt, ...]:
    """Prompts without images. Raises BadRequest."""
    found = prompts(sent, param)
    texts = tuple(one for one in found if not isinstance(one, MediaText))
    if len(texts) < len(found):
        raise BadRequest("multimodal_data is not supported; this model reads text only", param)
    return texts


def _prompt(sent: str | int | list[int | str] | PromptObject, param: str) -> Prompt:
    assert not isinstance(sent, int)
    if isinstance(sent, str):
        return sent
    if isinstance(sent, list):
        return tuple(sent)
    if sent.multimodal_data:
        return MediaText(sent.prompt_string or "", tuple(sent.multimodal_data))
    if sent.prompt_string is not None:
        return sent.prompt_string
    if sent.content is None:
        raise BadRequest(f"an object in {param} needs prompt_string or content", param)
    return "".join(part.text for part in sent.content)


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
    """JSON value without parts that only a vendor's servers read, and without files."""
    match value:
        case {"type": "base64"}:
            return "[file omitted]"
        case dict():
            known = {key: one for key, one in value.items() if not key.startswith("encrypted_")}
            return {key: readable(one) for key, one in known.items()}
        case list():
            return [readable(one) for one in value]
    return value


def tool_choice_mode(choice: Any) -> ToolChoiceMode:
    """Tool choice of OpenAI's APIs. Raises BadRequest.

    Some clients write a word into an object, and Mistral's or Anthropic's `any`.
    """
    match choice:
        case None:
            word = "auto"
        case "any" | {"type": "any"}:
            word = "required"
        case dict() if chosen_tool(choice) is not None:
            word = "required"
        case {"allowed_tools": {"mode": word}} | {"mode": word} | {"type": word} | word:
            pass
    if word not in list(ToolChoiceMode):
        raise BadRequest(
            f"tool_choice is {choice!r}; known are none, auto, required, or a tool that the client "
            "runs, and not a vendor's servers",
            "tool_choice",
        )
    return ToolChoiceMode(word)


def require_offered(kinds: Sequence[str], n_offered: int) -> None:
    """Raise BadRequest for tools of these types of which none is offered."""
    if kinds and not n_offered:
        raise BadRequest(
            f"tools[0].type is {kinds[0]!r}, which is not offered here: a tool that runs on a "
            "vendor's servers, or has no schema; offer a function that the client runs",
            "tools[0].type",
        )


def allowed_tools(choice: Any, name_of: Callable[[Any], str | None]) -> tuple[str, ...]:
    """Names of the tools that a `tool_choice` allows; none if all are."""
    match choice:
        case {"tools": list(tools)} | {"allowed_tools": {"tools": list(tools)}}:
            return tuple(filter(None, map(name_of, tools)))
    return ()


def chosen_tool(choice: Any) -> str | None:
    """Name of the tool in a `tool_choice`, in either form."""
    if not isinstance(choice, dict):
        return None
    inner = choice.get("function") or choice.get("custom")
    name = inner.get("name") if isinstance(inner, dict) else choice.get("name")
    return name if isinstance(name, str) else None


SCHEMA_KEYS = {"type", "properties", "anyOf", "$ref"}


class ResponseFormat(Struct):
    """Output format; `schema` next to `json_object` is llama-server's form."""

    type: str | None = None
    json_schema: dict[str, Any] | None = None
    schema: dict[str, Any] | None = None


def format_constraint(spec: ResponseFormat | None, param: str) -> ResponseConstraint | None:
    """Constraint of a format by its schema, None for text.

    The schema stands in `json_schema`, beside it, or in its place. Raises BadRequest for a schema
    that is none, and for an unknown type.
    """
    if spec is None or spec.type in (None, "text"):
        return None
    if spec.type not in ("json_object", "json_schema"):
        raise BadRequest(
            f"{param}.type is {spec.type!r}; known are text, json_object, json_schema",
            f"{param}.type",
        )
    inner = spec.json_schema or {}
    found = inner.get("schema") or spec.schema or (inner if SCHEMA_KEYS & inner.keys() else {})
    if not isinstance(found, dict):
        raise BadRequest(f"{param}: the schema must be an object, got {found!r:.20}", param)
    return ResponseConstraint(found, param=param)


def format_instruction(wanted: ResponseConstraint | None) -> tuple[Message, ...]:
    """Instruction to answer in a JSON format; none without one."""
    if wanted is None:
        return ()
    line = "Answer with one JSON object and nothing else."
    if wanted.schema:
        schema = json.dumps(wanted.schema, ensure_ascii=False)
        line += f" It must match this JSON schema: {schema}"
    return (Message(Role.SYSTEM, line),)
