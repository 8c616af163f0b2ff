"""Images in `plan`, `presets`, `doctor` and the gateway's list: by the tensors in the files."""

import json
from pathlib import Path

import pytest

pytest.importorskip("PIL")

from mlxstack.cli.doctor import CheckLevel, images
from mlxstack.features.vision.images import families
from mlxstack.host.home import Home, make_folder
from mlxstack.models.chat_capabilities import capabilities
from mlxstack.models.model_files import vision_weights
from tests import models, vision_models
from tests.cli.test_messages import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_models.build(tmp_path_factory.mktemp("models") / "vl", "qwen3_vl")


def preset(home: Home, model: Path, more: str = "") -> None:
    home.presets.mkdir(exist_ok=True)
    text = f"model:\n  id: {model}\nslots: {{n_ctx: 4096}}\n{more}"
    (home.presets / f"{model.name}.yaml").write_text(text)


def test_plan_counts_the_tower_and_a_screenshot(tmp_path: Path, folder: Path) -> None:
    home = Home(tmp_path)
    preset(home, folder)
    spec = json.loads(run(tmp_path, "plan", "vl", "--json").stdout)["spec"]
    assert spec["tower_bytes"] == vision_weights(folder).n_bytes()
    assert spec["weights_bytes"] > spec["tower_bytes"] > 100_000
    # 1,568 x 882 pixels after scaling, at 32 a feature.
    assert spec["n_screenshot"] == 49 * 28
    text = run(tmp_path, "plan", "vl").stdout
    assert "a screenshot of 1920 x 1080 is 1,372 tokens" in text
    preset(home, folder, "vision: {max_pixels: 262144}\n")
    small = json.loads(run(tmp_path, "plan", "vl", "--json").stdout)["spec"]
    assert small["n_screenshot"] <= 262144 // 32**2


def test_presets_tell_the_modalities_of_what_is_downloaded(tmp_path: Path, folder: Path) -> None:
    preset(Home(tmp_path), folder)
    listed = json.loads(run(tmp_path, "presets", "--json").stdout)["presets"]
    by_name = {one["name"]: one["modalities"] for one in listed}
    assert (by_name["vl"], by_name["demo"]) == ("text, image", "text, image")


def test_doctor_and_gateway_tell_whether_a_checkpoint_takes_images(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path)
    text = models.build(tmp_path / "words", "tiny")
    preset(home, folder)
    preset(home, text)
    found = {one.detail.partition(":")[0]: one for one in images(home)}
    assert found["vl"].detail == "vl: takes images"
    assert found["words"].detail == "words: text only, its files hold no vision tower"
    assert "vision" in capabilities(folder)
    assert "vision" not in capabilities(text)
    monkeypatch.setattr(families, "find_spec", lambda _: None)
    monkeypatch.setattr("mlxstack.cli.doctor.has_pillow", lambda: False)
    found = {one.detail.partition(":")[0]: one for one in images(home)}
    assert found["vl"].verdict is CheckLevel.WARN and "Pillow" in found["vl"].detail
    assert found["words"].verdict is CheckLevel.OK
    assert "vision" not in capabilities(folder)


def test_images_of_gemma_need_kv_of_full_precision(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    folder = vision_models.build(tmp_path / "eyes", "gemma4")
    make_folder(home.root)
    preset(home, folder)
    whole = json.loads(run(home.root, "plan", "eyes", "--json").stdout)["spec"]
    assert (whole["tower_bytes"], whole["n_screenshot"]) == (vision_weights(folder).n_bytes(), 18)
    assert next(images(home)).detail == "eyes: takes images"
    preset(home, folder, "kv: {bits: 8, group_size: 32}\n")
    spec = json.loads(run(home.root, "plan", "eyes", "--json").stdout)["spec"]
    assert (spec["tower_bytes"], spec["n_screenshot"]) == (0, 0)
    assert spec["weights_bytes"] == whole["weights_bytes"] - whole["tower_bytes"]
    why = "images of gemma4 need KV of full precision; set kv.bits to 16"
    assert why in run(home.root, "plan", "eyes").stdout
    found = next(images(home))
    assert (found.verdict, found.detail) == (CheckLevel.WARN, f"eyes: text only, {why}")
    assert "set kv.bits to 16 in its preset, which has 8" in found.remedy
    assert "vision" in capabilities(folder)
    assert "vision" not in capabilities(folder, kv_bits=8)
    (listed,) = [
        one
        for one in json.loads(run(home.root, "presets", "--json").stdout)["presets"]
        if one["name"] == "eyes"
    ]
    assert listed["modalities"] == "text"


@pytest.mark.parametrize(
    ("name", "n_tokens"),
    [
        ("qwen3.5-4b", 49 * 28),
        ("qwen3.6-35b-a3b", 49 * 28),
        ("devstral-small-2", 31 * 56),
        ("gemma4-26b-a4b", 22 * 12),
    ],
)
def test_plan_counts_the_tower_before_the_download(
    tmp_path: Path, name: str, n_tokens: int
) -> None:
    spec = json.loads(run(tmp_path, "plan", name, "--memory", "64GB", "--json").stdout)["spec"]
    assert spec["weights_from"] == "estimated"
    assert 6e8 < spec["tower_bytes"] < 1.2e9
    assert spec["weights_bytes"] > spec["tower_bytes"]
    assert spec["n_screenshot"] == n_tokens


def test_presets_that_take_images_are_told_before_the_download(tmp_path: Path) -> None:
    listed = json.loads(run(tmp_path, "presets", "--json").stdout)["presets"]
    seeing = {one["name"] for one in listed if one["modalities"] == "text, image"}
    assert seeing == {
        "demo",
        "devstral-small-2",
        "gemma4-26b-a4b",
        "qwen3.5-4b",
        "qwen3.5-9b",
        "qwen3.6-35b-a3b",
        "qwen3.8-27b",
    }
