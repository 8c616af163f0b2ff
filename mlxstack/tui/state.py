"""Dashboard state: latest frame and past samples, reduced from a feed."""

from bisect import bisect_right
from enum import StrEnum
from operator import attrgetter

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.client.types import FeedLost, ListedModel, ListedModels
from mlxstack.core.engine_snapshot import Counters
from mlxstack.core.status import StatusFrame, ThroughputSample

WINDOW_S = 300.0
MARK_S = 1.0
RATE_S = 2.0

Speeds = tuple[float, float, float]
Unseen = tuple[None, None, None]
UNSEEN: Unseen = (None, None, None)


class LinkState(StrEnum):
    """State of the feed."""

    CONNECTING = "connecting"
    LIVE = "live"
    LOST = "lost"


class Link(Struct, frozen=True):
    """Break of the feed: reason, and seconds until a retry.

    0 seconds: there is no retry.
    """

    state: LinkState = LinkState.CONNECTING
    reason: str = ""
    retry_s: float = 0.0


class CounterSample(Struct, frozen=True):
    """Token counts up to `at`, summed over restarts of the service."""

    at: float
    n_prompt: float
    n_generated: float
    n_cached: float = 0.0


class DashboardState(Struct, frozen=True):
    """Past samples, about one per second; `base` counts before restarts.

    `models` are all of the address; the frame is of one of them.
    """

    frame: StatusFrame = StatusFrame()
    link: Link = Link()
    samples: tuple[CounterSample, ...] = ()
    now: CounterSample = CounterSample(0.0, 0.0, 0.0)
    base: CounterSample = CounterSample(0.0, 0.0, 0.0)
    models: tuple[ListedModel, ...] = ()

    @property
    def has_frame(self) -> bool:
        """Whether any frame has arrived."""
        return self.frame.at > 0


def reduce(before: DashboardState, news: StatusFrame | FeedLost | ListedModels) -> DashboardState:
    """The next state, given one feed item."""
    if isinstance(news, FeedLost):
        return replace(before, link=Link(LinkState.LOST, news.reason, news.retry_s))
    if isinstance(news, ListedModels):
        return replace(before, models=news.data)
    base = _base(before, news.snapshot.counters)
    counters = news.snapshot.counters
    n_prompt = counters.n_prompt_tokens
    n_generated = counters.n_generated_tokens
    here = ThroughputSample(news.at, n_prompt, n_generated, counters.n_cached_tokens)
    now = _above(base, here)
    seen = _remembering(before, news.past, base)
    return DashboardState(
        replace(news, past=()), Link(LinkState.LIVE), _samples(seen, now), now, base, before.models
    )


def prompt_rate(model: DashboardState) -> float:
    """Prompt tokens computed per second over the last seconds."""
    return _speed(_at(model, model.now.at - RATE_S), model.now)[0]


def decode_rate(model: DashboardState) -> float:
    """Generated tokens per second of all slots over the last seconds."""
    return _speed(_at(model, model.now.at - RATE_S), model.now)[1]


def reuse_rate(model: DashboardState) -> float:
    """Prompt tokens reused per second over the last seconds."""
    return _speed(_at(model, model.now.at - RATE_S), model.now)[2]


def series(model: DashboardState, n_columns: int) -> tuple[Speeds | Unseen, ...]:
    """Rates of computed, generated, reused tokens in `n_columns` past intervals.

    None where nothing was seen. The parts begin at multiples of their length, so that a
    picture moves on by whole columns.
    """
    if not model.samples or n_columns < 1:
        return (UNSEEN,) * n_columns
    step = WINDOW_S / n_columns
    last = model.now.at // step
    edges = [(last - n_columns + 1 + i) * step for i in range(n_columns + 1)]
    samples = [_at(model, min(edge, model.now.at)) for edge in edges]
    return tuple(
        _speed(a, b) if edge > model.samples[0].at else UNSEEN
        for a, b, edge in zip(samples, samples[1:], edges[1:], strict=False)
    )


def _speed(a: CounterSample, b: CounterSample) -> Speeds:
    seconds = b.at - a.at
    if seconds <= 0:
        return 0.0, 0.0, 0.0
    computed = b.n_prompt - a.n_prompt
    generated = b.n_generated - a.n_generated
    return computed / seconds, generated / seconds, (b.n_cached - a.n_cached) / seconds


def _at(model: DashboardState, at: float) -> CounterSample:
    """Counts at a moment, interpolated linearly between samples."""
    after = bisect_right(model.samples, at, key=attrgetter("at"))
    late = model.samples[after] if after < len(model.samples) else model.now
    if not after:
        return late
    mark = model.samples[after - 1]
    share = (at - mark.at) / (late.at - mark.at) if late.at > mark.at else 0.0
    return CounterSample(
        at,
        mark.n_prompt + share * (late.n_prompt - mark.n_prompt),
        mark.n_generated + share * (late.n_generated - mark.n_generated),
        mark.n_cached + share * (late.n_cached - mark.n_cached),
    )


def _base(before: DashboardState, counters: Counters) -> CounterSample:
    """Counters that went back belong to a new process."""
    last = before.frame.snapshot.counters
    went_back = (
        counters.n_model_calls < last.n_model_calls
        or counters.n_prompt_tokens < last.n_prompt_tokens
        or counters.n_generated_tokens < last.n_generated_tokens
    )
    return before.now if went_back else before.base


def _remembering(
    before: DashboardState, past: tuple[ThroughputSample, ...], base: CounterSample
) -> DashboardState:
    """Add the samples of the service from before the dashboard was attached."""
    is_first = not before.samples
    told = tuple(_above(base, one) for one in past if is_first or one.at > before.now.at)
    if not told:
        return before
    last = (before.now,) if before.samples and before.now.at > before.samples[-1].at else ()
    return replace(before, samples=(*before.samples, *last, *told), now=told[-1])


def _above(base: CounterSample, one: ThroughputSample) -> CounterSample:
    """Counts of the service, with those before its restarts."""
    return CounterSample(
        one.at,
        base.n_prompt + one.n_prompt,
        base.n_generated + one.n_generated,
        base.n_cached + one.n_cached,
    )


def _samples(before: DashboardState, now: CounterSample) -> tuple[CounterSample, ...]:
    """Add a sample, and another where a pause begins."""
    samples = before.samples
    last = before.now
    if not samples:
        return (now,)
    if now.at < samples[-1].at + MARK_S:
        return samples
    if last.at > samples[-1].at and now.at >= last.at + MARK_S:
        samples = (*samples, last)
    oldest = now.at - WINDOW_S - 2 * MARK_S
    return (*(mark for mark in samples if mark.at >= oldest), now)
