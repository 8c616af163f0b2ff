"""Response fields that several dialects share: timings, usage, logprobs."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import asdict, replace

from mlxstack.core.engine_events import FinishReason, RequestTimings, SlotAssigned, TokenSampled
from mlxstack.core.loops import LoopStop
from mlxstack.core.response_parts import (
    ArgumentsPart,
    ContentPart,
    GenerationFinished,
    ReasoningPart,
    ResponsePart,
)

if TYPE_CHECKING:
    from mlxstack.service.parts.text_processor import TextProcessor


Loops = tuple[LoopStop, ...] | UnsetType
"""Repetitions that were ended, if there are any."""


class Timings(Struct, frozen=True):
    """Timings: cache_n + prompt_n = prompt tokens; undefined rates are 0.0.

    As in llama-server, each is a number, and `draft_n` is there only if something was drafted.
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


class PromptTokensDetails(Struct, frozen=True):
    """Reused tokens of a prompt, and those of its images."""

    cached_tokens: int
    image_tokens: int | UnsetType = UNSET


class ReasoningTokens(Struct, frozen=True):
    reasoning_tokens: int


class CompletionTokens(ReasoningTokens, frozen=True):
    """Reasoning tokens, and accepted and rejected draft tokens."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class OpenAIUsage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokens
    loops: Loops = UNSET


def timings(work: RequestTimings) -> Timings:
    """Milliseconds and rates of both phases.

    The first token comes with the prompt, so the rate of n tokens is that of n - 1 steps.
    """
    n_prompt = work.n_prompt - work.n_cached
    prompt_ms = work.prefill_s * 1000
    n_predicted = work.n_generated
    predicted_ms = work.decode_s * 1000
    n_steps = max(0, n_predicted - 1)
    return Timings(
        cache_n=work.n_cached,
        prompt_n=n_prompt,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=_ratio(prompt_ms, n_prompt),
        prompt_per_second=_ratio(n_prompt, work.prefill_s),
        predicted_n=n_predicted,
        predicted_ms=predicted_ms,
        predicted_per_token_ms=_ratio(predicted_ms, n_steps),
        predicted_per_second=_ratio(n_steps, work.decode_s),
        draft_n=work.n_drafted or UNSET,
        draft_n_accepted=work.n_accepted if work.n_drafted else UNSET,
    )


def is_limited(ended: GenerationFinished) -> bool:
    """Whether a limit cut the answer.

    A repetition is no limit: clients that ask for the rest would have the same again. A call that
    it cut must not run, though.
    """
    if ended.ending is FinishReason.LOOP:
        return ended.has_cut_call
    return ended.ending in (FinishReason.LENGTH, FinishReason.CONTEXT)


class Stopwatch:
    """Timings and usage of a reply under way, where it is sent."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._n_reasoning = 0
        self._work = RequestTimings()
        self._began = self._first = clock()

    def count(self, part: ResponsePart) -> None:
        """Count a part."""
        now = self._clock()
        match part:
            case SlotAssigned():
                self._began = now
                self._work = RequestTimings(n_prompt=part.n_prompt, n_cached=part.n_cached)
            case ReasoningPart() | ContentPart() | ArgumentsPart():
                if isinstance(part, ReasoningPart):
                    self._n_reasoning += len(part.notes)
                if not self._work.n_generated:
                    self._first = now
                self._work = replace(
                    self._work,
                    n_generated=self._work.n_generated + len(part.notes),
                    prefill_s=max(0.0, self._first - self._began),
                    decode_s=now - self._first,
                )

    def timings(self) -> Timings:
        """Timings so far."""
        return timings(self._work)

    def usage(self) -> OpenAIUsage:
        """Token counts so far."""
        n_reasoning = self._n_reasoning
        return usage([GenerationFinished(FinishReason.EOS, self._work, -1, n_reasoning)])


def usage(ended: Sequence[GenerationFinished], n_choices: int = 1) -> OpenAIUsage:
    """Token counts over the choices of one response, `n_choices` for each prompt.

    As OpenAI counts, a prompt counts once and every completion counts.
    """
    prompts = [reply.work for reply in ended[::n_choices]]
    n_prompt = sum(work.n_prompt for work in prompts)
    n_generated = sum(reply.work.n_generated for reply in ended)
    return OpenAIUsage(
        prompt_tokens=n_prompt,
        completion_tokens=n_generated,
        total_tokens=n_prompt + n_generated,
        prompt_tokens_details=PromptTokensDetails(
            sum(work.n_cached for work in prompts), sum(work.n_image for work in prompts) or UNSET
        ),
        completion_tokens_details=CompletionTokens(
            sum(reply.n_reasoning for reply in ended),
            sum(reply.work.n_accepted for reply in ended),
            sum(reply.work.n_drafted - reply.work.n_accepted for reply in ended),
        ),
        loops=tuple(stop for reply in ended for stop in reply.work.loops) or UNSET,
    )


def _ratio(part: float, whole: float) -> float:
    if not whole:
        return 0.0
    return part / whole


# JSON has no infinity; this is OpenAI's own floor.
LEAST = -9999.0


class Alternative(Struct, frozen=True):
    """Alternative token; `bytes` is exact where `token` cannot be."""

    id: int
    token: str
    bytes: tuple[int, ...]
    logprob: float


class SampledLogprob(Alternative, frozen=True):
    """The token that was chosen, among the most likely ones."""

    top_logprobs: tuple[Alternative, ...]


class Logprobs(Struct, frozen=True):
    """Chat: one entry per token."""

    content: tuple[SampledLogprob, ...]
    refusal: None = None


class LegacyLogprobs(Struct, frozen=True):
    """Completions: four parallel lists."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


def logprobs(notes: tuple[TokenSampled, ...], text_processor: "TextProcessor") -> Logprobs | None:
    """Logprobs of chat completions, None when there are none."""
    chosen = tuple(
        _chosen(note, note.logprob, text_processor) for note in notes if note.logprob is not None
    )
    return Logprobs(chosen) if chosen else None


def legacy(
    notes: tuple[TokenSampled, ...], text_processor: "TextProcessor", offset: int
) -> LegacyLogprobs | None:
    """`offset` is the length of the text before these tokens, in characters."""
    own = [note.logprob for note in notes if note.logprob is not None]
    if not own:
        return None
    tokens = [_text(text_processor.piece(note.token)) for note in notes]
    return LegacyLogprobs(
        tokens=tokens,
        token_logprobs=[_finite(logprob) for logprob in own],
        top_logprobs=[
            {_text(text_processor.piece(t)): _finite(p) for t, p in note.top} for note in notes
        ],
        text_offset=list(accumulate(map(len, tokens[:-1]), initial=offset)),
    )


def _chosen(note: TokenSampled, logprob: float, text_processor: "TextProcessor") -> SampledLogprob:
    own = _alternative(note.token, logprob, text_processor)
    alternatives = tuple(
        _alternative(token, top_logprob, text_processor) for token, top_logprob in note.top
    )
    return SampledLogprob(**asdict(own), top_logprobs=alternatives)


def _alternative(token: int, logprob: float, text_processor: "TextProcessor") -> Alternative:
    piece = text_processor.piece(token)
    return Alternative(token, _text(piece), tuple(piece), _finite(logprob))


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(LEAST, logprob)
