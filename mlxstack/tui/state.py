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
    """Token counts up to a time, summed over restarts of the service."""

    time: float
    """Seconds since 1970."""
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
    sample = ThroughputSample(news.at, n_prompt, n_generated, counters.n_cached_tokens)
    now = _above(base, sample)
    samples = _samples(_remembering(before, news.past, base), now)
    return DashboardState(
        replace(news, past=()), Link(LinkState.LIVE), samples, now, base, before.models
    )


def prompt_rate(model: DashboardState) -> float:
    """Prompt tokens computed per second over the last seconds."""
    return _speed(_counts(model, model.now.time - RATE_S), model.now)[0]


def decode_rate(model: DashboardState) -> float:
    """Generated tokens per second of all slots over the last seconds."""
    return _speed(_counts(model, model.now.time - RATE_S), model.now)[1]


def reuse_rate(model: DashboardState) -> float:
    """Prompt tokens reused per second over the last seconds."""
    return _speed(_counts(model, model.now.time - RATE_S), model.now)[2]


def series(model: DashboardState, n_columns: int) -> tuple[Speeds | Unseen, ...]:
    """Rates of computed, generated, reused tokens in `n_columns` past intervals.

    None where nothing was seen. The parts begin at multiples of their length, so that a
    picture moves on by whole columns.
    """
    if not model.samples or n_columns < 1:
        return (UNSEEN,) * n_columns
    step = WINDOW_S / n_columns
    last = model.now.time // step
    edges = [(last - n_columns + 1 + i) * step for i in range(n_columns + 1)]
    counts = [_counts(model, min(edge, model.now.time)) for edge in edges]
    speeds: list[Speeds | Unseen] = []
    for before, after, edge in zip(counts, counts[1:], edges[1:], strict=False):
        is_seen = edge > model.samples[0].time
        speeds.append(_speed(before, after) if is_seen else UNSEEN)
    return tuple(speeds)


def _speed(a: CounterSample, b: CounterSample) -> Speeds:
    seconds = b.time - a.time
    if seconds <= 0:
        return 0.0, 0.0, 0.0
    computed = b.n_prompt - a.n_prompt
    generated = b.n_generated - a.n_generated
    return computed / seconds, generated / seconds, (b.n_cached - a.n_cached) / seconds


def _counts(model: DashboardState, time: float) -> CounterSample:
    """Counts at a time, interpolated linearly between samples."""
    index = bisect_right(model.samples, time, key=attrgetter("time"))
    after = (*model.samples, model.now)[index]
    if not index:
        return after
    before = model.samples[index - 1]
    share = 0.0
    if after.time > before.time:
        share = (time - before.time) / (after.time - before.time)
    return CounterSample(
        time,
        before.n_prompt + share * (after.n_prompt - before.n_prompt),
        before.n_generated + share * (after.n_generated - before.n_generated),
        before.n_cached + share * (after.n_cached - before.n_cached),
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
    samples = list(before.samples)
    if samples:
        past = tuple(sample for sample in past if sample.at > before.now.time)
    if not past:
        return before
    if samples and before.now.time > samples[-1].time:
        samples.append(before.now)
    samples += [_above(base, sample) for sample in past]
    return replace(before, samples=tuple(samples), now=samples[-1])


def _above(base: CounterSample, sample: ThroughputSample) -> CounterSample:
    """Counts of the service, with those before its restarts."""
    return CounterSample(
        sample.at,
        base.n_prompt + sample.n_prompt,
        base.n_generated + sample.n_generated,
        base.n_cached + sample.n_cached,
    )


def _samples(before: DashboardState, now: CounterSample) -> tuple[CounterSample, ...]:
    """Add a sample, and another where a pause begins."""
    samples = before.samples
    last = before.now
    if not samples:
        return (now,)
    if now.time < samples[-1].time + MARK_S:
        return samples
    if last.time > samples[-1].time and now.time >= last.time + MARK_S:
        samples = (*samples, last)
    oldest = now.time - WINDOW_S - 2 * MARK_S
    return (*(sample for sample in samples if sample.time >= oldest), now)
