"""llama-server's `timings` and OpenAI's `usage` of one piece of work."""

from collections.abc import Callable, Sequence

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from mlxstack.core.engine_events import RequestTimings
from mlxstack.service.response_parts import (
    ContentPart,
    GenerationFinished,
    GenerationStarted,
    ReasoningPart,
    ResponsePart,
)


class Timings(Struct, frozen=True):
    """cache_n + prompt_n = prompt tokens; 0.0 where a rate has no meaning.

    As in llama-server, `draft_n` is there only if something was drafted.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | UnsetType = UNSET
    draft_n_accepted: int | UnsetType = UNSET


class CachedTokens(Struct, frozen=True):
    """How much of the prompt came from the caches."""

    cached_tokens: int


class ReasoningTokens(Struct, frozen=True):
    """How much of the completion was thinking."""

    reasoning_tokens: int


class CompletionTokens(ReasoningTokens, frozen=True):
    """How the draft tokens fared, too."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class OpenAIUsage(Struct, frozen=True):
    """OpenAI's token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionTokens


def timings(work: RequestTimings) -> Timings:
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
        draft_n=work.n_drafted or UNSET,
        draft_n_accepted=work.n_accepted if work.n_drafted else UNSET,
    )


class Stopwatch:
    """Timings of a reply that is not over yet, as they look from the door."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._work = RequestTimings()
        self._began = self._first = clock()

    def hear(self, part: ResponsePart) -> None:
        """Count what a part brings."""
        now = self._clock()
        match part:
            case GenerationStarted():
                self._began = now
                self._work = RequestTimings(n_prompt=part.n_prompt, n_cached=part.n_cached)
            case ReasoningPart() | ContentPart():
                self._first = self._first if self._work.n_generated else now
                self._work = replace(
                    self._work,
                    n_generated=self._work.n_generated + len(part.notes),
                    prefill_s=max(0.0, self._first - self._began),
                    decode_s=now - self._first,
                )

    def timings(self) -> Timings:
        """What has been done so far."""
        return timings(self._work)


def usage(ended: Sequence[GenerationFinished], n_choices: int = 1) -> OpenAIUsage:
    """The sum over the choices of one answer, in which each prompt has `n_choices` of them.

    As OpenAI counts, a prompt counts once and every completion counts.
    """
    prompts = [one.work for one in ended[::n_choices]]
    n_prompt = sum(work.n_prompt for work in prompts)
    n_generated = sum(one.work.n_generated for one in ended)
    return OpenAIUsage(
        prompt_tokens=n_prompt,
        completion_tokens=n_generated,
        total_tokens=n_prompt + n_generated,
        prompt_tokens_details=CachedTokens(sum(work.n_cached for work in prompts)),
        completion_tokens_details=CompletionTokens(
            sum(one.n_reasoning for one in ended),
            sum(one.work.n_accepted for one in ended),
            sum(one.work.n_drafted - one.work.n_accepted for one in ended),
        ),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
