"""Prefill with head dims that Metal fuses by force only; MLX's attention function is imitated."""

from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxstack.core.preset import PrefillSpec, PrefixCacheSpec
from mlxstack.engine import device
from mlxstack.engine.decode import attention_patch, kernel_choice
from mlxstack.engine.loading import loader
from mlxstack.policy.attention_kernels import FORCIBLE_DIMS, NAX_QUERIES
from mlxstack.policy.scheduling.chunked_prefill import PrefillPolicy, tokens_within_scores
from tests.conftest import ModelOf
from tests.engine.harness import preset_of, prompt, running
from tests.mac.test_device_budget import GIB, have_working_set
from tests.models import LLAMA, write
from tests.repetition import in_soak

pytestmark = pytest.mark.mlx

N_SLOWER = 8
"""Repetitions of the kernel that is to be slower, against noise of the clock."""

N_MEASURED = 96
N_VECTOR = 8
"""Most queries of the vector kernel."""
UNLOADABLE = "[metal::Device] Unable to load kernel steel_attention_bfloat16_bd256"


class Metal:
    """MLX's attention function on a GPU without and with a fast fused kernel of 256."""

    def __init__(self, n_default: int, n_forced: int, n_loadable: float = inf) -> None:
        self._real = mx.fast.scaled_dot_product_attention
        self._n_loadable = n_loadable
        self._repeats = {False: n_default, True: n_forced}
        self.forced: list[tuple[int, str]] = []
        """Queries and mask of each call with `force_fused`."""

    def __call__(
        self, q: mx.array, k: mx.array, v: mx.array, *, force_fused: bool = False, **options: Any
    ) -> mx.array:
        dims = q.shape[3], v.shape[3]
        if force_fused:
            if dims not in FORCIBLE_DIMS or q.shape[2] <= N_VECTOR:
                raise ValueError("force_fused=True but no fused kernel is available")
            self.forced.append((q.shape[2], str(options.get("mask"))))
            if len(self.forced) > self._n_loadable:
                raise RuntimeError(UNLOADABLE)
        if q.shape[2] > N_VECTOR and dims in FORCIBLE_DIMS:
            for _ in range(self._repeats[force_fused] - 1):
                mx.eval(self._real(q, k, v, **options))
        return self._real(q, k, v, **options)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of half precision with head dim 256."""
    config = LLAMA | {"head_dim": 256, "num_hidden_layers": 2}
    return write(tmp_path_factory.mktemp("model") / "wide", config, dtype=mx.bfloat16)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    have_working_set(monkeypatch, 8 * GIB)
    for module in (attention_patch, loader):
        monkeypatch.setattr(module, "has_gpu", lambda: True)
    monkeypatch.setattr(kernel_choice, "N_QUERIES", N_MEASURED)
    monkeypatch.setattr(kernel_choice, "N_KEYS", 1024)
    yield
    for dims in FORCIBLE_DIMS:
        attention_patch.force_fused(dims, is_forced=False)


def pace_of(model: Path, home: Path, n_tokens: int = 0) -> tuple[PrefillPolicy, list[int]]:
    """Bounds of prefill chunks of an engine, and its answer to a prompt of `n_tokens`."""
    preset = preset_of(model, prefix_cache=PrefixCacheSpec(enabled=False))
    with running(preset, home) as driver:
        answer = driver.answer(prompt(n_tokens), 4) if n_tokens else []
        return driver.engine.loaded.loop._limits.prefill, answer


def test_a_fused_kernel_that_is_fast_enough_is_forced_and_bounds_no_chunk(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded, cold = pace_of(wide, tmp_path / "cpu", 300)
    assert bounded.score_bytes
    metal = Metal(N_SLOWER, 1)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", metal)
    policy, answer = pace_of(wide, tmp_path / "metal", 300)
    assert policy.is_forced
    assert tokens_within_scores(500_000, policy) == policy.max_chunk_size
    assert answer == cold
    in_prefill = [n for n, mask in metal.forced if mask == "causal" and n != N_MEASURED]
    assert sum(in_prefill) >= 2 * 299, "both layers compute the prompt with the forced kernel"


def test_a_slow_fused_kernel_leaves_the_bound(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metal = Metal(1, N_SLOWER)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", metal)
    policy, _ = pace_of(wide, tmp_path, 40)
    assert policy.score_bytes and not policy.fused_from and not policy.is_forced
    assert {n for n, _ in metal.forced} == {N_MEASURED}, "measured once, not served"


def test_an_m5_bounds_only_chunks_below_its_fused_kernel(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {**mx.device_info(), "architecture": "applegpu_g17s"}
    monkeypatch.setattr(mx, "device_info", lambda *_: facts)
    monkeypatch.setattr(device, "macos_version", lambda: (26, 3))
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", Metal(1, N_SLOWER))
    policy, _ = pace_of(wide, tmp_path)
    assert policy.score_bytes and policy.fused_from == NAX_QUERIES


def test_usual_head_dims_are_neither_measured_nor_forced(
    model_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metal = Metal(N_SLOWER, 1)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", metal)
    pace_of(model_of("tiny"), tmp_path, 40)
    assert metal.forced == []


def test_a_kernel_that_cannot_be_loaded_is_not_forced(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metal = Metal(N_SLOWER, 1, n_loadable=0)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", metal)
    policy, answer = pace_of(wide, tmp_path, 40)
    assert len(answer) == 4
    assert policy.score_bytes and not policy.is_forced
    assert {n for n, _ in metal.forced} == {N_MEASURED}


def test_float32_is_neither_measured_nor_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write(tmp_path / "single", LLAMA | {"head_dim": 256, "num_hidden_layers": 2})
    metal = Metal(N_SLOWER, 1)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", metal)
    policy, _ = pace_of(model, tmp_path, 300)
    assert policy.score_bytes and not policy.is_forced
    assert metal.forced == []


@pytest.mark.parametrize("n_chunks", [1, *in_soak(0)])
def test_a_prompt_begins_again_without_the_kernel_that_failed(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_chunks: int
) -> None:
    preset = preset_of(wide, prefill=PrefillSpec(chunk_size=64))
    first = prompt(150)
    second = (*prompt(150), *prompt(150, seed=1))
    with running(preset, tmp_path / "cpu") as driver:
        unforced = [driver.answer(tokens, 8, slot=0) for tokens in (first, second)]
    # All tries at load, and of the second prompt some chunks and the first layer of the next one.
    metal = Metal(N_SLOWER, 1, n_loadable=kernel_choice.N_TRIES + 2 * n_chunks + 1)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", metal)
    with running(preset, tmp_path / "metal") as driver:
        assert driver.engine.loaded.loop._limits.prefill.is_forced
        ask = driver.submit(first, 8, slot=0)
        driver.finish(ask)
        policy = driver.engine.loaded.loop._limits.prefill
        assert driver.tokens(ask) == unforced[0]
        assert policy.score_bytes and not policy.is_forced
        n_forced = len(metal.forced)
        assert driver.answer(second, 8, slot=0) == unforced[1]
        assert len(metal.forced) == n_forced
        assert driver.seated(ask).n_cached == 0
