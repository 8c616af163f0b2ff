"""Embedding engine: one thread that owns MLX and embeds texts.

A text's vector is the hidden state of its last token, as Qwen3-Embedding and other embedders
made of language models are trained: https://huggingface.co/Qwen/Qwen3-Embedding-0.6B
"""

import gc
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import mlx.core as mx

from mlxstack.core.engine_snapshot import Snapshot
from mlxstack.core.errors import DeviceError, SetupError
from mlxstack.core.model_info import ModelFacts
from mlxstack.core.preset import Preset
from mlxstack.engine import device
from mlxstack.engine.device_errors import MOST_DEVICE_ERRORS, device_error
from mlxstack.engine.device_memory import DeviceMemory
from mlxstack.engine.loading import loader
from mlxstack.host.hardware import this_memory

log = logging.getLogger(__name__)

MOST_TOKENS = 4096
"""Tokens of one forward pass, padding included; a longer text goes alone."""

Tokens = tuple[int, ...]


class EmbeddingEngine:
    """Embeds texts on its own thread. Every public method is thread-safe."""

    def __init__(self, preset: Preset) -> None:
        self._preset = preset
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._loaded: Future[ModelFacts] = Future()
        self._stopped: Future[None] = Future()
        self._began: float | None = None
        self._thread = threading.Thread(target=self._run, name="mlx", daemon=True)
        self._model: Any = None
        self._n_device_errors = 0
        self.trouble = ""
        """Why the engine ended; empty while it serves."""
        self._device_memory = DeviceMemory(this_memory(os.environ).total)
        self.tokenizer: Any = None

    def start(self) -> Future[ModelFacts]:
        """Load the model on the MLX thread. The future raises SetupError."""
        self._thread.start()
        return self._loaded

    def embed(self, texts: tuple[Tokens, ...]) -> Future[tuple[bytes, ...]]:
        """Compute one vector per text: little-endian float32, of length one."""
        future: Future[tuple[bytes, ...]] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    assert self._model is not None, "texts come after the model is loaded"
                    future.set_result(embed(self._model, texts))
                    self._n_device_errors = 0
                except Exception as error:
                    failure = device_error(error)
                    future.set_exception(failure or error)
                    self._note(failure)

        self._inbox.put(work)
        return future

    def snapshot(self) -> Snapshot:
        """Without slots."""
        return Snapshot()

    def stalled_s(self) -> float:
        """Seconds since the texts at work were taken up; 0 when idle."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive() and not self.trouble

    def stop(self, drain_s: float) -> Future[None]:
        """End the thread after what it was given."""
        if self._thread.ident is None and not self._stopped.done():
            self._stopped.set_result(None)
        self._inbox.put(None)
        return self._stopped

    def _run(self) -> None:
        try:
            self._loaded.set_result(self._load())
            while not self.trouble and (work := self._inbox.get()) is not None:
                self._began = time.monotonic()
                work()
                self._began = None
        except Exception as error:
            self._loaded.set_exception(device_error(error) or error)
        finally:
            self._device_memory.restore()
            self._model = None
            gc.collect()
            device.settle()
            # Without this MLX aborts the process at exit: its stream threads are still running.
            mx.clear_streams()
            self._stopped.set_result(None)

    def _note(self, failure: DeviceError | None) -> None:
        """Count device errors; the engine ends when only a new process helps."""
        if failure is not None:
            log.error("%s", failure.message)
            self._n_device_errors += 1
            if self._n_device_errors >= MOST_DEVICE_ERRORS:
                self.trouble = failure.message

    def _load(self) -> ModelFacts:
        loaded = loader.load(self._preset.model, self._preset.kv)
        loader.check_context(loaded.facts, self._preset.slots.n_ctx)
        self._device_memory.apply()
        try:
            embed(loaded.model, ((0, 0),))
        except (AttributeError, TypeError, ValueError) as error:
            raise SetupError(
                f"the model {loaded.facts.id} shows no hidden states, so it cannot embed: {error}"
            ) from error
        self._model, self.tokenizer = loaded.model, loaded.tokenizer
        self._device_memory.wire(self._preset.device.wired)
        return loaded.facts


def embed(model: Any, texts: Sequence[Tokens]) -> tuple[bytes, ...]:
    """Vectors of length one, little-endian float32, in the order of the texts."""
    vectors: dict[int, bytes] = {}
    for batch in batches([len(text) for text in texts]):
        rows = _pooled(model, [texts[i] for i in batch])
        vectors |= dict(zip(batch, rows, strict=True))
    return tuple(vectors[at] for at in range(len(texts)))


def batches(lengths: Sequence[int]) -> list[list[int]]:
    """Batches of text indices by similar length, at most MOST_TOKENS each."""
    made: list[list[int]] = []
    for at in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if not made or (len(made[-1]) + 1) * lengths[at] > MOST_TOKENS:
            made.append([])
        made[-1].append(at)
    return made


def _pooled(model: Any, texts: Sequence[Tokens]) -> list[bytes]:
    """Hidden states of the last tokens; causal attention ignores right padding."""
    longest = max(len(text) for text in texts)
    padded = mx.array([[*text, *[0] * (longest - len(text))] for text in texts])
    states: Any = model.model(padded)
    last = mx.array([len(text) - 1 for text in texts])
    pooled = states[mx.arange(len(texts)), last].astype(mx.float32)
    vectors = pooled / mx.maximum(mx.linalg.norm(pooled, axis=-1, keepdims=True), 1e-12)
    mx.eval(vectors)
    return [bytes(memoryview(row)) for row in vectors]
