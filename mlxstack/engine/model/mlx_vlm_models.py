"""Language models of mlx-vlm, for the types that mlx-lm lacks.

Their caches and their attention are those of mlx-lm: `join` puts these into mlx-vlm's modules
before a model of it is imported. mlx-vlm's own `__init__` imports servers, audio and data sets; no
model needs it, so it is not run.
"""

import ast
import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import base as lm_base
from mlx_lm.models import cache as lm_cache

from mlxstack.engine.model import mlx_vlm_fixes
from mlxstack.engine.model.recurrent_cache import RecurrentCache

PACKAGE = "mlx_vlm"
EXTRA = "more-models"
SAME_CACHES = (
    "CacheList", "ChunkedKVCache", "ConcatenateKVCache", "KVCache", "QuantizedKVCache",
    "RotatingKVCache",
)  # fmt: skip
"""Classes of which mlx-vlm has copies."""
SECTIONS = ("text", "vision", "perceiver", "projector", "audio")
"""Parts of a config.json that have classes of their own."""


class TextModel(nn.Module):  # type: ignore[misc]
    """Language model of mlx-vlm, called as one of mlx-lm."""

    def __init__(self, language_model: Any) -> None:
        super().__init__()
        self.language_model = language_model

    def __call__(self, tokens: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        positions = {}
        if cache and hasattr(self.language_model, "_rope_deltas"):
            # Without positions it remembers those of the prompt before.
            positions["position_ids"] = _positions(tokens, cache)
        output = self.language_model(tokens, cache=cache, **positions)
        logits: mx.array = output.logits
        return logits

    @property
    def revision(self) -> str:
        """Versions of the package and of the fix, which shape its KV."""
        fix = mlx_vlm_fixes.revision(type(self.language_model).__module__)
        return f"{version()} {fix}".rstrip()

    @property
    def layers(self) -> Any:
        """Its layers."""
        return self.language_model.layers

    def make_cache(self) -> list[Any]:
        """Empty caches of its layers."""
        caches: list[Any] = lm_cache.make_prompt_cache(self.language_model)
        return caches


def is_installed() -> bool:
    """Whether the extra is installed."""
    return _spec() is not None


def version() -> str:
    """Version of the package."""
    return metadata.version("mlx-vlm")


def folder_of(config: Mapping[str, Any]) -> str | None:
    """Folder of mlx-vlm for a config.json.

    None where it has none, or is not installed.
    """
    spec = _spec()
    if spec is None:
        return None
    package = Path(next(iter(spec.submodule_search_locations or ())))
    kind = str(config.get("model_type", ""))
    name = _renamed(package).get(kind, kind).replace("-", "_")
    is_there = name.isidentifier() and (package / "models" / name / "__init__.py").is_file()
    return name if is_there else None


def join() -> None:
    """Import mlx-vlm's caches and attention, with mlx-lm's in their place."""
    if PACKAGE in sys.modules:
        return
    spec = _spec()
    assert spec is not None
    sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    caches = importlib.import_module(f"{PACKAGE}.models.cache")
    for name in SAME_CACHES:
        setattr(caches, name, getattr(lm_cache, name))
    caches.ArraysCache = RecurrentCache  # type: ignore[attr-defined]
    base: Any = importlib.import_module(f"{PACKAGE}.models.base")
    base.scaled_dot_product_attention = lm_base.scaled_dot_product_attention


def load(folder: Path) -> TextModel:
    """Load the language model of a model folder.

    Its weights, and no others, are read later.
    """
    join()
    utils: Any = importlib.import_module(f"{PACKAGE}.utils")
    return text_model(utils.load_model(folder, lazy=True))


def text_model(whole: Any) -> TextModel:
    """Language model of a whole one.

    Raises ValueError where it has none.
    """
    language_model = getattr(whole, "language_model", None)
    if language_model is None:
        raise ValueError("it has no language model, so it generates no text")
    mlx_vlm_fixes.fix(type(language_model).__module__)
    return TextModel(language_model)


def built(name: str, config: dict[str, Any]) -> tuple[TextModel, Any]:
    """Language model of mlx-vlm's folder `name` without weights, and its parsed config."""
    whole, args = built_whole(name, config)
    return text_model(whole), args


def built_whole(name: str, config: dict[str, Any]) -> tuple[Any, Any]:
    """As `built` with its towers, made as mlx-vlm's `load_model` makes it."""
    join()
    module: Any = importlib.import_module(f"{PACKAGE}.models.{name}")
    config.setdefault("text_config", config.pop("llm_config", {}))
    config.setdefault("vision_config", {})
    config.setdefault("audio_config", {})
    args = module.ModelConfig.from_dict(config)
    for section in SECTIONS:
        key = f"{section}_config"
        if hasattr(args, key) and config.get(key) is not None:
            setattr(args, key, getattr(module, f"{section.title()}Config").from_dict(config[key]))
    return module.Model(args), args


@cache
def _renamed(package: Path) -> dict[str, str]:
    """Model types with a folder of another name.

    Parsed: an import takes seconds.
    """
    tree = ast.parse((package / "utils.py").read_text("utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODEL_REMAPPING":
            return dict(ast.literal_eval(node.value))
    return {}


def _spec() -> Any:
    module = sys.modules.get(PACKAGE)
    return module.__spec__ if module else importlib.util.find_spec(PACKAGE)


def _positions(tokens: mx.array, caches: Sequence[Any]) -> mx.array:
    """Positions (3, batch, n) of the next tokens, text's on each axis."""
    n_rows, n = tokens.shape
    offset = mx.array(_offset(caches)).reshape(-1, 1)
    positions = mx.broadcast_to(offset + mx.arange(n), (n_rows, n))
    return mx.broadcast_to(positions, (3, n_rows, n))


def _offset(caches: Sequence[Any]) -> Any:
    """Tokens before, by the first cache that counts them.

    Views of several caches are lists.
    """
    for layer in caches:
        inner = layer if isinstance(layer, list) else getattr(layer, "caches", ())
        offset = getattr(layer, "offset", None)
        if offset is None:
            offset = next((part.offset for part in inner if hasattr(part, "offset")), None)
        if offset is not None:
            return offset
    return 0
