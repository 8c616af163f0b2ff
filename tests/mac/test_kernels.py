"""`verify --kernels`: sound on a CPU, and it finds and names faults of kernels."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import convert
from mlx_lm.utils import load_model
from typer.testing import CliRunner

from mlxstack.cli.main import app
from mlxstack.engine.checks import kernels
from mlxstack.engine.checks.bit_table import bit_table
from mlxstack.engine.checks.kernels import KernelCheck, KernelOutcome, check_kernels
from mlxstack.engine.checks.model_shapes import AttentionShape, shapes_of
from tests import models

pytestmark = [pytest.mark.mlx, pytest.mark.slow]

NAMES = {
    "attention",
    "attention, forced",
    "quantized layer",
    "experts",
    "experts, sorted",
    "rope",
    "gated delta",
}


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model with attention, gated delta layers and experts in 4 bits."""
    folder = tmp_path_factory.mktemp("model")
    plain = models.build(folder / "plain", "tiny-hybrid")
    convert(str(plain), str(folder / "4bit"), quantize=True, q_bits=4, q_group_size=32)
    return folder / "4bit"


@pytest.fixture(scope="module")
def model(quantized: Path) -> Any:
    loaded = load_model(quantized)[0]
    loaded.set_dtype(mx.float32)
    return loaded


@pytest.fixture
def short_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few queries, where a fault is one of decoding."""
    monkeypatch.setattr(kernels, "PREFILL_QUERIES", kernels.PREFILL_QUERIES[:2])


@pytest.fixture
def few_keys(monkeypatch: pytest.MonkeyPatch, short_prefill: None) -> None:
    """Short attention, where a fault is one of other kernels."""
    monkeypatch.setattr(kernels, "KEY_COUNTS", (1023, 1024))


def on_device(patch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Change the results of a function on the default device, but not on `stream=mx.cpu`."""
    original = getattr(owner, name)

    def faulty(*values: Any, **options: Any) -> Any:
        if options.get("stream") is not None:
            return original(*values, **options)
        return change(original, *values, **options)

    patch.setattr(owner, name, faulty)


def faults(model: Any) -> list[KernelCheck]:
    return [check for check in check_kernels(model) if check.is_fault]


def test_a_sound_device_has_no_fault_in_any_kind_of_kernel(model: Any) -> None:
    checks = list(check_kernels(model))
    assert [check for check in checks if check.is_fault] == []
    assert {check.name for check in checks} == NAMES
    shapes = " ".join(check.shape for check in checks)
    assert all(f"keys {n:,};" in shapes for n in kernels.KEY_COUNTS)
    assert all(f"rows {n};" in shapes for n in kernels.ROW_COUNTS)
    forced = [check for check in checks if check.name == "attention, forced"]
    assert {check.outcome for check in forced} == {KernelOutcome.UNAVAILABLE}


