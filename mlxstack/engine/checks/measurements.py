"""Measurements of a loaded model within a budget of seconds."""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import psutil
from msgspec import Struct
from msgspec.structs import asdict

from mlxstack.engine import device
from mlxstack.engine.checks.bit_table import bit_table
from mlxstack.engine.checks.model_shapes import AttentionShape, ModelShapes, shapes_of
from mlxstack.engine.model import cache_adapters
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.runner import ModelRunner, SlotTokens
from mlxstack.policy.attention_kernels import FORCIBLE_DIMS

ROW_COUNTS = (1, 2, 4, 8)
KEY_COUNTS = (1024, 8192, 32768)
FORCED_KEYS = (8192, 32768)
N_QUERIES = 512
PAUSES_S = (0.2, 0.8, 1.5, 8.0, 60.0)
MAX_PAUSE_SHARE = 0.25
"""Of the time that is left, for one pause."""
N_PROMPT = 2048
N_STEPS = 24
MIN_STEPS = 4
MAX_STEPS_S = 4.0
"""Seconds after which a measured loop of steps ends."""
N_SHORT = 1024
"""Keys beside the measurements that do not vary them."""
N_CHAIN = 3000
N_TRIES = 3
MEMORY_SHARE = 0.5
"""Of the free memory, for the KV of a measured step."""
NO_TIME = "left out: no time left"

Value = float | int | str | tuple[int, ...]


class Measurement(Struct, frozen=True):
    """Figures of a measurement by name and unit, or why none."""

    name: str
    figures: dict[str, Value] = {}
    left_out: str = ""

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {_shown(value)}" for name, value in self.figures.items())
        return f"{self.name}: {', '.join(filter(None, (figures, self.left_out)))}"


class StepTimes(Struct, frozen=True):
    """Medians of a decode step and of building its graph."""

    step_ms: float
    host_ms: float


