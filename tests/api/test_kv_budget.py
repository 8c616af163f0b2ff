"""The KV budget of the engine is a share of the memory that the planner was told of."""

from pathlib import Path

import httpx
import pytest

from mlxstack.core.preset import PrefixCacheSpec
from tests.api.running import running, tiny_preset
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net]


def test_the_engine_takes_its_share_of_the_memory_that_was_said(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_STACK_MEMORY", "16MB")
    preset = tiny_preset(model_folder, prefix_cache=PrefixCacheSpec(memory_budget_pct=0.1))
    with running(preset, tmp_path / "home") as found:
        body = {"prompt": "word " * 300, "n_predict": 1}
        answer = httpx.post(f"{found.url}/completion", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 503
    assert f"the whole budget is {2**24 // 1000}" in answer.json()["error"]["message"]
