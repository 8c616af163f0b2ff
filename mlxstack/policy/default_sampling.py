"""Default sampling: the preset's, the model's, else that of llama-server."""

from functools import lru_cache
from typing import Any

from mlxstack.core.model_info import SamplingDefaults
from mlxstack.core.preset import SamplingSpec
from mlxstack.core.request import SamplingParams

UNNAMED = SamplingDefaults(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
"""llama-server's defaults, where neither preset nor model sets any (docs/decisions/0013)."""

SHAPES = ("temperature", "top_k", "top_p", "min_p")
"""Fields that shape the distribution; a preset or model that sets one has chosen them all."""

NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def is_chosen(source: SamplingSpec | SamplingDefaults) -> bool:
    """Whether a preset or model sets any field that shapes the distribution."""
    return any(getattr(source, name) is not None for name in SHAPES)


@lru_cache(maxsize=16)
def default_sampling(preset: SamplingSpec, model: SamplingDefaults) -> SamplingParams:
    """Sampling of a request that sets nothing."""
    card = UNNAMED
    if is_chosen(preset) or is_chosen(model):
        card = model
    sources = (preset, card, model)
    values: dict[str, Any] = dict(NEUTRAL)
    for source in reversed(sources):
        for name in NEUTRAL:
            value = getattr(source, name)
            if value is not None:
                values[name] = value
    return SamplingParams(**values)


def described(params: SamplingParams) -> str:
    """Temperature and every rule that is not neutral; greedy for temperature 0."""
    rules = [
        f"{name} {getattr(params, name):g}"
        for name, neutral in NEUTRAL.items()
        if name == "temperature" or getattr(params, name) != neutral
    ]
    if params.temperature:
        return ", ".join(rules)
    # Nothing but a penalty changes the likeliest token.
    return ", ".join(["greedy", *(rule for rule in rules if rule.startswith("repetition"))])
