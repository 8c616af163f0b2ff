"""Prometheus metrics: llama-server's names, and ours."""

from collections.abc import Iterator, Mapping
from typing import Any

from litestar import Response, get
from msgspec import Struct
from prometheus_client import disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlxstack.api.guards import OF_ALL, UNLOADED
from mlxstack.core.engine_snapshot import Counters, Snapshot
from mlxstack.core.errors import Unsupported
from mlxstack.engine.stats import DECODE_STEP_TIMES
from mlxstack.service.parts.disk_view import disk_view
from mlxstack.service.parts.stats import decode_speed, n_processing, prefill_speed
from mlxstack.service.service import Service
from mlxstack.text.rendering.renderers import RENDERERS

# In this text format each would be one more gauge per histogram.
disable_created_metrics()  # type: ignore[no-untyped-call]

# Litestar adds the charset to every text.
MEDIA_TYPE = "text/plain; version=0.0.4"

Numbers = tuple[tuple[str, str, float], ...]


Table = tuple[tuple[str, str, str], ...]
"""Name, help, and field of the struct that holds the number."""

LLAMA_COUNTERS: Table = (
    ("prompt_tokens_total", "Prompt tokens processed, without cached ones", "n_prompt_tokens"),
    ("prompt_tokens_cached_total", "Prompt tokens reused from the cache", "n_cached_tokens"),
    ("prompt_seconds_total", "Time spent processing prompts", "prompt_s"),
    ("tokens_predicted_total", "Generated tokens", "n_generated_tokens"),
    ("tokens_predicted_seconds_total", "Time spent generating tokens", "decode_s"),
    ("n_decode_total", "Decode calls of the model", "n_decode_calls"),
    ("spec_decode_num_draft_tokens_total", "Speculative: drafted tokens", "n_drafted_tokens"),
    ("spec_decode_num_accepted_tokens_total", "Speculative: accepted tokens", "n_accepted_tokens"),
    ("spec_decode_num_drafts_total", "Speculative: verification steps", "n_drafts"),
)
OWN_COUNTERS: Table = (
    ("evictions", "KV segments evicted from memory or disk", "n_evicted"),
    ("image_encodes", "Images that went through the vision tower", "n_image_encodes"),
    ("image_tokens_prefilled", "Prompt tokens of images computed", "n_image_tokens"),
    ("model_calls", "Forward passes of the model", "n_model_calls"),
    ("decode_rows", "Rows in all decode calls", "n_decode_rows"),
    ("requests", "Requests submitted to the engine", "n_requests"),
    ("requests_completed", "Completed requests", "n_completed"),
    ("requests_cancelled", "Requests ended by a disconnect or a stop sequence", "n_cancelled"),
    ("draft_model_tokens", "Tokens of the draft model", "n_model_drafted_tokens"),
    (
        "draft_model_tokens_accepted",
        "Accepted tokens of the draft model",
        "n_model_accepted_tokens",
    ),
    ("early_tokens", "Tokens of early prefill", "n_early_tokens"),
    ("early_tokens_used", "Tokens of early prefill used by the next request", "n_early_used"),
    ("early_tokens_wasted", "Tokens of early prefill not used", "n_early_wasted"),
    ("warm_passes", "Forward passes that kept the weights of an idle GPU warm", "n_warm_passes"),
    ("rank_records", "Records that rank 0 sent, one per forward pass", "n_rank_records"),
    ("rank_bytes", "Bytes of records sent to the other ranks", "n_rank_bytes"),
    ("requests_failed", "Failed requests", "n_failed"),
    ("requests_refused", "Requests refused at a full queue", "n_refused"),
)
MISS_COUNTERS: Table = (
    ("cache_misses", "Requests that reused less KV than had existed", "n_misses"),
    ("cache_lost_tokens", "Tokens computed again after a miss", "n_lost"),
    ("cache_lost_seconds", "Prefill time of those tokens", "lost_s"),
)


def llama_gauges(snapshot: Snapshot, before: Counters) -> Numbers:
    """Gauges of llama-server: rates since the last scrape, requests, slots."""
    now = snapshot.counters
    calls = now.n_decode_calls or 1
    return (
        ("n_tokens_max", "Largest context so far (prompt and generation)", now.n_tokens_max),
        ("prompt_tokens_seconds", "Prompt tokens per second", prefill_speed(now, before)),
        ("predicted_tokens_seconds", "Generated tokens per second", decode_speed(now, before)),
        ("requests_processing", "Requests being served", n_processing(snapshot)),
        ("requests_deferred", "Requests waiting", len(snapshot.waiting)),
        ("n_busy_slots_per_decode", "Rows per decode call", now.n_decode_rows / calls),
    )


