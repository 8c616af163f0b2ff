"""A disk without room, through every door, and `gc` on the command line (C14, G12)."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from mlxstack.cli.main import app
from mlxstack.core.preset import DiskSpec, PrefixCacheSpec
from tests.api.running import Running, running, tiny_preset
from tests.patience import PATIENCE_S

WORDS = " ".join(f"word{n}" for n in range(150))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("room")


@pytest.fixture(scope="module")
def small(home: Path) -> Iterator[Running]:
    """A service whose preset leaves the disk almost no room."""
    cache = PrefixCacheSpec(disk=DiskSpec(max_bytes=1000))
    with running(tiny_preset(home / "model", prefix_cache=cache), home / "small") as live:
        yield live


@pytest.fixture(scope="module")
def large(home: Path) -> Iterator[Running]:
    with running(tiny_preset(home / "model"), home / "large") as live:
        yield live


def chat(live: Running, text: str, **more: object) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}
    return httpx.post(
        f"{live.url}/v1/chat/completions", json=body, timeout=PATIENCE_S
    ).raise_for_status()


def gc(*args: str) -> str:
    run = CliRunner().invoke(app, list(args))
    assert run.exit_code == 0, run.output
    return run.output


def grow_old(folder: Path) -> None:
    then = time.time() - 7200
    for path in folder.rglob("*"):
        if path.is_file():
            os.utime(path, (then, then))


def test_c14_a_save_over_the_limit_is_refused_with_507(small: Running, home: Path) -> None:
    chat(small, WORDS, id_slot=0)
    refused = httpx.post(
        f"{small.url}/slots/0?action=save", json={"filename": "a.bin"}, timeout=PATIENCE_S
    )
    assert refused.status_code == 507
    error = refused.json()["error"]
    assert error["code"] == 507
    assert "max_bytes" in error["message"]
    assert not list((home / "small" / "kv").rglob("*.safetensors"))
    again = chat(small, WORDS, id_slot=0).json()["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == again["prompt_tokens"]


def test_c14_gc_asks_the_running_service(large: Running, home: Path) -> None:
    chat(large, WORDS, id_slot=0)
    httpx.post(
        f"{large.url}/slots/0?action=save", json={"filename": "a.bin"}, timeout=PATIENCE_S
    ).raise_for_status()
    grow_old(home / "large")
    at = ("--url", large.url)
    assert "0 files" in gc("cache", "gc", "--max-bytes", "0", *at)
    dry = gc("slots", "gc", "--older-than", "1h", "--dry-run", *at)
    assert "slot file a.bin" in dry
    assert "would be deleted" in dry
    assert (home / "large" / "slots" / "tiny" / "a.bin").exists()
    assert "deleted" in gc("slots", "gc", "--older-than", "1h", *at)
    assert not (home / "large" / "slots" / "tiny" / "a.bin").exists()
    assert not list((home / "large" / "kv").rglob("*.safetensors"))
    assert chat(large, WORDS).json()["usage"]["completion_tokens"] == 4


def test_c14_gc_without_a_service_sweeps_the_home(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_STACK_HOME", str(tmp_path))
    with running(tiny_preset(home / "model"), tmp_path) as live:
        chat(live, WORDS, session_id="writer")
        chat(live, WORDS[::-1], id_slot=2)
        httpx.post(
            f"{live.url}/slots/2?action=save", json={"filename": "b.bin"}, timeout=PATIENCE_S
        ).raise_for_status()
    grow_old(tmp_path)
    told = json.loads(gc("slots", "gc", "--max-bytes", "0", "--dry-run", "--json"))
    titles = " ".join(victim["title"] for victim in told["victims"])
    assert "slot file b.bin" in titles
    assert "agent writer" in titles
    gc("slots", "gc", "--max-bytes", "0")
    assert not list((tmp_path / "kv").rglob("*.safetensors"))
    assert (tmp_path / "agents" / "writer" / "history.json").exists()


def test_c14_gc_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_STACK_HOME", str(tmp_path))
    for text, why in (
        (("cache", "gc"), "--max-bytes"),
        (("cache", "gc", "--max-bytes", "many"), "20GB"),
        (("slots", "gc", "--older-than", "soon"), "30d"),
    ):
        run = CliRunner().invoke(app, list(text))
        assert run.exit_code != 0
        assert why in str(run.exception)
