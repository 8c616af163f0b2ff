"""Models of mlx-vlm behind the seam; `make models` tries every type in its own environment."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlxstack.core.errors import SetupError, Unsupported
from mlxstack.core.preset import KVSpec, ModelSpec
from mlxstack.engine.decode.copy_check import why_not_copied
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.loading import loader
from mlxstack.engine.model import mlx_vlm_fixes
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.mlx_vlm_models import is_installed, version
from mlxstack.engine.model.model_shape import folder_of_mlx_vlm
from mlxstack.engine.model.recurrent_cache import RecurrentCache
from mlxstack.engine.model.runner import ModelRunner
from tests import models
from tests.matrix.builder import build

without_extra = pytest.mark.skipif(is_installed(), reason="the extra more-models is installed")
with_extra = pytest.mark.skipif(not is_installed(), reason="it needs the extra more-models")
SLICE = ("k2_horizon", "step3p7", "deepseek_v4", "hy_v4", "glm5_next")


@without_extra
def test_a_type_of_mlx_vlm_is_refused_with_the_command_that_adds_it() -> None:
    with pytest.raises(Unsupported, match=r"pip install '\.\[more-models\]'"):
        folder_of_mlx_vlm({"model_type": "qwen4_exp"})


@without_extra
def test_a_load_without_the_extra_names_the_command_too(tmp_path: Path) -> None:
    models.write(tmp_path / "model", models.LLAMA)
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"qwen4_exp"'))
    with pytest.raises(SetupError, match=r"\[more-models\]"):
        loader.load(ModelSpec(id=str(tmp_path / "model")), KVSpec())


def test_types_of_mlx_lm_and_models_with_code_of_their_own_are_not_looked_for() -> None:
    assert folder_of_mlx_vlm({"model_type": "llama"}) is None
    assert folder_of_mlx_vlm({"model_type": "mistral"}) is None
    assert folder_of_mlx_vlm({"model_type": "qwen4_exp", "model_file": "model.py"}) is None


def test_the_engine_does_not_import_mlx_vlm() -> None:
    code = "import sys, mlxstack.service.assembly; sys.exit('mlx_vlm' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_window_ends_at_the_last_token_of_each_row() -> None:
    source = mx.arange(14).reshape(2, 7, 1)
    cache = RecurrentCache(1)
    assert cache.update_window(0, source, 3)[..., 0].tolist() == [[4, 5, 6], [11, 12, 13]]
    lengths = mx.array([1, 3])
    window = cache.update_window(0, source, 3, lengths=lengths)
    assert window[..., 0].tolist() == [[1, 2, 3], [10, 11, 12]]
    assert mx.array_equal(cache[0], window)


@pytest.mark.mlx
def test_a_context_that_cannot_be_copied_goes_back_to_its_start_only() -> None:
    model = build("llama")
    factory = CacheFactory(model, KVSpec())
    assert why_not_copied(ModelRunner(model), factory, n_vocab=160) is None
    factory.can_copy = False
    context = SlotContext(factory)
    model(mx.array([[1, 2, 3]]), cache=context.caches)
    context.extend([1, 2, 3])
    assert not context.is_storable and not context.is_sliceable
    assert context.rewind(2) == 0 and context.tokens == []


class Lagging(nn.Module):  # type: ignore[misc]
    """A model that reads a cache in passes of many tokens, to which single ones do not append."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build("llama")

    def make_cache(self) -> list[Any]:
        return [*make_prompt_cache(self.model), KVCache()]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        *own, lagging = cache
        n_before = own[0].offset
        logits: mx.array = self.model(tokens, cache=own)
        if tokens.shape[1] == 1 or lagging.offset != n_before:
            return logits
        ones = mx.ones((1, 1, tokens.shape[1], 1))
        return logits * lagging.update_and_fetch(ones, ones)[0].mean()


@pytest.mark.mlx
def test_a_cache_without_the_last_tokens_is_not_copied() -> None:
    model = Lagging()
    why_not = why_not_copied(ModelRunner(model), CacheFactory(model, KVSpec()), n_vocab=160)
    assert why_not == "a copy of its caches answers otherwise"


def test_kv_of_another_fix_is_other_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    (fixed, *_) = mlx_vlm_fixes.FIXES
    revision = mlx_vlm_fixes.revision(fixed)
    assert revision and not mlx_vlm_fixes.revision("mlx_vlm.models.k2_horizon.language")
    monkeypatch.setattr(mlx_vlm_fixes, "__file__", __file__)
    assert mlx_vlm_fixes.revision(fixed) != revision


@with_extra
@pytest.mark.parametrize(("name", "is_fixed"), [("hy_v4", True), ("k2_horizon", False)])
def test_the_fix_of_a_model_is_part_of_its_revision(name: str, is_fixed: bool) -> None:
    model = build(name)
    assert model.revision.split()[0] == version()
    assert (len(model.revision.split()) > 1) == is_fixed


@with_extra
@pytest.mark.mlx
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", SLICE)
def test_it_keeps_every_promise_of_the_page(name: str) -> None:
    from tests.matrix import more, more_table

    row = more.examine(name)
    assert row.faults == ()
    assert more_table.line(row) in more_table.PAGE.read_text().splitlines()
