"""What needs no service: help, presets, typos, and what is not imported for them."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from mlxstack import __version__
from mlxstack.cli.main import app
from tests.cli import terminal
from tests.repetition import in_soak

CLI = (sys.executable, "-m", "mlxstack.cli.main")


def run(home: Path, *args: str, **env: str) -> "subprocess.CompletedProcess[str]":
    variables = {"PATH": "/usr/bin:/bin", "MLX_STACK_HOME": str(home), "COLUMNS": "200"} | env
    return terminal.run(args, variables)


def test_version(tmp_path: Path) -> None:
    assert run(tmp_path, "--version").stdout == f"mlx-stack {__version__}\n"


def test_a_typo_gets_a_suggestion(tmp_path: Path) -> None:
    typo = run(tmp_path, "statsu")
    assert typo.returncode == 2
    assert "Did you mean 'status'" in typo.stderr


def groups(group: Any) -> Iterator[Any]:
    yield group
    for verb in group.commands.values():
        if hasattr(verb, "commands"):
            yield from groups(verb)


def test_no_summary_of_a_verb_is_cut_on_a_narrow_terminal() -> None:
    for group in groups(get_command(app)):
        left = 80 - 6 - max(map(len, group.commands))
        for name, verb in group.commands.items():
            assert not verb.get_short_help_str(left).endswith("..."), name


def verbs(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, verb in group.commands.items():
        if hasattr(verb, "commands"):
            yield from verbs(verb, f"{before}{name} ")
        elif not verb.hidden:
            yield f"{before}{name}", verb


@pytest.mark.parametrize(
    ("group", "alone"), [("slots", "list"), ("agents", "list"), ("cache", "status")]
)
def test_a_group_says_what_it_does_without_a_verb(tmp_path: Path, group: str, alone: str) -> None:
    shown = run(tmp_path, group, "--help").stdout
    assert f"Without a verb: the {alone}." in shown


def test_every_verb_that_tells_something_tells_it_as_json_too() -> None:
    without = {
        name
        for name, verb in verbs(get_command(app))
        if not any("--json" in one.opts for one in verb.params)
    }
    assert without == {"run", "tui", "chat"}, "these own the terminal"


@pytest.mark.parametrize("args", [("--help",), ("presets",), ("up", "demo", "--dry-run")])
def test_heavy_rooms_are_not_imported(tmp_path: Path, args: tuple[str, ...]) -> None:
    code = (
        "import sys; from mlxstack.cli.main import app\n"
        "try: app(sys.argv[1:])\n"
        "finally: print(' '.join(sorted(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        env={"MLX_STACK_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    loaded = set(done.stderr.split())
    assert "mlxstack.cli.commands.up" in loaded
    heavy = {"mlx", "mlx.core", "mlx_lm", "litestar", "textual", "uvicorn", "transformers"}
    assert not loaded & heavy
    if args == ("--help",):
        assert not loaded & {"httpx", "rich", "psutil", "yaml", "asyncio", "msgspec", "logging"}


def test_a8_presets_lists_size_fit_download_slots_and_when_to_use(tmp_path: Path) -> None:
    text = run(tmp_path, "presets").stdout
    line = next(line for line in text.splitlines() if line.startswith("gpt-oss-120b"))
    assert re.search(r"[\d.]+ GiB +(yes|no) +no +4 x 128k +16 +Reasoning and tools", line)
    shelf = {
        one["name"]: one for one in json.loads(run(tmp_path, "presets", "--json").stdout)["presets"]
    }
    assert shelf["demo"]["n_slots"] == 3
    assert shelf["gpt-oss-120b"]["total_ctx"] == 524288
    assert all(one["description"] for one in shelf.values())


def test_a_broken_preset_is_listed_with_its_fault(tmp_path: Path) -> None:
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "bad.yaml").write_text("model: {id: demo}\nslots: {count: 0}\n")
    shown = run(tmp_path, "presets")
    assert shown.returncode == 0
    assert "bad.yaml:2: slots.count is `0`" in shown.stderr
    assert "demo" in shown.stdout


def test_a10_status_without_any_service(tmp_path: Path) -> None:
    done = run(tmp_path, "status")
    assert done.returncode == 3
    titles = [line.split(":")[0] for line in done.stdout.splitlines()[:4]]
    assert titles == ["Device", "Memory", "Disk", "Mode"]
    assert json.loads(run(tmp_path, "status", "--json").stdout)["services"] == []


def test_a_closed_output_is_no_trouble(tmp_path: Path) -> None:
    for args in (("status",), ("ps", "--json")):
        closed = ("sh", "-c", 'exec "$@" >&-', "sh", *CLI, *args)
        env = {"PATH": "/usr/bin:/bin", "MLX_STACK_HOME": str(tmp_path)}
        done = subprocess.run(closed, env=env, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (3 if args == ("status",) else 0, "")


UNREAD = [(("up", "demo", "--dry-run"), "utf-8"), (("plan",), "ascii"), (("--help",), "utf-8")]
COMMANDS = [("up", "demo", "--dry-run"), ("plan",), ("presets", "--json"), ("--help",)]


@pytest.mark.parametrize(
    ("args", "encoding"),
    [
        *UNREAD,
        *in_soak(*(one for one in product(COMMANDS, ("utf-8", "ascii")) if one not in UNREAD)),
    ],
)
def test_a_reader_that_leaves_ends_the_command_quietly(
    tmp_path: Path, args: tuple[str, ...], encoding: str
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    env = {"PATH": "/usr/bin:/bin", "MLX_STACK_HOME": str(tmp_path), "PYTHONIOENCODING": encoding}
    done = subprocess.run(
        [*CLI, *args], env=env, stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_terminal_without_the_letters_gets_them_in_another_form(tmp_path: Path) -> None:
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "own.yaml").write_text(
        "extends: demo\ndescription: für mich\n", "utf-8"
    )
    env = {"PATH": "/usr/bin:/bin", "MLX_STACK_HOME": str(tmp_path), "COLUMNS": "200"}
    # An interpreter reads this variable as it starts.
    env["PYTHONIOENCODING"] = "ascii"
    shown = subprocess.run([*CLI, "presets"], env=env, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    # Notes say which presets need an extra; an error of encoding would be another line.
    assert all("[more-models]" in line for line in shown.stderr.splitlines()), shown.stderr
    assert "f\\xfcr mich" in shown.stdout


def test_nobody_elses_text_moves_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "presets").mkdir()
    own = tmp_path / "presets" / "own.yaml"
    own.write_text('extends: demo\ndescription: "\\e]52;c;aGk=\\a and \\e[31mred"\n')
    shown = run(tmp_path, "presets").stdout
    assert "\\x1b]52;c;aGk=\\x07 and \\x1b[31mred" in shown
    assert "\x1b" not in shown


def test_what_is_no_utf8_is_refused_in_words(tmp_path: Path) -> None:
    odd = run(tmp_path / "\udcff", "up", "demo", "--port", "0")
    assert odd.returncode == 1
    assert odd.stderr.startswith("error: ") and odd.stderr.count("\n") == 1
    assert "\\udcff" in odd.stderr and "is not valid UTF-8" in odd.stderr


def test_a_home_of_nobody_is_refused_in_words(tmp_path: Path) -> None:
    done = run(tmp_path, "status", MLX_STACK_HOME="~nobody-by-this-name/home")
    assert done.returncode == 5
    assert done.stderr.startswith("error: cannot expand ~nobody-by-this-name/home: no such user")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); "
        "from mlxstack.cli.main import main; sys.argv = ['mlx-stack', *sys.argv[1:]]; main()"
    )
    args = [sys.executable, "-c", code, "mode", "create", "own", "demo"]
    env = {"PATH": "/usr/bin:/bin", "MLX_STACK_HOME": str(tmp_path)}
    done = subprocess.run(args, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path}/presets/modes/own.yaml: File too large; ")


@pytest.mark.parametrize(
    "args",
    [
        *[
            ("slots", "--url", url)
            for url in ("", "here:7109", "http://", "http://[::1", "ftp://a")
        ],
        ("bench", "dev", "serve", "--url", "http://127.0.0.1:99999"),
        *[("agents", "show", agent, "--url", "http://127.0.0.1:1") for agent in ("", ".", "..")],
        ("cache", "unpin", ".", "--url", "http://127.0.0.1:1"),
        ("cache", "why", "", "--url", "http://127.0.0.1:1"),
        *[("swap", "demo", "--drain", seconds) for seconds in ("nan", "inf", "-1")],
        *[("down", "--timeout", seconds) for seconds in ("nan", "1e300", "-1")],
    ],
)
def test_what_makes_no_sense_is_refused_as_such(tmp_path: Path, args: tuple[str, ...]) -> None:
    done = run(tmp_path, *args)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "rror: " in done.stderr.splitlines()[-1]


def test_a_key_that_no_header_carries_is_refused(tmp_path: Path) -> None:
    for key in ("schlüssel", "two\nlines"):
        done = run(tmp_path, "slots", "--url", "http://127.0.0.1:1", MLX_STACK_API_KEY=key)
        assert done.returncode == 2
        assert done.stderr.startswith("error: MLX_STACK_API_KEY holds no key")
        assert key not in done.stderr


def test_a_benchmark_of_nobody_says_who_does_not_answer(tmp_path: Path) -> None:
    done = run(tmp_path, "bench", "dev", "serve", "--url", "http://127.0.0.1:1", "--small")
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1].startswith("error: no answer from http://127.0.0.1:1/")


def test_no_color_is_respected(tmp_path: Path) -> None:
    plain = run(tmp_path, "presets", NO_COLOR="1", FORCE_COLOR="1").stdout
    assert "\x1b[3" not in plain


def test_a_worker_that_cannot_read_its_preset_must_not_be_restarted(tmp_path: Path) -> None:
    done = run(tmp_path, "serve", str(tmp_path / "none.json"))
    assert done.returncode == 78
    assert done.stderr.startswith("error: the resolved preset")
