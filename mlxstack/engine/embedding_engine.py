"""Embedding engine: one thread that owns MLX and embeds texts.

A text's vector is made of hidden states as the folder of the model says; by default it is that of
the last token, as embedders made of language models are trained:
https://huggingface.co/Qwen/Qwen3-Embedding-0.6B
"""

import gc
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import mlx.core as mx
from msgspec.structs import replace

from mlxstack.config.presets import BUILTIN_MODEL
from mlxstack.core.engine_snapshot import Snapshot
from mlxstack.core.errors import DeviceError, SetupError
from mlxstack.core.model_info import ModelFacts
from mlxstack.core.preset import Preset
from mlxstack.engine import device
from mlxstack.engine.device_errors import MAX_DEVICE_ERRORS, device_error
from mlxstack.engine.device_memory import DeviceMemory
from mlxstack.engine.embedding_pooling import Pooler
from mlxstack.engine.loading import loader
from mlxstack.engine.model.length_rope import BY_LENGTH
from mlxstack.host.hardware import this_memory
from mlxstack.host.load_progress import LoadProgress
from mlxstack.models.embedding_recipe import EmbeddingRecipe, embedding_recipe
from mlxstack.models.folder_check import check_folder

log = logging.getLogger(__name__)

MAX_TOKENS = 4096
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
        self._embedder: Embedder | None = None
        self._n_device_errors = 0
        self.trouble = ""
        """Why the engine ended; empty while it serves."""
        self._device_memory = DeviceMemory(this_memory(os.environ).total)
        self.tokenizer: Any = None
        self.load_progress = LoadProgress()

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
                    assert self._embedder is not None, "texts come after the model is loaded"
                    future.set_result(self._embedder.embed(texts))
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
        if self._began is None:
            return 0.0
        return time.monotonic() - self._began

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
            self._embedder = None
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
            if self._n_device_errors >= MAX_DEVICE_ERRORS:
                self.trouble = failure.message

    def _load(self) -> ModelFacts:
        spec = self._preset.model
        recipe = self._recipe(loader.locate(spec))
        loaded = loader.load(spec, self._preset.kv, progress=self.load_progress)
        loader.check_context(loaded.facts, self._preset.slots.n_ctx)
        self._device_memory.apply()
        try:
            width = int(states_of(loaded.model, mx.array([[0, 0]])).shape[-1])
            embedder = Embedder(loaded.model, Pooler(recipe, width))
            embedder.embed(((0, 0),))
        except (AttributeError, TypeError, ValueError) as error:
            raise SetupError(
                f"the model {loaded.facts.id} shows no hidden states, so it cannot embed: {error}"
            ) from error
        self._embedder = embedder
        self.tokenizer = loaded.tokenizer
        self._device_memory.wire(self._preset.device.wired)
        return replace(
            loaded.facts,
            text_prompt=recipe.prompt,
            text_end=loaded.tokenizer.eos_token_id if recipe.adds_end else None,
            max_text_tokens=recipe.max_tokens,
        )

    def _recipe(self, folder: Path) -> EmbeddingRecipe:
        """Recipe of the folder; the default for the demo. Raises SetupError."""
        if self._preset.model.id == BUILTIN_MODEL:
            return EmbeddingRecipe()
        check_folder(folder)
        try:
            return embedding_recipe(folder)
        except SetupError as error:
            raise SetupError(f"{self._preset.model.id} cannot embed: {error.message}") from error


class Embedder:
    """Embeds texts with a model and its pooling, on the MLX thread."""

    def __init__(self, model: Any, pooler: Pooler) -> None:
        self._model = model
        self._pooler = pooler
        names = (type(module).__name__ for _, module in model.named_modules())
        self._is_alone = not BY_LENGTH.isdisjoint(names)
        """Whether padding would change the states of a text."""

    def embed(self, texts: Sequence[Tokens]) -> tuple[bytes, ...]:
        """Vectors of length one, little-endian float32, in the order of the texts."""
        lengths = [len(text) for text in texts]
        groups = [[at] for at in range(len(texts))] if self._is_alone else batches(lengths)
        vectors: dict[int, bytes] = {}
        for group in groups:
            rows = self._vectors([texts[at] for at in group])
            vectors |= dict(zip(group, rows, strict=True))
        return tuple(vectors[at] for at in range(len(texts)))

    def _vectors(self, texts: Sequence[Tokens]) -> list[bytes]:
        """Vectors of texts in one pass; causal attention ignores right padding."""
        lengths = [len(text) for text in texts]
        padded = mx.array([[*text, *[0] * (max(lengths) - len(text))] for text in texts])
        vectors: Any = self._pooler.vectors(states_of(self._model, padded), lengths)
        mx.eval(vectors)
        return [bytes(memoryview(row)) for row in vectors]


def states_of(model: Any, tokens: mx.array) -> Any:
    """Last hidden states (texts, tokens, width) of tokens (texts, tokens)."""
    return model.model(tokens)


def batches(lengths: Sequence[int]) -> list[list[int]]:
    """Batches of text indices by similar length, at most MAX_TOKENS each."""
    made: list[list[int]] = []
    for at in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if not made or (len(made[-1]) + 1) * lengths[at] > MAX_TOKENS:
            made.append([])
        made[-1].append(at)
    return made
