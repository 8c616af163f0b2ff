"""Blocks of experts behind `mx.compile`; the GPU is imitated, and so is the clock at load."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRASwitchLinear
from mlx_lm.utils import load_model

from mlxstack.core.errors import DeviceError
from mlxstack.core.preset import KVSpec, Speculation
from mlxstack.engine import parts
from mlxstack.engine.model import compiled_experts
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.compiled_experts import MAX_S, MIN_GAIN, compile_experts, expert_blocks
from tests.conftest import ModelOf
from tests.engine.harness import Driver, array_bytes, draft_freely, preset_of, prompt, running
from tests.models import EXPERTS, LLAMA, write
from tests.repetition import all_in_soak

pytestmark = pytest.mark.mlx

Shape = tuple[int, ...]

TICK_S = 1e-4
"""Seconds between two readings of the clock in which no block runs its own function."""
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
BLOCKS = {
    "tiny-hybrid": "qwen3_next:Qwen3NextSparseMoeBlock",
    "tiny-mla": "deepseek_v3:DeepseekV3MoE",
    "tiny-sinks": "gpt_oss:MLPBlock",
    "mixtral": "mixtral:MixtralSparseMoeBlock",
    "qwen3_moe": "qwen3_moe:Qwen3MoeSparseMoeBlock",
}
"""Modules and classes of mlx-lm."""
ALL = {(1, 1), (2, 1), (3, 1), (1, 2), (1, 3), (1, 4), (1, 8)}
"""Passes that three slots with drafts may bring."""


def block_of(kind: str) -> Any:
    """Class of a model's blocks of experts; mlx-lm is imported after the engine."""
    return resolve_name(f"mlx_lm.models.{BLOCKS[kind]}")