class Deadline:
    """End of a budget of seconds."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left_s(self) -> float:
        """Seconds until the end; at most 0 after it."""
        return self._end - time.monotonic()


class DeviceTimer:
    """Measures a model on the default device until a deadline."""

    def __init__(self, model: Any, cache_factory: CacheFactory, seconds: float) -> None:
        self._runner = ModelRunner(model)
        self._factory = cache_factory
        self._deadline = Deadline(seconds)
        self._model = model

    def all(self) -> Iterator[Measurement]:
        """All measurements, those that need the least time first."""
        shapes = shapes_of(self._model)
        parts: dict[str, Callable[[], Iterator[Measurement]]] = {
            "dispatch": self.dispatch,
            "bit table": lambda: self.bits(shapes),
            "forced attention": lambda: self.forced(shapes),
            "idle penalty": self.idle,
            "decode step": self.steps,
        }
        for name, measure in parts.items():
            if self._deadline.left_s() <= 0:
                yield Measurement(name, left_out=NO_TIME)
                continue
            yield from measure()

    def short(self) -> Iterator[Measurement]:
        """Decode, prefill and peak memory: what the limits of command buffers change."""
        mx.reset_peak_memory()
        caches = self._filled(1, N_SHORT)
        yield Measurement("decode step", {"rows": 1, "keys": N_SHORT, **asdict(self._step(caches))})
        began = time.perf_counter()
        n_computed = 0
        tokens = mx.zeros((N_PROMPT,), mx.int32)
        fresh = self._factory.make()
        while n_computed < N_PROMPT and (n_computed == 0 or self._deadline.left_s() > 0):
            chunk = tokens[: N_PROMPT // 4]
            mx.eval(self._runner.execute([SlotTokens(fresh, chunk, n_prefill=N_PROMPT // 4)]))
            n_computed += N_PROMPT // 4
        rate = n_computed / (time.perf_counter() - began)
        peak = mx.get_peak_memory()
        yield Measurement("prefill", {"tokens": n_computed, "tps": rate, "peak_bytes": peak})

    def dispatch(self) -> Iterator[Measurement]:
        """Cost of a dispatch, by a chain of small dependent kernels."""
        taken = []
        for _ in range(N_TRIES):
            numbers = mx.zeros((32,))
            factor = mx.ones((32,))
            mx.eval(numbers, factor)
            for _ in range(N_CHAIN):
                numbers = numbers + factor
            began = time.perf_counter()
            mx.eval(numbers)
            taken.append(time.perf_counter() - began)
        yield Measurement("dispatch", {"kernels": N_CHAIN, "each_us": 1e6 * min(taken) / N_CHAIN})

    def bits(self, shapes: ModelShapes) -> Iterator[Measurement]:
        """The bit table of the model's linear layers."""
        for row in bit_table(shapes):
            yield Measurement("bit table", asdict(row))

    def steps(self) -> Iterator[Measurement]:
        """Decode steps by rows and keys."""
        for n_keys in KEY_COUNTS:
            for n_rows in ROW_COUNTS:
                figures: dict[str, Value] = {"rows": n_rows, "keys": n_keys}
                why_not = self._why_not(n_rows, n_keys)
                if not why_not:
                    figures |= asdict(self._step(self._filled(n_rows, n_keys)))
                device.release()
                yield Measurement("decode step", figures, why_not)

    def forced(self, shapes: ModelShapes) -> Iterator[Measurement]:
        """Prefill attention by the default and the forced kernel."""
        forcible = [
            shape
            for shape in shapes.attention
            if not shape.is_decode and (shape.key_dim, shape.value_dim) in FORCIBLE_DIMS
        ]
        if not forcible:
            why_not = "left out: MLX forces no kernel for the head dims of this model"
            yield Measurement("forced attention", left_out=why_not)
        for shape in forcible:
            for n_keys in FORCED_KEYS:
                figures: dict[str, Value] = {"queries": N_QUERIES, "keys": n_keys}
                if self._deadline.left_s() <= 0:
                    yield Measurement("forced attention", figures, NO_TIME)
                    continue
                try:
                    figures |= _attention_times(shape, n_keys)
                    why_not = ""
                except (ValueError, RuntimeError) as error:
                    why_not = f"left out: {error}"
                yield Measurement("forced attention", figures, why_not)

    def idle(self) -> Iterator[Measurement]:
        """The first step after a pause, beside one without a pause."""
        caches = self._filled(1, N_SHORT)
        self._step(caches)
        for pause_s in PAUSES_S:
            figures: dict[str, Value] = {"pause_s": pause_s}
            if pause_s > MAX_PAUSE_SHARE * self._deadline.left_s():
                yield Measurement("idle penalty", figures, NO_TIME)
                continue
            warm_s = self._single(caches)
            time.sleep(pause_s)
            figures |= {"first_ms": 1000 * self._single(caches), "warm_ms": 1000 * warm_s}
            yield Measurement("idle penalty", figures)

    def _why_not(self, n_rows: int, n_keys: int) -> str:
        """Reason why a step is not measured; empty if it is."""
        if self._deadline.left_s() <= 0:
            return NO_TIME
        n_bytes = n_rows * n_keys * self._bytes_per_token()
        free = psutil.virtual_memory().available
        limit = int(mx.device_info().get("max_recommended_working_set_size", 0))
        if limit:
            free = min(free, limit - mx.get_active_memory())
        if n_bytes > MEMORY_SHARE * free:
            return f"left out: its KV takes {n_bytes / 2**30:.1f} GiB"
        return ""

    def _bytes_per_token(self) -> int:
        caches = self._filled(1, 2)
        leaves = [
            leaf for leaf in cache_adapters.leaves(caches) if cache_adapters.is_sliceable(leaf)
        ]
        return sum(
            part.nbytes // part.shape[2]
            for leaf in leaves
            for part in cache_adapters.parts_of(leaf)
        )

    def _filled(self, n_rows: int, n_keys: int) -> list[list[Any]]:
        """Caches of rows with random KV; recurrent state is of two tokens."""
        rows = [self._factory.make() for _ in range(n_rows)]
        for caches in rows:
            mx.eval(self._runner.execute([SlotTokens(caches, mx.zeros((2,), mx.int32))]))
            for leaf in cache_adapters.leaves(caches):
                if n_keys > 2:
                    cache_adapters.extend_room(leaf, n_keys - 2, seed=0)
                    mx.eval([] if leaf.empty() else leaf.state)
        return rows

    def _step(self, rows: list[list[Any]]) -> StepTimes:
        """Run decode steps, each dispatched before the last one is read."""
        tokens = mx.zeros((len(rows),), mx.int32)
        steps: list[float] = []
        hosts: list[float] = []
        began = time.perf_counter()
        while len(steps) < N_STEPS:
            step_began = time.perf_counter()
            following = self._following(rows, tokens)
            hosts.append(time.perf_counter() - step_began)
            mx.async_eval(following)  # type: ignore[no-untyped-call]
            tokens.tolist()
            tokens = following
            steps.append(time.perf_counter() - step_began)
            if len(steps) >= MIN_STEPS and time.perf_counter() - began > MAX_STEPS_S:
                break
        mx.eval(tokens)
        # The first steps compile kernels.
        return StepTimes(1000 * statistics.median(steps[2:]), 1000 * statistics.median(hosts[2:]))

    def _following(self, rows: list[list[Any]], tokens: mx.array) -> mx.array:
        """Likeliest next tokens (rows,), lazily."""
        plan = [SlotTokens(caches, tokens[i : i + 1]) for i, caches in enumerate(rows)]
        return mx.argmax(self._runner.execute(plan), axis=-1)

    def _single(self, rows: list[list[Any]]) -> float:
        """Seconds of one step that nothing overlaps."""
        began = time.perf_counter()
        mx.eval(self._following(rows, mx.zeros((len(rows),), mx.int32)))
        return time.perf_counter() - began


def _attention_times(shape: AttentionShape, n_keys: int) -> dict[str, Value]:
    """Milliseconds of default and forced kernel, the fastest of alternating tries.

    Raises ValueError, RuntimeError where no kernel can be forced.
    """
    dims = (
        (shape.n_heads, N_QUERIES, shape.key_dim),
        (shape.n_kv_heads, n_keys, shape.key_dim),
        (shape.n_kv_heads, n_keys, shape.value_dim),
    )
    arrays: list[Any] = [mx.random.normal((1, *dim)).astype(shape.dtype) for dim in dims]
    attend: Any = partial(
        mx.fast.scaled_dot_product_attention, scale=shape.key_dim**-0.5, mask="causal"
    )
    mx.eval(arrays)
    times: dict[str, list[float]] = {"default_ms": [], "forced_ms": []}
    for _ in range(N_TRIES):
        for name, taken in times.items():
            began = time.perf_counter()
            mx.eval(attend(*arrays, force_fused=name == "forced_ms"))
            taken.append(1000 * (time.perf_counter() - began))
    return {name: min(taken) for name, taken in times.items()}


def _shown(value: Value) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)
