"""`verify`: sound on the demo, and it finds each of ten planted faults.

`python -m tests.endurance` plants them in the demo, too.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from mlx_lm import convert
from msgspec.structs import replace
from typer.testing import CliRunner

from mlxstack.bench.environment import Conditions
from mlxstack.cli.doctor import CheckLevel, CheckResult
from mlxstack.cli.main import app
from mlxstack.cli.verification import identity
from mlxstack.cli.verification.identity import (
    EXACT,
    N_CTX,
    Verifier,
    VerifyPlan,
    VerifyReport,
    compare,
    verified,
)
from mlxstack.cli.verification.probe import EngineProbe, GreedyResponse, probe
from mlxstack.core.engine_events import RequestTimings, SlotAssigned
from mlxstack.core.preset import ModelSpec, Preset
from mlxstack.engine.decode import attention_patch
from mlxstack.host.hardware import mac_memory, memory_of
from mlxstack.planner.candidate import of_preset
from tests import models
from tests.endurance.planted import DEMO, FAULTS, SCENES, faulty, faulty_restart, verified_engine
from tests.repetition import in_soak

pytestmark = [pytest.mark.mlx, pytest.mark.slow]
LATER = "restart"
"""The scene that takes another engine."""
MARKS = (0.0, 1.0, 2.0)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Preset:
    """The demo with a model of two layers.

    Each fault shows in the same checks as with its own.
    """
    folder = tmp_path_factory.mktemp("models") / "small"
    models.write(folder, models.LLAMA | {"num_hidden_layers": 2})
    return replace(DEMO, model=ModelSpec(id=str(folder)), name="small")


@pytest.fixture(scope="module")
def found(small: Preset, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProbe]:
    with verified_engine(tmp_path_factory.mktemp("home"), small) as engine:
        yield engine


@pytest.mark.parametrize("fault", [name for name, (_, scene) in FAULTS.items() if scene != LATER])
def test_a_planted_fault_is_found(fault: str, found: EngineProbe) -> None:
    assert faulty(found, fault, (FAULTS[fault][1],), list(FAULTS).index(fault))


def test_nothing_is_found_without_a_fault(found: EngineProbe) -> None:
    """After the faults: none is left behind."""
    assert not faulty(found, None, SCENES, len(FAULTS))


def test_a_planted_fault_of_a_restart_is_found(small: Preset, tmp_path: Path) -> None:
    (fault,) = [name for name, (_, scene) in FAULTS.items() if scene == LATER]
    assert not faulty_restart(tmp_path / "sound", None, small)
    assert faulty_restart(tmp_path / "faulty", fault, small) == ["restart"]


@pytest.fixture(scope="module")
def long_slots(small: Preset, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProbe]:
    """Slots for more than 4,096 tokens."""
    preset = replace(small, slots=replace(small.slots, count=2, n_ctx=2 * N_CTX))
    with probe(verified(preset), tmp_path_factory.mktemp("home")) as engine:
        yield engine


@pytest.mark.parametrize("n_context", [1024, *in_soak(4096)])
def test_decode_attention_that_is_wrong_in_long_contexts_is_found(
    n_context: int, long_slots: EngineProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert n_context in VerifyPlan().long_contexts
    sound = Verifier(long_slots, EXACT, lambda _: None)
    sound.long_context(n_context)
    assert [check.verdict for check in sound.checks] == [CheckLevel.OK] * 2
    real = attention_patch.attend_single

    def attend(queries: mx.array, keys: Any, *others: Any) -> mx.array:
        wrong = [mx.roll(a, 1, axis=2) if a.shape[2] >= n_context else a for a in keys]
        return real(queries, wrong, *others)

    monkeypatch.setattr(attention_patch, "attend_single", attend)
    faulty = Verifier(long_slots, EXACT, lambda _: None, seed=1)
    faulty.long_context(n_context)
    wrong = [check.subject for check in faulty.checks if check.verdict is CheckLevel.BAD]
    assert f"context past {n_context:,}, decoded" in wrong


def test_a_context_beyond_the_slots_is_left_out(found: EngineProbe) -> None:
    run = Verifier(found, EXACT, lambda _: None)
    run.long_context(4096)
    (check,) = run.checks
    assert check.verdict is CheckLevel.OK and "left out: slots hold 4,096" in check.detail


def test_the_quick_form_is_sound_on_the_demo(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first command of the page for Macs."""
    monkeypatch.setenv("MLX_STACK_HOME", str(tmp_path))
    done = CliRunner().invoke(app, ["verify", "demo", "--quick"])
    assert done.exit_code == 0, done.output
    assert "Sound" in done.output and "context past 1,024" in done.output