class Clock:
    """Clock on which the own function of a block takes `seconds(shape)` more than a compiled one.

    It may be negative. `calls` counts own functions by shape.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, kind: str, seconds: Callable[[Shape], float]
    ) -> None:
        self.calls: Counter[Shape] = Counter()
        self._now = 0.0
        block = block_of(kind)
        compute = block.__call__

        def call(module: Any, x: mx.array) -> mx.array:
            self.calls[x.shape[:-1]] += 1
            self._now += seconds(x.shape[:-1])
            output: mx.array = compute(module, x)
            return output

        patch.setattr(block, "__call__", call)
        patch.setattr(parts, "compile_experts", partial(compile_experts, clock=self))

    def __call__(self) -> float:
        self._now += TICK_S
        return self._now


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_experts, "has_gpu", lambda: True)


@pytest.fixture
def folder_of(model_of: ModelOf, tmp_path: Path) -> ModelOf:
    """Folders of models that are built in others, and of two more with experts."""
    more = {"mixtral": MIXTRAL, "qwen3_moe": EXPERTS}

    def folder(kind: str) -> Path:
        path = tmp_path / kind
        if kind not in more:
            return model_of(kind)
        return path if path.exists() else write(path, more[kind])

    return folder


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, logger=compiled_experts.__name__):
        yield caplog


def faster(_: Shape) -> float:
    return TICK_S


def load(folder: Path) -> Any:
    return load_model(folder)[0]


def compile_all(model: Any, clock: Clock, n_slots: int = 3) -> None:
    compile_experts(model, CacheFactory(model, KVSpec()), n_slots, is_drafting=True, clock=clock)


def own_shapes(model: Any, clock: Clock) -> set[Shape]:
    """Shapes for which blocks run their own function, of those that may be compiled."""
    clock.calls.clear()
    layer = model.layers[-1]
    dim = model.args.hidden_size
    for shape in ALL:
        mx.eval(layer.mlp(mx.random.normal((*shape, dim))))
    return set(clock.calls)


def scene(driver: Driver) -> list[list[int]]:
    """Greedy answers in batches, after forks, with drafts, and in a later turn."""
    draft_freely(driver)
    head = prompt(140)
    shared = {"checkpoint_positions": (len(head),)}
    asks = [driver.submit(head + prompt(9, seed=n), 12, agent=str(n), **shared) for n in (1, 2, 3)]
    for ask in asks:
        driver.finish(ask)
    asks.append(driver.submit(head + prompt(9, seed=4), 12, agent="4", **shared))
    driver.finish(asks[-1])
    assert driver.seated(asks[-1]).n_cached
    answers = [driver.tokens(ask) for ask in asks]
    predicted = {"prediction": tuple(answers[0]), "use_cache": False}
    drafted = [driver.submit(head + prompt(9, seed=1), 12, **predicted) for _ in range(3)]
    for ask in drafted:
        driver.finish(ask)
    answers += [driver.tokens(ask) for ask in drafted]
    answers.append(driver.answer(head + prompt(9, seed=1), 12, **predicted))
    history = (*head, *prompt(9, seed=1), *answers[0], *prompt(5, seed=9))
    return [*answers, driver.answer(history, 12, agent="1")]


@pytest.mark.parametrize("kind", all_in_soak(BLOCKS, "tiny-hybrid", "tiny-mla", "tiny-sinks"))
def test_answers_of_compiled_blocks_are_those_of_the_blocks_themselves(
    kind: str, folder_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preset = preset_of(folder_of(kind), speculation=Speculation.AUTO)
    clock = Clock(monkeypatch, kind, faster)
    monkeypatch.setattr(compiled_experts, "has_gpu", lambda: False)
    with running(preset, tmp_path / "cpu") as driver:
        expected = scene(driver)
    assert clock.calls[1, 1] and {(2, 1), (3, 1)} & set(clock.calls)
    monkeypatch.setattr(compiled_experts, "has_gpu", lambda: True)
    with running(preset, tmp_path / "gpu") as driver:
        clock.calls.clear()
        assert scene(driver) == expected
        assert driver.engine.snapshot().counters.n_accepted_tokens
    assert clock.calls and not ALL & set(clock.calls)


def test_a_block_keeps_its_names_and_arrays(
    folder_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folder_of("tiny-hybrid"))
    before = tree_flatten(model.parameters())
    kinds = [(name, type(module).__name__) for name, module in model.named_modules()]
    clock = Clock(monkeypatch, "tiny-hybrid", faster)
    compile_all(model, clock)
    assert own_shapes(model, clock) == set()
    after = tree_flatten(model.parameters())
    assert [name for name, _ in after] == [name for name, _ in before]
    assert all(a is b for (_, a), (_, b) in zip(after, before, strict=True))
    assert [(name, type(module).__name__) for name, module in model.named_modules()] == kinds


def test_arrays_are_inputs_of_a_compiled_block(
    folder_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folder_of("qwen3_moe"))
    compile_all(model, Clock(monkeypatch, "qwen3_moe", faster))
    block = model.layers[0].mlp
    x = mx.random.normal((2, 1, 64))
    assert mx.abs(block(x)).max() > 0
    block.switch_mlp.down_proj.weight = mx.zeros_like(block.switch_mlp.down_proj.weight)
    assert mx.abs(block(x)).max() == 0


def test_adapters_of_experts_are_computed(
    folder_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folder_of("qwen3_moe"))
    for layer in model.layers:
        adapted = LoRASwitchLinear.from_base(layer.mlp.switch_mlp.up_proj, r=4)
        adapted.lora_b = mx.random.normal(adapted.lora_b.shape)
        layer.mlp.switch_mlp.up_proj = adapted
    model.eval()
    block = model.layers[1].mlp
    x = mx.random.normal((3, 1, 64))
    expected = block(x)
    clock = Clock(monkeypatch, "qwen3_moe", faster)
    compile_all(model, clock)
    assert own_shapes(model, clock) == set()
    assert mx.array_equal(block(x), expected)


@pytest.mark.parametrize("gain", [MIN_GAIN - 0.01, MIN_GAIN + 0.01])
def test_only_passes_that_gain_enough_are_compiled(
    gain: float, folder_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folder_of("qwen3_moe"))
    n_layers = len(model.layers)
    seconds = {(2, 1): TICK_S * gain / (1 - gain) / n_layers, (1, 4): TICK_S}
    slower = -TICK_S / 2 / n_layers
    clock = Clock(monkeypatch, "qwen3_moe", lambda shape: seconds.get(shape, slower))
    compile_all(model, clock)
    compiled = {(1, 4), (2, 1)} if gain > MIN_GAIN else {(1, 4)}
    assert own_shapes(model, clock) == ALL - compiled


def test_nothing_is_replaced_without_a_gain_or_a_gpu_or_experts(
    folder_of: ModelOf, model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = block_of("qwen3_moe")
    model = load(folder_of("qwen3_moe"))
    compile_all(model, Clock(monkeypatch, "qwen3_moe", lambda _: 0.0))
    assert {type(layer.mlp) for layer in model.layers} == {own}
    monkeypatch.setattr(compiled_experts, "has_gpu", lambda: False)
    clock = Clock(monkeypatch, "qwen3_moe", faster)
    compile_all(model, clock)
    assert {type(layer.mlp) for layer in model.layers} == {own} and not clock.calls
    assert expert_blocks(load(model_of("tiny"))) == []


def test_a_pass_whose_compiled_bits_differ_is_not_compiled(
    folder_of: ModelOf, monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    real = mx.compile

    def faulty(function: Any, inputs: Any) -> Any:
        compiled = real(function, inputs=inputs)
        # The last bit of the last number, in one of the layers.
        is_last = inputs is model.layers[-1].mlp

        def call(x: mx.array) -> mx.array:
            output: mx.array = compiled(x)
            if is_last and x.shape[:-1] == (2, 1):
                bits = output.view(mx.uint32)
                bits[-1, -1, -1] += 1
                output = bits.view(mx.float32)
            return output

        return call

    model = load(folder_of("qwen3_moe"))
    monkeypatch.setattr(mx, "compile", faulty)
    clock = Clock(monkeypatch, "qwen3_moe", faster)
    compile_all(model, clock)
    assert own_shapes(model, clock) == {(2, 1)}
    (warning,) = [record for record in logged.records if record.levelno >= logging.WARNING]
    assert "not compiled for 2 rows" in warning.getMessage()
    assert "other numbers" in warning.getMessage()
    assert "1 row (" in logged.text and "3 rows (" in logged.text


def test_a_block_that_cannot_be_traced_stays_whole(
    folder_of: ModelOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    logged: pytest.LogCaptureFixture,
) -> None:
    preset = preset_of(folder_of("qwen3_moe"))
    with running(preset, tmp_path / "cpu") as driver:
        expected = driver.answer(prompt(30), 8)
    block = block_of("qwen3_moe")
    compute = block.__call__

    def readings(module: Any, x: mx.array) -> Any:
        output = compute(module, x)
        # While it is traced there are no numbers.
        mx.eval(output)
        return output

    monkeypatch.setattr(block, "__call__", readings)
    clock = Clock(monkeypatch, "qwen3_moe", faster)
    with running(preset, tmp_path / "gpu") as driver:
        clock.calls.clear()
        assert driver.answer(prompt(30), 8) == expected
    assert clock.calls[1, 1]
    assert "not compiled for 1 row: " in logged.text
    assert "compiled for passes of no shape" in logged.text


def test_an_error_of_the_device_is_no_error_of_the_compilation(
    folder_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        def call(_: mx.array) -> Any:
            raise RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory")

        return call

    model = load(folder_of("qwen3_moe"))
    monkeypatch.setattr(mx, "compile", refused)
    with pytest.raises(DeviceError):
        compile_all(model, Clock(monkeypatch, "qwen3_moe", faster))


def test_measuring_ends_in_time(
    folder_of: ModelOf, monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    model = load(folder_of("qwen3_moe"))
    # Two shapes fit: each runs its own function once for inputs and bits, and in each try.
    n_calls = len(model.layers) * (compiled_experts.N_TRIES + 3)
    clock = Clock(monkeypatch, "qwen3_moe", lambda _: MAX_S / (2.5 * n_calls))
    compile_all(model, clock)
    assert own_shapes(model, clock) == ALL - {(1, 1), (2, 1)}
    assert "not compiled for 8 tokens of a row: measuring took too long" in logged.text


def test_swapped_models_leave_no_array_and_answer_as_before(
    folder_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ("qwen3_moe", "tiny-sinks")
    presets = {kind: preset_of(folder_of(kind)) for kind in kinds}
    answers: dict[str, list[list[int]]] = {kind: [] for kind in kinds}
    left = []
    for n, kind in enumerate(kinds * 3):
        with pytest.MonkeyPatch.context() as patch:
            clock = Clock(patch, kind, faster)
            with running(presets[kind], tmp_path / str(n)) as driver:
                clock.calls.clear()
                answers[kind].append(driver.answer(prompt(40), 8))
            assert not clock.calls[1, 1]
        left.append(array_bytes())
    assert all(len({tuple(answer) for answer in of_model}) == 1 for of_model in answers.values())
    assert max(left[2:]) <= left[1]