def service_counters(service: Service) -> Numbers:
    """Counters that outlive an engine."""
    stats = service.stats
    overruns = "Renderings of a chat template that exceeded a limit"
    return (
        ("saved_bytes", "Bytes newly written by saving slots", stats.n_saved_bytes),
        ("restored_bytes", "Bytes read by restoring slots", stats.n_restored_bytes),
        ("unparsed_calls", "Malformed tool calls returned as text", stats.n_unparsed_calls),
        ("template_overruns", overruns, RENDERERS.n_overruns),
    )


def disk_gauges(service: Service) -> Numbers:
    """Volume of the KV store, and bytes written to it today."""
    factory = service.engine_factory
    disk = disk_view(factory.store, factory.counter)
    limit = disk.max_daily_bytes or 0
    return (
        ("disk_free_bytes", "Free bytes of the volume of the KV store", disk.free_bytes),
        ("disk_kv_written_today_bytes", "KV written since midnight", disk.today.kv_bytes),
        ("disk_written_today_bytes", "KV, manifests and histories written", disk.today.n_bytes),
        ("disk_daily_write_limit_bytes", "Limit of KV written a day; 0 without one", limit),
        ("disk_daily_write_limit_reached", "1 if KV was refused today", bool(disk.trouble)),
    )


def own_gauges(snapshot: Snapshot) -> Numbers:
    """Gauges that llama-server does not have."""
    return (
        ("slots", "Slots", len(snapshot.slots)),
        ("active_memory_bytes", "Active memory of MLX in bytes", snapshot.active_bytes),
        ("kv_bytes", "Bytes of KV in slots, without parked KV", snapshot.kv_bytes),
        ("batching", "1 if running slots share a forward pass", snapshot.is_batching),
    )


class Metrics(Collector):
    """Collector that reads the engine's counters at each scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._before = Counters()

    def collect(self) -> Iterator[Metric]:
        """Every family: one sample, or one per reason of a miss."""
        snapshot = self._service.snapshot()
        before = self._before
        self._before = snapshot.counters
        yield from _families(CounterMetricFamily, "llamacpp:", _read(LLAMA_COUNTERS, self._before))
        yield from _families(GaugeMetricFamily, "llamacpp:", llama_gauges(snapshot, before))
        ours = (*_read(OWN_COUNTERS, self._before), *service_counters(self._service))
        yield from _families(CounterMetricFamily, "mlxstack_", ours)
        requests = self._service.request_log
        for times in (requests.first_token_times, requests.queue_times, DECODE_STEP_TIMES):
            yield from times.collect()
        losses = {loss.reason: loss for loss in requests.losses}
        yield from _labelled("reason", MISS_COUNTERS, losses)
        for feature in self._service.features:
            yield from feature.metrics()
        yield from _families(GaugeMetricFamily, "mlxstack_", own_gauges(snapshot))
        yield from _families(GaugeMetricFamily, "mlxstack_", disk_gauges(self._service))


def metrics_route(service: Service) -> Any:
    """GET /metrics of one service."""
    collector = Metrics(service)
    is_on = service.preset.prefix_cache.metrics.enabled
    headers = {"process-start-time-unix": str(int(service.stats.started_at))}

    @get("/metrics", media_type=MEDIA_TYPE, name="metrics", opt={**OF_ALL, **UNLOADED})
    async def metrics() -> Response[bytes]:
        """Prometheus text: llama-server's names, and ours."""
        if not is_on:
            raise Unsupported("metrics are off; switch prefix_cache.metrics.enabled on")
        return Response(generate_latest(collector), media_type=MEDIA_TYPE, headers=headers)

    return metrics


def _families(kind: type[Any], prefix: str, numbers: Numbers) -> Iterator[Metric]:
    for name, help_text, value in numbers:
        yield kind(prefix + name, help_text, value=value)


def _read(table: Table, source: Struct) -> Numbers:
    return tuple((name, help_text, getattr(source, field)) for name, help_text, field in table)


def _labelled(label: str, table: Table, sources: Mapping[str, Struct]) -> Iterator[Metric]:
    """Counters with one sample for each value of a label."""
    for name, help_text, field in table:
        family = CounterMetricFamily("mlxstack_" + name, help_text, labels=(label,))
        for value, source in sources.items():
            family.add_metric((value,), getattr(source, field))
        yield family
