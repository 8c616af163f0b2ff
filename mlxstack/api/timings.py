"""llama-server's `timings` and OpenAI's `usage` of one piece of work."""

from msgspec import Struct

from mlxstack.core.event import Work
from mlxstack.service.parts import Ended


class Timings(Struct, frozen=True):
    """cache_n + prompt_n = prompt tokens; 0.0 where a rate has no meaning."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class Cached(Struct, frozen=True):
    """How much of the prompt came from the caches."""

    cached_tokens: int


class Thought(Struct, frozen=True):
    """How much of the completion was thinking."""

    reasoning_tokens: int


class Usage(Struct, frozen=True):
    """OpenAI's token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Cached
    completion_tokens_details: Thought


def timings(work: Work) -> Timings:
    """Milliseconds and rates of both phases."""
    n_prompt, prompt_ms = work.n_prompt - work.n_cached, work.prefill_s * 1000
    n_predicted, predicted_ms = work.n_generated, work.decode_s * 1000
    return Timings(
        cache_n=work.n_cached,
        prompt_n=n_prompt,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=_ratio(prompt_ms, n_prompt),
        prompt_per_second=_ratio(n_prompt, work.prefill_s),
        predicted_n=n_predicted,
        predicted_ms=predicted_ms,
        predicted_per_token_ms=_ratio(predicted_ms, n_predicted),
        predicted_per_second=_ratio(n_predicted, work.decode_s),
    )


def usage(ended: tuple[Ended, ...]) -> Usage:
    """The sum over the choices of one answer."""
    n_prompt = sum(one.work.n_prompt for one in ended)
    n_generated = sum(one.work.n_generated for one in ended)
    return Usage(
        prompt_tokens=n_prompt,
        completion_tokens=n_generated,
        total_tokens=n_prompt + n_generated,
        prompt_tokens_details=Cached(sum(one.work.n_cached for one in ended)),
        completion_tokens_details=Thought(sum(one.n_reasoning for one in ended)),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
