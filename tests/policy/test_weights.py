"""Estimated weights against published sizes, and against the headers of models built here."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlxstack.core.errors import Unsupported
from mlxstack.core.model_info import Weights
from mlxstack.host.model_files import measured
from mlxstack.policy.weight_size import estimate
from tests.conftest import ModelOf

CONFIGS = Path(__file__).parent.parent.parent / "presets" / "configs"

PUBLISHED_GB = {
    "llama3.1-8b": 4.52,
    "qwen2.5-14b": 8.31,
    "qwen3-coder-30b-a3b": 17.2,
    "gpt-oss-20b": 12.1,
}
"""Sizes of the repositories' weight files; those with vision towers hold more than is loaded."""


def config_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize("name", PUBLISHED_GB)
def test_a13_estimates_are_within_one_percent_of_what_is_published(name: str) -> None:
    assert estimate(config_of(name)).n_bytes() / 1e9 == pytest.approx(PUBLISHED_GB[name], rel=0.01)


def test_a13_vision_towers_are_not_counted() -> None:
    gemma = estimate(config_of("gemma3-12b")).n_bytes()
    assert gemma == pytest.approx(11.76e9 * 4.5 / 8, rel=0.01)
    assert 14e9 < estimate(config_of("gemma4-26b-a4b-q4")).n_bytes() < 15.6e9


@pytest.mark.parametrize("kind", ["tiny", "tiny-swa", "tiny-sinks"])
def test_a13_estimates_are_near_what_a_real_file_holds(model_of: ModelOf, kind: str) -> None:
    folder = model_of(kind)
    real = measured(folder)
    assert real is not None
    guess = estimate(json.loads((folder / "config.json").read_text()) | {"dtype": "float32"})
    assert guess.n_bytes() == pytest.approx(real.n_bytes(), rel=0.20)
    assert guess.n_bytes() <= real.n_bytes()


def test_a13_experts_in_mxfp4_and_the_rest_in_eight_bits() -> None:
    weights = estimate(config_of("gpt-oss-20b"))
    experts = 24 * 32 * 3 * 2880 * 2880
    others = 2 * 201088 * 2880 + 24 * 2880 * 64 * (64 + 8 + 8 + 64)
    routers = 24 * 32 * 2880
    assert weights.n_half == 2 * (others // 64)
    assert weights.packed == pytest.approx((experts + routers) * 4.25 / 8 + others, rel=1e-6)


def test_a6_half_precision_is_wider_on_a_cpu() -> None:
    weights = Weights(packed=100, n_half=10, n_single=1)
    assert weights.n_bytes() == 124
    assert weights.n_bytes(half_bytes=4) == 144


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next", "lfm2", "unheard_of"])
def test_f9_other_layouts_are_refused_not_guessed(kind: str) -> None:
    with pytest.raises(Unsupported, match="give its folder"):
        estimate(config_of("llama3.1-8b") | {"model_type": kind})


def test_f9_a_missing_number_is_named() -> None:
    config = {k: v for k, v in config_of("llama3.1-8b").items() if k != "intermediate_size"}
    with pytest.raises(Unsupported, match="intermediate_size"):
        estimate(config)
