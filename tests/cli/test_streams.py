"""Closed streams, closed pipes, deleted folders and control codes: no trouble for a command."""

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import mlxstack.cli
from mlxstack.cli import output, places
from tests.cli.terminal import CLI, Shell
from tests.patience import PATIENCE_S

ODD = "pub/a\x1b[31mred\x1b]0;title\x07\u202egnp\x9b2J"


def typed(
    shell: Shell, line: str, folder: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    """The end of a line of a shell, in which `$T` is the command."""
    return subprocess.run(
        ["sh", "-c", line],
        env=shell.env | {"T": " ".join(CLI), "W": str(shell.folder)},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_a_start_goes_on_where_nothing_reads_its_output(shell: Shell) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    unread = {"env": shell.env, "stdout": writer, "stderr": writer}
    started = subprocess.run([*CLI, "up", str(shell.preset)], check=False, **unread)  # type: ignore[call-overload]
    assert started.returncode == 0
    assert shell.run("status").returncode == 0
    stopped = subprocess.run([*CLI, "down"], check=False, **unread)  # type: ignore[call-overload]
    os.close(writer)
    assert stopped.returncode == 0
    assert shell.run("status").returncode == 3


@pytest.mark.parametrize("args", ["presets", "plan demo", "install demo --print", "template demo"])
def test_a_command_that_needs_no_folder_works_in_a_deleted_one(shell: Shell, args: str) -> None:
    done = typed(shell, f'mkdir "$W/gone"; cd "$W/gone"; rmdir "$W/gone"; $T {args}')
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("warning: the current folder is not there")
    assert typed(shell, f"$T {args}", Path("/")).stdout == done.stdout


def test_a_service_starts_and_ends_in_a_deleted_folder(shell: Shell) -> None:
    gone = 'mkdir "$W/gone"; cd "$W/gone"; rmdir "$W/gone"; '
    started = typed(shell, gone + f"$T up {shell.preset} && $T restart && $T down")
    assert started.returncode == 0, started.stderr
    assert "is stopped" in started.stdout


def test_places_are_absolute_or_unset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    variables = {
        "HOME": ".", "XDG_CACHE_HOME": "", "HF_HOME": "~/hf", "HF_HUB_CACHE": "hub",
        "TMPDIR": "gone", "TMP": "/", "PATH": "bin",
    }  # fmt: skip
    places.settle(variables)
    assert variables == {
        "HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_CACHE": str(tmp_path / "hub"), "TMP": "/", "PATH": "bin",
    }  # fmt: skip


CLOSED = ("<&-", ">&-", "<&- >&- 2>&-")


@pytest.mark.parametrize("closed", CLOSED)
@pytest.mark.parametrize("args", ["chat", "tui", "ps"])
def test_a_closed_stream_is_no_trouble(served: Shell, args: str, closed: str) -> None:
    done = typed(served, f"$T {args} {closed}")
    assert "Traceback" not in done.stderr
    expected = {"chat": 2, "tui": 5}
    assert done.returncode == expected.get(args, 0), done.stderr
    if args == "chat" and "2>" not in closed:
        assert "the prompt is empty" in done.stderr
        assert done.stderr.count("\n") == 1


def test_all_output_of_commands_goes_through_one_place() -> None:
    # Only there are the control codes of names escaped.
    folder = Path(mlxstack.cli.__file__).parent
    raw = re.compile(r"typer\.(echo|secho|confirm|prompt)\(|\bsecho\(")
    files = {file.name for file in folder.rglob("*.py") if raw.search(file.read_text())}
    # `serve` is the worker, whose output is a log.
    assert files == {"output.py", "serve.py"}


@pytest.mark.parametrize("show", [output.say, output.note, lambda text: output.as_json([text])])
def test_a_name_turns_no_terminal(
    show: Callable[[str], object], capsys: pytest.CaptureFixture[str]
) -> None:
    show(ODD)
    shown = capsys.readouterr()
    text = (shown.out + shown.err).replace("\n", "")
    assert text.isprintable()
    assert "gnp" in text


def test_json_with_odd_names_is_what_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    for name in (ODD + "\U000e0001", os.fsdecode(b"caf\xe9")):
        output.as_json({"name": name})
        assert json.loads(capsys.readouterr().out) == {"name": name}


def test_models_that_are_left_out_are_told_without_control_codes(shell: Shell) -> None:
    folder = shell.folder / ".lmstudio" / "models" / ODD
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"no weights")
    away = {"HOME": str(shell.folder), "HF_HOME": str(shell.folder / "hub")}
    done = shell.run("up", "--any-model", **away)
    assert "title" in done.stderr
    assert (done.stdout + done.stderr).replace("\n", "").isprintable()
    table = shell.run("models", **away)
    assert (table.stdout + table.stderr).replace("\n", "").isprintable()
