"""How a caller wants the reply, and what that means for this preset and this model."""

from enum import StrEnum
from typing import TypeVar

from msgspec import Struct

from mlxstack.core.errors import BadRequest, TooLong
from mlxstack.core.model_info import SamplingDefaults
from mlxstack.core.preset import SamplingSpec
from mlxstack.core.request import Priority, SamplingParams
from mlxstack.text.grammar.response_format import ResponseConstraint

T = TypeVar("T")

# OpenAI's default; only reached when request, preset and generation_config.json all say nothing.
TEMPERATURE = 1.0
MAX_TOP_LOGPROBS = 20
UNLIMITED = -1
"""A limit of tokens that is none but the context, as in llama-server."""
LEAST_TOP_P = 1e-6


class SamplingOverrides(Struct, frozen=True):
    """The sampling fields of a request; None where it says nothing.

    `bias_texts` are biases of each token of a text, beside `logit_bias` of token ids.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    window: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    bias_texts: tuple[tuple[str, float], ...] = ()
    top_logprobs: int | None = None


class ToolChoiceMode(StrEnum):
    """Whether tools may, must not, or must be called. The prompt is the same for all three."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


class GenerationOptions(Struct, frozen=True):
    """Everything about a request that is not its words.

    `called` is the tool that a required call must name, `shape` what the answer must look like,
    `thinking_budget` the most tokens of a thought.
    `max_tokens` None takes the preset's, UNLIMITED runs until the model ends or the context is
    full, 0 only computes the prompt. `slot` pins; `agent` is an explicit agent, `hint` a
    client's name for the conversation, `name` what people see of one that belongs to no explicit
    agent.
    `is_one_call` ends the reply after its first tool call, whose id begins with `call_prefix`.
    `is_first_turn`: the conversation holds no answer yet. `has_progress` wants the prompt's
    progress as parts.
    """

    id: str
    max_tokens: int | None = None
    sampling: SamplingOverrides = SamplingOverrides()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    slot: int | None = None
    agent: str | None = None
    session_hint: str | None = None
    display_name: str | None = None
    is_first_turn: bool = False
    use_cache: bool = True
    tool_choice: ToolChoiceMode = ToolChoiceMode.AUTO
    forced_tool: str | None = None
    response_format: ResponseConstraint | None = None
    thinking_budget: int | None = None
    call_prefix: str = "call_"
    is_one_call: bool = False
    has_progress: bool = False
    priority: Priority = Priority.NORMAL
    salt: str = ""
    request: str = ""


class ServiceBounds(Struct, frozen=True):
    """What this service can do: tokens per slot, slots, and the size of the vocabulary."""

    n_ctx: int
    n_slots: int
    n_vocab: int


def sampling(
    wish: SamplingOverrides, preset: SamplingSpec, model: SamplingDefaults, n_ctx: int
) -> SamplingParams:
    """The request's word counts, then the preset's, then the model's, then neutral.

    As for llama-server, penalties look at the whole context for a window of -1, and are off
    for one of 0.
    """
    window = SamplingParams().window if wish.window is None else wish.window
    has_penalties = window != 0
    repetition = _first(
        wish.repetition_penalty, preset.repetition_penalty, model.repetition_penalty, 1.0
    )
    top_p = _first(wish.top_p, preset.top_p, model.top_p, 1.0)
    return SamplingParams(
        temperature=max(
            0.0, _first(wish.temperature, preset.temperature, model.temperature, TEMPERATURE)
        ),
        top_p=max(top_p, LEAST_TOP_P),
        top_k=max(0, _first(wish.top_k, preset.top_k, model.top_k, 0)),
        min_p=_first(wish.min_p, preset.min_p, model.min_p, 0.0),
        seed=_seed(wish.seed),
        repetition_penalty=repetition if has_penalties else 1.0,
        presence_penalty=(wish.presence_penalty or 0.0) if has_penalties else 0.0,
        frequency_penalty=(wish.frequency_penalty or 0.0) if has_penalties else 0.0,
        window=n_ctx if window < 0 else min(max(window, 1), n_ctx),
        logit_bias=wish.logit_bias,
        top_logprobs=wish.top_logprobs,
    )


def check(options: GenerationOptions, bounds: ServiceBounds) -> None:
    """Raises BadRequest for what cannot work, before anything is computed."""
    if options.slot is not None and not 0 <= options.slot < bounds.n_slots:
        raise BadRequest(
            f"id_slot {options.slot} does not exist, this service has slots 0 to "
            f"{bounds.n_slots - 1}; -1 takes any",
            "id_slot",
        )
    for token, _ in options.sampling.logit_bias:
        if not 0 <= token < bounds.n_vocab:
            raise BadRequest(f"token {token} is not in the vocabulary", "logit_bias")


def room(n_prompt: int, max_tokens: int | None, n_ctx: int) -> int:
    """How many tokens may be generated; a wish for more is cut. Raises TooLong when none."""
    if n_prompt >= n_ctx:
        raise TooLong(n_prompt, n_ctx)
    return n_ctx - n_prompt if max_tokens is None else min(max_tokens, n_ctx - n_prompt)


def _first(*values: T | None) -> T:
    return next(value for value in values if value is not None)


def _seed(seed: int | None) -> int | None:
    """Negative means random, as for llama-server; an MLX key holds 64 bits."""
    return None if seed is None or seed < 0 else seed % 2**63
