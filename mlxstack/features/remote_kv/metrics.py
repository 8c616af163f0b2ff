"""Metrics of the peers of a service."""

from collections.abc import Iterator, Sequence

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from mlxstack.features.remote_kv.values import PeerView

COUNTERS = (
    ("peer_fetched_tokens", "Prompt tokens fetched from a peer", "n_fetched_tokens"),
    ("peer_fetched_bytes", "Bytes of KV files fetched from a peer", "n_fetched_bytes"),
    ("peer_prefills", "Prompts that a peer was asked to compute", "n_prefills"),
    ("peer_failures", "Calls of a peer that failed or took too long", "n_failures"),
)


def peer_metrics(peers: Sequence[PeerView]) -> Iterator[Metric]:
    """Counters of each peer, and whether it answers; none without peers."""
    if not peers:
        return
    for name, help_text, field in COUNTERS:
        family = CounterMetricFamily(f"mlxstack_{name}", help_text, labels=("peer",))
        for peer in peers:
            family.add_metric((peer.url,), getattr(peer, field))
        yield family
    gauge = GaugeMetricFamily("mlxstack_peer_up", "0 after a failure", labels=("peer",))
    for peer in peers:
        gauge.add_metric((peer.url,), not peer.trouble)
    yield gauge
