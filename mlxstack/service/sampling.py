"""Sampling of a request: its own fields, the preset's, the model's, a default."""

from typing import TypeVar

from mlxstack.core.model_info import SamplingDefaults
from mlxstack.core.preset import SamplingSpec
from mlxstack.core.request import SamplingParams
from mlxstack.service.generation_options import SamplingOverrides

T = TypeVar("T")
UNNAMED = SamplingDefaults(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
"""llama-server's defaults, where neither preset nor model sets any (docs/decisions/0013)."""

LEAST_TOP_P = 1e-6
SHAPES = ("temperature", "top_k", "top_p", "min_p")
"""Fields that shape the distribution; a preset or model that sets one has chosen them all."""


def is_chosen(source: SamplingSpec | SamplingDefaults) -> bool:
    """Whether a preset or model sets any field that shapes the distribution."""
    return any(getattr(source, name) is not None for name in SHAPES)


def sampling(
    overrides: SamplingOverrides, preset: SamplingSpec, model: SamplingDefaults, n_ctx: int
) -> SamplingParams:
    """Sampling parameters: the request's, else the preset's, the model's, neutral ones.

    `UNNAMED` takes the place of a model's where neither preset nor model chooses. As for
    llama-server, penalties look at the whole context for a window of -1, and are off for one of 0.
    """
    window = SamplingParams().window if overrides.window is None else overrides.window
    has_penalties = window != 0
    card = model if is_chosen(preset) or is_chosen(model) else UNNAMED
    repetition = _first(
        overrides.repetition_penalty, preset.repetition_penalty, model.repetition_penalty, 1.0
    )
    top_p = _first(overrides.top_p, preset.top_p, card.top_p, 1.0)
    return SamplingParams(
        temperature=max(
            0.0, _first(overrides.temperature, preset.temperature, card.temperature, 1.0)
        ),
        top_p=max(top_p, LEAST_TOP_P),
        top_k=max(0, _first(overrides.top_k, preset.top_k, card.top_k, 0)),
        min_p=_first(overrides.min_p, preset.min_p, card.min_p, 0.0),
        seed=_seed(overrides.seed),
        repetition_penalty=repetition if has_penalties else 1.0,
        presence_penalty=(overrides.presence_penalty or 0.0) if has_penalties else 0.0,
        frequency_penalty=(overrides.frequency_penalty or 0.0) if has_penalties else 0.0,
        window=n_ctx if window < 0 else min(max(window, 1), n_ctx),
        logit_bias=overrides.logit_bias,
        top_logprobs=overrides.top_logprobs,
    )


def default_sampling(preset: SamplingSpec, model: SamplingDefaults, n_ctx: int) -> SamplingParams:
    """Sampling of a request that sets nothing."""
    return sampling(SamplingOverrides(), preset, model, n_ctx)


def described(params: SamplingParams) -> str:
    """Temperature and every rule that is not neutral; greedy for temperature 0."""
    neutral = SamplingParams()
    penalty = params.repetition_penalty
    suffix = f", repetition_penalty {penalty:g}" if penalty != neutral.repetition_penalty else ""
    if not params.temperature:
        return f"greedy{suffix}"
    rules = [
        f"{name} {getattr(params, name):g}"
        for name in SHAPES[1:]
        if getattr(params, name) != getattr(neutral, name)
    ]
    return ", ".join([f"temperature {params.temperature:g}", *rules]) + suffix


def _first(*values: T | None) -> T:
    return next(value for value in values if value is not None)


def _seed(seed: int | None) -> int | None:
    """Seed as 64 bits, or None for a random (negative) one."""
    return None if seed is None or seed < 0 else seed % 2**63
