"""macOS as `doctor` and errors tell it: version, panics, Local Network Privacy."""

import asyncio
import errno
import io
import os
import socket
import sys
import tomllib
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement

from mlxstack.cli.doctor import CheckLevel, macos
from mlxstack.core.errors import SetupError
from mlxstack.features.ranks import follower, group
from mlxstack.features.ranks.doctor import NETWORK, network_remedy
from mlxstack.features.ranks.group import RankGroup
from mlxstack.features.remote_kv.peers import _broken
from mlxstack.gateway.upstream import MemberLost, Upstream
from mlxstack.host.macos import LOCAL_NETWORK, SystemVersion, gpu_panics, is_local_network_refused


@pytest.mark.parametrize(
    ("version", "level", "text"),
    [
        ((13, 6), CheckLevel.BAD, "macOS 13.6"),
        ((14, 5), CheckLevel.OK, "without residency sets"),
        ((26, 2), CheckLevel.OK, "macOS 26.2"),
    ],
)
def test_doctor_tells_the_version_of_macos(
    version: tuple[int, ...], level: CheckLevel, text: str
) -> None:
    first = next(macos(SystemVersion(version), None, []))
    assert first.verdict is level and text in first.detail
    assert ("update macOS to 14" in first.remedy) == (level is CheckLevel.BAD)


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["README.md", "docs/installation.md"])
def test_the_pages_of_the_installation_name_the_oldest_macos(page: str) -> None:
    assert "macOS 14 or newer" in (ROOT / page).read_text()


def test_the_readme_says_where_tokens_are_identical() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    assert "in float32 on a CPU, where the tests run" in text
    assert "float32 on an M5 (TF32), round by the shape of a batch" in text


def test_no_mlx_is_accepted_whose_decode_kernel_reads_keys_of_other_rows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *project["optional-dependencies"]["cuda"]]
    needed = [requirement for requirement in map(Requirement, named) if requirement.name == "mlx"]
    assert len(needed) == 3
    assert all(
        "0.32.4" in requirement.specifier and "0.32.3" not in requirement.specifier
        for requirement in needed
    )


@pytest.mark.parametrize(
    ("limit", "text"), [(24576, "24576 MiB"), (0, "not set"), (None, "not set")]
)
def test_doctor_tells_the_limit_of_the_gpus_memory(limit: int | None, text: str) -> None:
    assert any(text in result.detail for result in macos(SystemVersion((26, 2)), limit, []))


def report(folder: Path, name: str, text: str, age_s: float = 0) -> Path:
    file = folder / name
    file.write_text(text)
    now = file.stat().st_mtime - age_s
    os.utime(file, (now, now))
    return file


def test_doctor_lists_recent_panics_of_the_gpu_driver(tmp_path: Path) -> None:
    panic = 'panic(cpu 4): "IOGPUGroupMemory completeMemory() prepare count underflow"'
    first = report(tmp_path, "panic-full-1.panic", panic, 3600)
    last = report(tmp_path, "panic-full-2.panic", panic)
    report(tmp_path, "panic-full-3.panic", "userspace watchdog timeout")
    report(tmp_path, "panic-full-4.panic", panic, 90 * 86400)
    report(tmp_path, "python-5.ips", panic)
    panics = gpu_panics(tmp_path)
    assert panics == [first, last]
    (warning,) = (
        r for r in macos(SystemVersion((26, 2)), None, panics) if r.verdict is CheckLevel.WARN
    )
    assert str(last) in warning.detail and "device.wired off" in warning.remedy


def test_a_folder_of_reports_that_is_missing_has_no_panics(tmp_path: Path) -> None:
    assert gpu_panics(tmp_path / "missing") == []


def refused(code: int) -> httpx.ConnectError:
    """As httpx raises what the system said of a connection."""
    try:
        try:
            try:
                raise OSError(code, os.strerror(code))
            except OSError as why:
                raise OSError("All connection attempts failed") from ExceptionGroup("", [why])
        except OSError as why:
            raise httpx.ConnectError("All connection attempts failed") from why
    except httpx.ConnectError as error:
        return error


def test_an_unreachable_machine_may_be_local_network_privacy_on_a_mac_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unreachable = refused(errno.EHOSTUNREACH)
    down = refused(errno.ECONNREFUSED)
    monkeypatch.setattr(sys, "platform", "linux")
    assert not is_local_network_refused(unreachable)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert is_local_network_refused(unreachable)
    assert not is_local_network_refused(down)


def test_errors_of_peers_and_machines_name_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    unreachable = refused(errno.EHOSTUNREACH)
    assert (
        "Privacy & Security > Local Network" in _broken("http://studio:7119", unreachable).message
    )
    assert network_remedy(OSError(errno.EHOSTUNREACH, "No route to host")) == LOCAL_NETWORK
    assert network_remedy(OSError(errno.ECONNREFUSED, "")) == NETWORK


async def test_ranks_and_the_gateway_name_the_setting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    setting = "Privacy & Security > Local Network"
    monkeypatch.setattr(sys, "platform", "darwin")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", refuse)
    monkeypatch.setattr(sys, "argv", ["follower", "192.0.2.1:1"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("key\n"))
    assert follower.main() == 1
    assert setting in caplog.text
    with pytest.raises(MemberLost, match=setting):
        await Upstream("http://192.0.2.1:1")._connect()
    monkeypatch.setattr(group.ranks, "_command", lambda *_: [sys.executable, "-c", "input()"])
    ranks = RankGroup(("127.0.0.1", "127.0.0.2"))
    try:
        with pytest.raises(SetupError, match=setting):
            ranks._connect()
    finally:
        ranks.close()