@pytest.mark.usefixtures("short_prefill")
def test_attention_that_is_wrong_from_1024_keys_on_is_found_and_named(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(real: Any, q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
        is_wrong = k.shape[2] >= 1024 and q.shape[2] <= 8
        # One block of keys is read as another.
        keys = mx.roll(k, 32, axis=2) if is_wrong else k
        return real(q, keys, v, **options)

    on_device(monkeypatch, mx.fast, "scaled_dot_product_attention", attend)
    checks = faults(model)
    assert {check.name for check in checks} == {"attention"}
    decoding = {check.shape.partition(";")[0] for check in checks}
    assert {f"queries {q}, keys {n:,}" for q in (1, 2, 8) for n in (1024, 4096, 32768)} <= decoding
    assert not any("keys 1,023" in check.shape for check in checks)


@pytest.mark.usefixtures("short_prefill")
def test_one_key_too_few_is_found(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(real: Any, q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
        n = k.shape[2] - (k.shape[2] == 4096)
        return real(q, k[:, :, :n], v[:, :, :n], **options)

    on_device(monkeypatch, mx.fast, "scaled_dot_product_attention", attend)
    shapes = {check.shape.partition(";")[0] for check in faults(model)}
    assert shapes == {f"queries {n}, keys 4,096" for n in (1, 2, 8)}


def test_one_key_too_few_is_found_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 1,024 equal keys would be within the rounding of bfloat16."""

    def attend(real: Any, q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
        return real(q, k[:, :, :-1], v[:, :, :-1], **options)

    on_device(monkeypatch, mx.fast, "scaled_dot_product_attention", attend)
    shape = AttentionShape(4, 2, 32, 32, mx.bfloat16, True, False, False)
    (check,) = kernels._attend(shape, 1, 1024, is_forced=False)
    assert check.is_fault


@pytest.mark.usefixtures("few_keys")
def test_a_wrong_row_of_a_quantized_product_is_found_and_named(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def multiply(real: Any, x: mx.array, *values: Any, **options: Any) -> mx.array:
        product = real(x, *values, **options)
        if product.shape[0] == 6:
            product[3] = product[2]
        return product

    on_device(monkeypatch, mx, "quantized_matmul", multiply)
    checks = faults(model)
    assert {check.name for check in checks} == {"quantized layer"}
    assert {check.shape.partition(";")[0] for check in checks} == {"rows 6"}
    assert {check.detail for check in checks} == {"row 3"}
    assert all(check.difference > check.tolerance for check in checks)


@pytest.mark.usefixtures("few_keys")
def test_a_pipeline_that_is_missing_is_named(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "[metal::Device] Unable to load kernel rope_float32"

    def rotate(real: Any, x: mx.array, dims: int, **options: Any) -> mx.array:
        if isinstance(options["offset"], mx.array):
            raise RuntimeError(text)
        return real(x, dims, **options)

    on_device(monkeypatch, mx.fast, "rope", rotate)
    checks = faults(model)
    assert {(check.name, check.outcome) for check in checks} == {("rope", KernelOutcome.MISSING)}
    assert {check.detail for check in checks} == {f"missing pipeline: {text}"}
    assert all("tokens 1 at [5, 4096]" in check.shape for check in checks)


@pytest.mark.usefixtures("few_keys")
def test_a_missing_forced_kernel_is_no_fault_since_the_engine_refuses_it(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(real: Any, *values: Any, force_fused: bool = False, **options: Any) -> mx.array:
        if force_fused:
            raise RuntimeError("[metal::Device] Unable to load kernel steel_attention")
        return real(*values, **options)

    on_device(monkeypatch, mx.fast, "scaled_dot_product_attention", attend)
    checks = [check for check in check_kernels(model) if check.name == "attention, forced"]
    assert not any(check.is_fault for check in checks)
    assert all("missing pipeline" in check.detail for check in checks)


@pytest.mark.usefixtures("few_keys")
def test_numbers_that_are_none_are_found(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(real: Any, *values: Any, **options: Any) -> mx.array:
        product = real(*values, **options)
        product[0, 0, 0] = float("nan")
        return product

    on_device(monkeypatch, mx, "gather_qmm", multiply)
    assert {check.name for check in faults(model)} == {"experts", "experts, sorted"}


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_rounding_of_half_precision_is_no_fault(dtype: mx.Dtype) -> None:
    for is_decode in (True, False):
        shape = AttentionShape(4, 2, 32, 32, dtype, is_decode, False, False)
        (check,) = kernels._attend(shape, 1 if is_decode else 512, 1536, is_forced=False)
        assert not check.is_fault and check.difference > 0
        assert check.tolerance < 0.2 and check.dtype in check.reason


def test_the_bit_table_has_a_line_for_each_shape_of_a_layer(model: Any) -> None:
    shapes = shapes_of(model)
    rows = list(bit_table(shapes))
    assert [row.layer for row in rows] == [str(shape) for shape in shapes.linear]
    assert any("4 bits" in row.layer for row in rows)
    assert all(1 in row.same_as_one and 2 in row.same_as_two for row in rows)


def test_the_command_tells_its_checks_and_ends_with_its_outcome(
    quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_STACK_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "KEY_COUNTS", (1023, 1024))
    sound = CliRunner().invoke(app, ["verify", "--kernels", str(quantized)])
    assert sound.exit_code == 0, sound.output
    assert "Sound" in sound.output

    def attend(real: Any, q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
        return real(q, k, v, **options) * (1 + (k.shape[2] == 1024))

    on_device(monkeypatch, mx.fast, "scaled_dot_product_attention", attend)
    faulty = CliRunner().invoke(app, ["verify", "--kernels", str(quantized), "--json"])
    assert faulty.exit_code == 1
    report = json.loads(faulty.stdout)
    assert not report["is_sound"]
    wrong = [check for check in report["checks"] if check["outcome"] == "failed"]
    assert wrong and all("keys 1,024" in check["shape"] for check in wrong)
    assert all(check["reason"] for check in wrong)
