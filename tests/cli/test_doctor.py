"""`doctor`: what is wrong is found, and what to do is said."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mlxstack.cli.doctor import CheckLevel, ceiling, device, large_weights, templates, wired
from mlxstack.config import presets
from mlxstack.demo import MODEL_DIR
from mlxstack.host.home import Home
from tests.cli.test_messages import run


def found(home: Path, **env: str) -> list[dict[str, str]]:
    done = run(home, "doctor", "--json", **env)
    findings: list[dict[str, str]] = json.loads(done.stdout)["findings"]
    return findings


def test_doctor_tells_what_to_do(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    done = run(tmp_path, "doctor", "--json", MLX_STACK_SLOTS_CUONT="3")
    assert done.returncode == 1
    found = json.loads(done.stdout)["findings"]
    assert all(one["remedy"] for one in found if one["verdict"] != "ok")
    by_subject = {one["subject"]: one for one in found}
    assert by_subject["home"]["remedy"] == f"chmod 700 {tmp_path}"
    assert by_subject["variable"]["remedy"] == "unset MLX_STACK_SLOTS_CUONT"
    assert by_subject["mlx"]["verdict"] == "ok"
    assert by_subject["device"]["detail"].startswith("MLX computes on the ")
    assert "models may take " in by_subject["ceiling"]["detail"]
    tmp_path.chmod(0o700)
    healthy = run(tmp_path, "doctor")
    assert healthy.returncode == 0
    assert "FOUND" in healthy.stdout


def test_a_home_that_cannot_be_is_bad_and_the_rest_is_told_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for home in (tmp_path / "file", tmp_path / "file" / "below"):
        one = next(one for one in found(home) if one["subject"] == "home")
        assert one["verdict"] == "bad"
        assert f"nothing can be made in {tmp_path / 'file'} (Not a directory)" in one["detail"]
    gone = tmp_path / "link"
    gone.symlink_to(tmp_path / "unmounted")
    one = next(one for one in found(gone) if one["subject"] == "home")
    assert (one["verdict"], "cannot be used" in one["detail"]) == ("bad", True)
    long = tmp_path / ("x" * 300)
    told = found(long)
    assert {one["subject"] for one in told} >= {"system", "device", "files", "models"}
    files = next(one for one in told if one["subject"] == "files")
    assert (files["verdict"], files["detail"]) == ("bad", f"{long}: File name too long")


def test_doctor_knows_what_was_downloaded_and_what_only_half(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    none = found(tmp_path, HF_HUB_CACHE=str(hub))
    assert f"none downloaded; they will go to {hub}" in [one["detail"] for one in none]
    repo = hub / "models--org--tiny"
    (repo / "snapshots" / "abc").mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    (repo / "snapshots" / "abc" / "config.json").write_text("{}")
    (repo / "blobs").mkdir()
    (repo / "blobs" / "123.incomplete").write_bytes(bytes(3 * 2**20))
    models = [one for one in found(tmp_path, HF_HUB_CACHE=str(hub)) if one["subject"] == "models"]
    assert models[0]["detail"].startswith("1 downloaded, ")
    assert models[1]["detail"] == "1 files half downloaded, 3 MiB"
    assert "resumes them" in models[1]["remedy"]


def test_doctor_shows_what_somebody_who_was_killed_left(tmp_path: Path) -> None:
    half = tmp_path / "kv" / "llama-1" / "..tmp-xyz"
    half.parent.mkdir(parents=True)
    half.write_bytes(bytes(2**20))
    stale = next(one for one in found(tmp_path) if one["subject"] == "stale")
    assert stale["detail"] == "1 half-written files, 1 MiB"
    assert stale["remedy"] == f"delete them: rm {half}"


def test_an_mlx_that_does_not_start_is_bad_and_quoted(tmp_path: Path) -> None:
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").write_text("raise ImportError('libmlx.so is of stone')")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    (one,) = device(env, Home(tmp_path))
    assert one.verdict is CheckLevel.BAD
    assert one.detail == "MLX does not start: ImportError: libmlx.so is of stone"


def test_weights_that_fill_the_working_set_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = {name: presets.listed(Home(tmp_path))[name] for name in ("demo", "gpt-oss-20b")}
    monkeypatch.setattr(presets, "listed", lambda _: two)
    demo = sum(file.stat().st_size for file in MODEL_DIR.glob("model*.safetensors"))
    assert list(large_weights(Home(tmp_path), 2 * demo)) == []
    warnings = list(large_weights(Home(tmp_path), demo))
    assert {one.verdict for one in warnings} == {CheckLevel.WARN}
    assert all("are more than 90% of the" in one.detail for one in warnings)
    assert [one for one in warnings if one.detail.startswith("demo: ")]


def test_presets_that_wire_their_weights_are_told(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert [one.detail for one in wired(home)] == ["device.wired is off"]
    home.presets.mkdir()
    (home.presets / "mine.yaml").write_text("model: demo\ndevice: {wired: weights}\n")
    (home.presets / "off.yaml").write_text("model: demo\ndevice: {wired: off}\n")
    assert [one.detail for one in wired(home)] == ["device.wired is weights in mine"]


def test_a_memory_that_makes_no_sense_is_bad() -> None:
    (one,) = ceiling({"MLX_STACK_MEMORY": "plenty"})
    assert one.verdict is CheckLevel.BAD and "plenty" in one.detail


def test_the_template_of_a_model_is_told_and_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path)
    model = tmp_path / "model"
    shutil.copytree(MODEL_DIR, model)
    turns = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    (model / "chat_template.jinja").write_text(turns)
    home.presets.mkdir()
    home.run.mkdir()
    (home.presets / "mine.yaml").write_text(f"model:\n  id: {model}\n")
    told = list(templates(os.environ, home))
    assert {one.verdict for one in told} == {CheckLevel.WARN}
    assert any("the template shows no tools" in one.detail for one in told)
    assert all(one.detail.startswith("mine: ") for one in told)
    assert {one.remedy for one in told} == {"`mlx-stack template mine` shows more"}
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("derived again"))
    assert list(templates(os.environ, home)) == told


def test_a_home_that_cannot_be_made_is_bad_before_the_first_up() -> None:
    """The folder looks writable by its mode; the attempt fails."""
    if not Path("/proc/self").is_dir():
        pytest.skip("no folder here that refuses new files to everybody")
    one = next(one for one in found(Path("/proc/self/mlx-stack")) if one["subject"] == "home")
    assert one["verdict"] == "bad"
    assert "/proc/self/mlx-stack cannot be" in one["detail"]


def test_presets_that_read_well_and_those_that_fit_are_counted(tmp_path: Path) -> None:
    checks = {check["subject"]: check["detail"] for check in found(tmp_path)}
    n_well, n_fitting = map(int, re.findall(r"\d+", checks["presets"]))
    assert 0 < n_fitting < n_well