def test_ten_faults_are_planted() -> None:
    assert len(FAULTS) == 10


def test_the_command_reports_and_ends_with_its_verdict(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A preset that is no chat model is refused; a fault is told by the exit code."""
    monkeypatch.setenv("MLX_STACK_HOME", str(tmp_path))
    refused = CliRunner().invoke(app, ["verify", "demo-embedding"])
    assert isinstance(refused.exception, Exception)
    assert "only chat models" in str(refused.exception)
    for level, code in ((CheckLevel.WARN, 0), (CheckLevel.BAD, 1)):
        report = VerifyReport(
            preset="demo",
            conditions=Conditions("2026-11-22", "a Mac", {"mlx": "1"}, "demo", "", 0.0),
            seconds=3.0,
            is_sound=level is not CheckLevel.BAD,
            checks=(CheckResult(level, "fork", "a tie"),),
            step_ms={1: 2.5},
            prefill_tps={256: 800.0},
        )
        monkeypatch.setattr(identity, "report", lambda *_, one=report: one)
        said = CliRunner().invoke(app, ["verify", "demo"])
        assert said.exit_code == code
        assert "a Mac; mlx 1; 2026-11-22" in said.output
        assert [level.value, "fork", "a", "tie"] in map(str.split, said.output.splitlines())
        json = CliRunner().invoke(app, ["verify", "demo", "--json"])
        assert msgspec.json.decode(json.stdout, type=VerifyReport) == report


def said(*tokens: int, logprobs: tuple[float, ...] = (0.0, 0.0, 0.0)) -> GreedyResponse:
    tops = tuple(((token, -0.7), (9, -0.8)) for token in tokens)
    return GreedyResponse(
        tokens, logprobs, tops, SlotAssigned("x", 0, 0, 0), RequestTimings(), MARKS
    )


@pytest.mark.parametrize(
    ("other", "level"),
    [
        (said(1, 2, 3), CheckLevel.OK),
        (said(1, 2, 3, logprobs=(0.0, 0.4, 0.0)), CheckLevel.OK),
        (said(1, 2, 3, logprobs=(0.0, 0.6, 0.0)), CheckLevel.BAD),
        (said(1, 9, 3), CheckLevel.WARN),
        (said(1, 9, 3, logprobs=(0.6, 0.0, 0.0)), CheckLevel.BAD),
        (said(1, 8, 3), CheckLevel.BAD),
        (said(1, 2), CheckLevel.BAD),
    ],
    ids=["same", "rounded", "drifted", "tie", "tie after a drift", "unlikely", "short"],
)
def test_a_tie_is_told_from_a_fault(other: GreedyResponse, level: CheckLevel) -> None:
    assert compare(said(1, 2, 3), other, 0.5)[0] is level


@pytest.mark.parametrize("bits", [0, 4])
def test_half_precision_that_a_cpu_widens_is_told(tmp_path: Path, bits: int) -> None:
    told = {}
    for dtype in (mx.float32, mx.bfloat16):
        folder = models.build(tmp_path / f"{dtype}", "tiny", dtype=dtype)
        if bits:
            plain = folder
            folder = tmp_path / f"{dtype}-{bits}"
            name = str(dtype).removeprefix("mlx.core.")
            convert(str(plain), str(folder), quantize=True, q_bits=bits, dtype=name)
        weights = of_preset(Preset(model=ModelSpec(id=str(folder)))).weights
        for memory in (mac_memory("16GB"), memory_of(16 << 30)):
            told[dtype, memory.half_bytes] = identity.is_widened(weights, memory)
    assert told == {
        (mx.float32, 2): False,
        (mx.float32, 4): False,
        (mx.bfloat16, 2): False,
        (mx.bfloat16, 4): True,
    }


def test_no_tie_is_allowed_where_nothing_is_rounded() -> None:
    assert compare(said(1, 2, 3), said(1, 9, 3), EXACT)[0] is CheckLevel.BAD
