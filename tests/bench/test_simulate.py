"""`bench dev simulate`: a scenario as a file, and its waiting times."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner, Result

from mlxstack.bench.dev.simulation.scenario import CODING_AGENTS, Scenario, read_scenario, run
from mlxstack.cli.main import app
from mlxstack.core.errors import SetupError


def simulated(*args: str) -> Result:
    return CliRunner().invoke(app, ["bench", "dev", *args])


def test_a_scenario_of_a_file_is_repeatable(tmp_path: Path) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text("machine: {n_slots: 2}\nworkload: {n_agents: 20, span_s: 60}\nseed: 7\n")
    args = ("simulate", "--scenario", str(file), "--json")
    (first,), (second,) = (json.loads(simulated(*args).stdout) for _ in range(2))
    assert first["tables"] == second["tables"]
    waits, totals = first["tables"]
    assert waits["note"].startswith("20 agents, 2 slots")
    assert [row[0] for row in waits["rows"]] == ["HIGH", "NORMAL", "LOW"]
    assert sum(int(row[1]) for row in waits["rows"]) == int(totals["rows"][0][1]) >= 20


def test_more_agents_wait_longer() -> None:
    def slowest_s(n_agents: int) -> float:
        workload = replace(CODING_AGENTS, n_agents=n_agents)
        waits, _ = run(Scenario(workload=workload)).tables
        return max(float(row[-1]) for row in waits.rows)

    assert slowest_s(1) < slowest_s(60)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("machine:\n  n_slotz: 2", ":2: unknown key `machine.n_slotz`; did you mean `n_slots`?"),
        ("machine: {n_slots: 0}", "Expected `int` >= 1 - at `$.machine.n_slots`"),
        ("machine: {prefill_tps: 0}", "Expected `float` > 0.0 - at `$.machine.prefill_tps`"),
        ("workload: {n_agents: -3}", "Expected `int` >= 1 - at `$.workload.n_agents`"),
        ("workload: {n_asks: [5, 1]}", "workload.n_asks is [5, 1], but least comes first"),
        ("workload: {span_s: .inf}", "workload.span_s must be finite"),
        ("limits: {max_active: 0}", "Expected `int` >= 1 - at `$.limits.max_active`"),
        ("limits: {prefill: {max_chunk_size: 0}}", "at `$.limits.prefill.max_chunk_size`"),
    ],
)
def test_a_scenario_that_no_simulation_ends_with_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text(f"{text}\n")
    with pytest.raises(SetupError) as refused:
        read_scenario(file)
    assert message in refused.value.message
    assert "\n" not in refused.value.message


def test_a_scenario_goes_with_simulate_only() -> None:
    refused = simulated("engine", "--scenario", "mine.yaml")
    assert "goes with `bench dev simulate`" in str(refused.exception)
