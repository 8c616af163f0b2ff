"""Path that a service took in each scene, by its own counters."""

from collections.abc import Iterable, Mapping

from mlxstack.bench.report import ReportTable
from mlxstack.bench.statistics import ratio
from mlxstack.core.errors import Broken

COUNTERS = {
    "computed": "llamacpp:prompt_tokens_total",
    "reused": "llamacpp:prompt_tokens_cached_total",
    "steps": "llamacpp:n_decode_total",
    "rows": "mlxstack_decode_rows_total",
    "drafted": "llamacpp:spec_decode_num_draft_tokens_total",
    "begun early": "mlxstack_early_tokens_total",
}
REUSING = frozenset({"turns", "team", "requests"})
TOGETHER = frozenset({"crowds", "short", "joining", "counts", "team"})
"""Scenes that measure reuse of prefixes, and rows that decode in one step."""


def taken_path(
    scene: str, before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, tuple[float, ...]]:
    """Counts of one pass of a scene; none without counters."""
    if not set(COUNTERS.values()) <= set(before):
        return {}
    counts = {counter: after[name] - before[name] for counter, name in COUNTERS.items()}
    return {f"path {scene}: {counter}": (count,) for counter, count in counts.items()}


def check_path(figures: Mapping[str, tuple[float, ...]], scenes: Iterable[str]) -> None:
    """Raise Broken where a scene measured something else."""
    for scene in scenes:
        counts = {counter: sum(figures[f"path {scene}: {counter}"]) for counter in COUNTERS}
        if scene in REUSING and not counts["reused"]:
            raise Broken(f"scene `{scene}`: no prompt token was reused, so it measured no reuse")
        if scene in TOGETHER and counts["rows"] <= counts["steps"]:
            raise Broken(f"scene `{scene}`: no two rows were decoded in one step")


def path_table(by_server: Mapping[str, Mapping[str, tuple[float, ...]]]) -> tuple[ReportTable, ...]:
    """One table, if any server has the counters; all passes together."""
    rows = []
    for server, figures in by_server.items():
        names = [name for name in figures if name.startswith("path ")]
        for scene in dict.fromkeys(name.split(":")[0].removeprefix("path ") for name in names):
            counts = {counter: sum(figures[f"path {scene}: {counter}"]) for counter in COUNTERS}
            rows.append(
                (
                    f"{server}: {scene}",
                    *(f"{counts[counter]:.0f}" for counter in ("computed", "reused")),
                    f"{ratio(counts['rows'], counts['steps']):.2f}",
                    *(f"{counts[counter]:.0f}" for counter in ("drafted", "begun early")),
                )
            )
    heads = ("Scene", "Computed", "Reused", "Rows per step", "Drafted", "Begun early")
    note = "Prompt tokens, rows of a decode step, draft tokens: the counters of the service."
    if rows:
        return (ReportTable("The path that each scene took", heads, tuple(rows), note),)
    return ()
