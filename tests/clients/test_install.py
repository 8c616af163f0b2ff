"""Where npm cannot install the clients, a file and the last line of `make test` say why."""

import json
from pathlib import Path

import pytest

from tests.clients import install, summary


def test_without_npm_the_last_line_says_what_was_not_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["install"])
    for module in (install, summary):
        monkeypatch.setattr(module, "FOLDER", tmp_path / "agents")
    monkeypatch.setattr(install, "PINNED", tmp_path / "agents")
    monkeypatch.setattr(summary, "OUTCOMES", tmp_path / "outcomes")
    install.main()
    summary.note("tests/clients/test_codex.py::test_some", "skipped")
    capsys.readouterr()
    summary.main()
    counts, missing = capsys.readouterr().out.splitlines()
    assert counts.startswith("real clients: 0 tests ran, 1 skipped (")
    assert missing.startswith("NO TEST OF Claude Code, Codex, opencode, pi, qwen-code, Continue: ")
    assert "npm is not installed" in missing
    assert missing.endswith("type: make programs")


def test_a_test_that_ran_again_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["summary"])
    monkeypatch.setattr(summary, "OUTCOMES", tmp_path / "outcomes")
    for outcome in ("failed", "passed"):
        summary.note("test_some", outcome)
    summary.note("test_other[a b]", "failed")
    summary.main()
    assert capsys.readouterr().out.startswith("real clients: 2 tests ran, 1 failed, 0 skipped (")


def test_every_client_is_pinned_and_no_registry_is_named() -> None:
    folder = Path(install.__file__).parent
    pinned = json.loads((folder / "package.json").read_text())["dependencies"]
    assert pinned.keys() == install.CLIENTS.keys()
    assert all(version[0].isdigit() for version in pinned.values())
    packages = json.loads((folder / "package-lock.json").read_text())["packages"]
    assert not [name for name, package in packages.items() if "resolved" in package]
    assert all(packages[f"node_modules/{name}"]["version"] == pinned[name] for name in pinned)
