"""`/metrics` for operators: histograms, the dashboard for Grafana, the scrape configuration."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from mlxstack.core.preset import ServerSpec
from tests.api.requests import chat
from tests.api.running import running, tiny_preset
from tests.patience import PATIENCE_S
from tests.ports import unused_port

DOCS = Path(__file__).parents[2] / "docs"
NAME = re.compile(r"(?:mlxstack_|llamacpp:)[a-z_]+")
HISTOGRAMS = (
    "mlxstack_time_to_first_token_seconds",
    "mlxstack_queue_time_seconds",
    "mlxstack_decode_step_seconds",
)

pytestmark = [pytest.mark.mlx, pytest.mark.net]


def samples(http: httpx.Client) -> dict[str, float]:
    """Samples without labels, and buckets by their bound."""
    found = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            found[sample.name + sample.labels.get("le", "")] = sample.value
    return found


def test_histograms_count_requests_and_decode_steps(http: httpx.Client) -> None:
    before = samples(http)
    answers = [chat(http, f"histogram {number}", max_tokens=8) for number in range(2)]
    after = samples(http)
    added = {name: after[name] - before.get(name, 0) for name in after}
    first, queue, step = HISTOGRAMS
    assert added[f"{first}_count"] == added[f"{queue}_count"] == 2
    n_tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    assert 1 <= added[f"{step}_count"] <= n_tokens
    assert added[f"{first}_sum"] >= added[f"{queue}_sum"] >= 0
    for name in HISTOGRAMS:
        buckets = [added[one] for one in added if one.startswith(f"{name}_bucket")]
        assert buckets == sorted(buckets), "buckets are cumulative"
        assert buckets[-1] == added[f"{name}_count"]
    assert added[f"{step}_sum"] <= added["llamacpp:tokens_predicted_seconds_total"] + 1e-6


def test_a_refused_request_is_in_no_histogram(http: httpx.Client) -> None:
    before = samples(http)
    refused = http.post("/v1/completions", json={"prompt": "word " * 5000})
    assert refused.status_code == 400
    after = samples(http)
    assert all(after[f"{name}_count"] == before[f"{name}_count"] for name in HISTOGRAMS)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Metric]]:
    """All families, those of peers too."""
    folder = tmp_path_factory.mktemp("metrics")
    server = ServerSpec(port=0, peers=(f"http://127.0.0.1:{unused_port()}",))
    with running(tiny_preset(folder / "model", server=server), folder / "home") as here:
        text = httpx.get(f"{here.url}/metrics", timeout=PATIENCE_S).text
    yield {family.name: family for family in text_string_to_metric_families(text)}


def queries() -> list[str]:
    board = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    return [query["expr"] for panel in board["panels"] for query in panel["targets"]]


def test_each_name_of_the_dashboard_for_grafana_is_a_metric(families: dict[str, Metric]) -> None:
    known = {sample.name for family in families.values() for sample in family.samples}
    # Without a miss yet, its counters have no sample.
    known |= {f"{name}_total" for name, family in families.items() if family.type == "counter"}
    plotted = {name for query in queries() for name in NAME.findall(query)}
    assert len(plotted) > 40
    assert plotted <= known, plotted - known


def test_each_metric_is_plotted(families: dict[str, Metric]) -> None:
    plotted = {name for query in queries() for name in NAME.findall(query)}
    stems = {re.sub("_(total|bucket)$", "", name) for name in plotted}
    assert set(families) <= stems, set(families) - stems


def test_percentiles_are_those_of_histograms(families: dict[str, Metric]) -> None:
    quantiles = [query for query in queries() if "histogram_quantile" in query]
    names = {name.removesuffix("_bucket") for query in quantiles for name in NAME.findall(query)}
    assert names == set(HISTOGRAMS)
    assert all(families[name].type == "histogram" for name in names)


@pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool (package prometheus) is not installed: docs/prometheus.yml is not checked",
)
def test_prometheus_accepts_the_scrape_configuration(tmp_path: Path) -> None:
    config = tmp_path / "prometheus.yml"
    config.write_text((DOCS / "prometheus.yml").read_text(encoding="utf-8"))
    (tmp_path / "mlx-stack.key").write_text("a-key")
    done = subprocess.run(
        ["promtool", "check", "config", str(config)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
