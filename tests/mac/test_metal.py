"""Results that hold on Metal within its rounding: `MLX_STACK_TEST_DEVICE=gpu` runs them there."""

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxstack.engine import device
from mlxstack.engine.model.runner import ModelRunner, SlotTokens
from mlxstack.host.hardware import CPU_VARIABLE, this_memory
from mlxstack.policy.attention_kernels import FORCIBLE_DIMS
from tests.conftest import DEVICE
from tests.mac.test_self_check import made
from tests.models import CONFIGS

pytestmark = [pytest.mark.mlx, pytest.mark.metal]

TOLERANCE = 2e-2
"""Of the largest logit: several roundings of TF32, whose mantissa has 10 bits."""

LENGTHS = (3, 40, 129)


def prompts() -> list[mx.array]:
    return [mx.array([(7 * i + n) % 256 for i in range(n)]) for n in LENGTHS]


def difference(first: mx.array, second: mx.array) -> float:
    """Largest difference, as a share of the largest logit."""
    first = first.astype(mx.float32)
    second = second.astype(mx.float32)
    return float((mx.abs(first - second).max() / mx.abs(first).max()).item())


@pytest.mark.parametrize("kind", CONFIGS)
def test_rows_of_a_batch_are_near_the_rows_alone(kind: str) -> None:
    model = made(CONFIGS[kind])
    runner = ModelRunner(model)
    slots = [
        [SlotTokens(make_prompt_cache(model), tokens) for tokens in prompts()] for _ in range(2)
    ]
    for row_slot in slots:
        for slot in row_slot:
            mx.eval(runner.execute([slot]))
    last = mx.array([5])
    alone = [runner.execute([SlotTokens(slot.caches, last)]) for slot in slots[0]]
    together = runner.execute([SlotTokens(slot.caches, last) for slot in slots[1]])
    assert difference(mx.concatenate(alone), together) < TOLERANCE


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_prompt_in_chunks_is_near_the_prompt_at_once(kind: str) -> None:
    model = made(CONFIGS[kind])
    tokens = prompts()[-1]
    runner = ModelRunner(model)
    whole = runner.execute([SlotTokens(make_prompt_cache(model), tokens)])[-1]
    caches = make_prompt_cache(model)
    for start in range(0, tokens.size, 43):
        last = runner.execute([SlotTokens(caches, tokens[start : start + 43])])[-1]
    assert difference(whole, last) < TOLERANCE


@pytest.mark.skipif(DEVICE != "gpu", reason="a CPU has no fused kernel")
@pytest.mark.parametrize("dims", FORCIBLE_DIMS)
def test_a_forced_kernel_is_near_the_default(dims: tuple[int, int]) -> None:
    queries, keys, values = (
        mx.random.normal((1, heads, n, dims[0])).astype(mx.bfloat16)
        for heads, n in ((8, 64), (2, 300), (2, 300))
    )
    default, forced = (
        mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=dims[0] ** -0.5, mask="causal", force_fused=is_forced
        )
        for is_forced in (False, True)
    )
    assert difference(default, forced) < TOLERANCE


@pytest.mark.skipif(DEVICE != "gpu", reason="a CPU recommends no working set")
def test_the_working_set_is_near_the_planned_share() -> None:
    recommended = mx.device_info()["max_recommended_working_set_size"]
    assert this_memory({}).usable == pytest.approx(recommended, rel=0.1)


def test_tests_compute_on_the_device_that_was_asked_for() -> None:
    assert device.has_gpu() == (DEVICE == "gpu")
    assert (DEVICE == "gpu") != bool(os.environ.get(CPU_VARIABLE))


def test_the_variable_puts_the_engine_of_every_process_on_the_cpu(tmp_path: Path) -> None:
    code = (
        "import mlx.core as mx\n"
        "chosen = []\n"
        "mx.set_default_device = chosen.append\n"
        "import mlxstack.engine\n"
        "assert all(given == mx.cpu for given in chosen)\n"
        "print(len(chosen))"
    )
    for value, expected in (("1", "1"), ("", "0")):
        env = {**os.environ, CPU_VARIABLE: value}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip().endswith(expected)
