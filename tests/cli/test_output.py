"""Tables: columns give way by importance, and nothing is cut inside a URL, a name or an id."""

import io
import itertools
import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from mlxstack.cli import plan_tables
from mlxstack.cli.commands import models
from mlxstack.cli.commands.status import DROPPED_FIRST
from mlxstack.cli.doctor import CheckLevel
from mlxstack.cli.main import app
from mlxstack.cli.output import _cell as cell
from mlxstack.cli.output import layout
from mlxstack.control.probe import ServiceHealthLevel
from mlxstack.core.formatting import printable, printable_lines, size
from tests.cli.terminal import CLI, Shell
from tests.cli.test_presets import completions
from tests.patience import PATIENCE_S

WIDTHS = (80, 110, 200)
HEADS = ["SERVICE", "STATE", "MODEL", "URL", "CONTEXT", "MEMORY", "MLX", "UP", "RESTARTS", "DETAIL"]
MODEL = "mlx-community/Qwen3.6-35B-A3B-Instruct-4bit-DWQ"
URL = "http://127.0.0.1:52665"
DETAIL = "decoding slot by slot: the self-check found other tokens in a batch than alone"
ROWS: list[list[object]] = [
    ["demo-embedding", ServiceHealthLevel.HEALTHY, "demo", "http://127.0.0.1:7110",
     "1 x 4k", "133 MiB", "7.1 MiB", "2 min", 0, ""],
    ["qwen3.6-35b-a3b", ServiceHealthLevel.DEGRADED, MODEL, URL,
     "3 x 128k", "31.4 GiB", "21.2 GiB + 4.4 GiB cache", "3 h", 0, DETAIL],
    ["small", ServiceHealthLevel.CRASHED, MODEL, URL, "3 x 4k", "-", "-", "-", 1,
     "gave up after 5 crashes; see `mlx-stack logs small`"],
]  # fmt: skip
ADVICE_ROWS: list[list[object]] = [
    [1, "qwen3-coder-30b-a3b", "25.3 GiB", "16.0 GiB", 16, 6,
     "fits with full precision, 9.2 GiB to spare"],
    [12, "qwen3-coder-next", "45.5 GiB", "41.8 GiB", 16, 0,
     "10.9 GiB too large; --set slots.n_ctx=4096 or --set slots.count=1 would fit"],
]  # fmt: skip
MODEL_ROWS: list[list[object]] = [
    [MODEL, "19.0 GiB", "4 bit", "262144", "yes", "", "hub", "today"],
    ["lmstudio-community/Devstral-Small-2-24B-Instruct-2512-MLX-4bit", "12.3 GiB", "4 bit",
     "393216", "no", "", "LM Studio", "12 days ago"],
    ["tiny", "1.0 MiB", "16 bit", "8192", "incomplete", "", "hub", "-"],
]  # fmt: skip
TABLES: dict[str, tuple[Sequence[str], list[list[object]], tuple[str, ...]]] = {
    "status": (HEADS, ROWS, DROPPED_FIRST),
    "models": (models.HEADS, MODEL_ROWS, models.DROPPED_FIRST),
    "advice": (plan_tables.ADVICE_HEADS, ADVICE_ROWS, plan_tables.ADVICE_DROPPED_FIRST),
}
PICTURES = Path(__file__).parent / "tables"


def drawn(width: int, name: str = "status") -> list[str]:
    headings, values, least = TABLES[name]
    rows = [[cell(value) for value in row] for row in values]
    return [line.plain for line in layout(headings, rows, width, least)]


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_table_looks_as_it_did(name: str, width: int) -> None:
    """The files in `tables` are the pictures; a missing one is written."""
    picture = PICTURES / f"{name}_{width}.txt"
    text = "\n".join(drawn(width, name)) + "\n"
    if not picture.exists():
        picture.write_text(text)
    assert text == picture.read_text()


@pytest.mark.parametrize("width", WIDTHS)
def test_no_name_url_or_state_is_cut_and_no_line_is_too_long(width: int) -> None:
    lines = drawn(width)
    assert max(map(len, lines)) <= width
    listed = drawn(width, "models")
    assert max(map(len, listed)) <= width
    assert {str(row[0]) for row in MODEL_ROWS} <= set(" ".join(listed).split())
    shown = set(" ".join(lines).split())
    for row in ROWS:
        assert {str(row[0]), str(row[1]), str(row[3])} <= shown
    assert {"self-check", "`mlx-stack", "small`"} <= shown


def test_columns_give_way_in_their_order() -> None:
    shown = [drawn(width)[0].split() for width in (400, 170, 110, 80)]
    assert shown[0] == HEADS
    for wide, narrow in itertools.pairwise(shown):
        gone = [head for head in DROPPED_FIRST if head not in narrow]
        assert set(narrow) <= set(wide)
        assert gone == list(DROPPED_FIRST[: len(gone)])
    assert shown[-1] == ["SERVICE", "STATE", "URL", "DETAIL"]


class Terminal(io.StringIO):
    """Standard output of a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.mlx
@pytest.mark.parametrize(
    ("command", "headings"),
    [
        ("presets", "PRESET SIZE FITS DOWNLOADED SLOTS x CTX KV BITS"),
        ("presets show devstral-small-2", "KEY VALUE FROM"),
        ("plan glm-4.7-flash --memory 64", "CONTEXT KV 16 BIT AGENTS DISK PER AGENT"),
        ("spec gemma4-26b-a4b", "KIND LAYERS HEADS x DIM WINDOW PER TOKEN CONSTANT"),
    ],
)
def test_no_word_of_a_real_table_is_cut(
    command: str, headings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words of the narrow table are words of the wide one, and the lines fit."""
    monkeypatch.setenv("MLX_STACK_HOME", str(tmp_path))
    monkeypatch.setenv("NO_COLOR", "1")
    shown = {}
    for width in (80, 110, 1000):
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr("sys.stdout", Terminal())
        app(command.split(), standalone_mode=False)
        assert isinstance(sys.stdout, Terminal)
        shown[width] = re.sub(r"\x1b\[[0-9;]*m", "", sys.stdout.getvalue())
    widest = set(shown[1000].split())
    for width in (80, 110):
        assert set(shown[width].split()) <= widest
        long = [line for line in shown[width].splitlines() if len(line) > width]
        assert {line for line in long if not re.match(r"/\S+$|mlx-stack up |from /", line)} == set()
    assert headings in {" ".join(line.split()) for line in shown[80].splitlines()}


def test_a_word_too_long_for_its_column_runs_over_the_next_ones() -> None:
    rows = [["a.key", MODEL, "default"], ["b" * 30, "1", "file.yaml:3"]]
    lines = layout(["KEY", "VALUE", "FROM"], [[cell(one) for one in row] for row in rows], 70)
    assert [line.plain for line in lines] == [
        f"{'KEY':32}{'VALUE':27}FROM",
        f"{'a.key':{70 - len(MODEL)}}{MODEL}",
        f"{'':59}default",
        f"{'b' * 30:32}{'1':27}file.yaml:3",
    ]


def test_what_fits_no_width_becomes_a_block_of_lines() -> None:
    lines = [line.plain for line in layout(["ID", "MODEL"], [[cell("a" * 30), cell(MODEL)]], 40)]
    assert lines == [f"ID     {'a' * 30}", f"MODEL  {MODEL}"]


def test_a_column_without_text_is_left_out() -> None:
    lines = layout(["A", "B"], [[cell(1), cell("")], [cell(2), cell("")]], 80)
    assert [line.plain for line in lines] == ["A", "1", "2"]
    assert layout(["A", "B"], [], 80)[0].plain == "A  B"


def test_states_have_colors_and_other_words_have_none() -> None:
    assert cell(ServiceHealthLevel.HEALTHY).style == cell(CheckLevel.OK).style == "green"
    assert cell(ServiceHealthLevel.CRASHED).style == cell(CheckLevel.BAD).style == "bold red"
    assert cell(ServiceHealthLevel.DEGRADED).style == cell(CheckLevel.WARN).style == "yellow"
    assert cell("healthy").style == "" and cell("crashed").style == ""


def test_sizes_have_one_form() -> None:
    shown = [size(n) for n in (0, 1023, 64 * 1024, 1.5 * 2**20, 45 * 2**20, 12 * 2**30, 2**41)]
    assert shown == ["0 B", "1023 B", "64 KiB", "1.5 MiB", "45 MiB", "12.0 GiB", "2.0 TiB"]


def test_foreign_text_has_no_control_characters() -> None:
    evil = "a\x1b[31m\u202eb\n\tc"
    assert printable(evil) == "a\\x1b[31m\\u202eb\\n\\tc"
    assert printable_lines(evil) == "a\\x1b[31m\\u202eb\n\tc"
    assert printable("abcdef", 4) == "abc…"


def in_terminal(shell: Shell, columns: int, *args: str, **env: str) -> str:
    """What a command prints on a terminal of so many columns."""
    ours, theirs = pty.openpty()
    variables = {k: v for k, v in shell.env.items() if k != "COLUMNS"}
    more = {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "50"}
    process = subprocess.Popen(
        [*CLI, *args], env=variables | more | env, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    text = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:
            break
        if not chunk:
            break
        text += chunk
    os.close(ours)
    process.wait(PATIENCE_S)
    return text.decode().replace("\r\n", "\n")


@pytest.mark.net
@pytest.mark.parametrize("columns", WIDTHS)
def test_status_and_slots_on_a_terminal(served: Shell, columns: int) -> None:
    status = in_terminal(served, columns, "status")
    assert "\x1b[32mhealthy" in status
    plain = in_terminal(served, columns, "status", NO_COLOR="1")
    assert "\x1b[3" not in plain and "healthy" in plain
    for text in (plain, in_terminal(served, columns, "slots", NO_COLOR="1")):
        bare = re.sub(r"\x1b\[[0-9;]*m", "", text)
        assert max(map(len, bare.splitlines())) <= columns
    assert f"http://127.0.0.1:{served.port}" in plain


@pytest.mark.net
def test_a_stopped_service_leaves_the_list(shell: Shell) -> None:
    assert shell.up().returncode == 0
    assert shell.run("down").returncode == 0
    stopped = shell.run("status").stdout
    assert "tiny" not in stopped and "1 stopped; --all lists them" in stopped
    assert json.loads(shell.run("status", "--json").stdout)["services"]
    state = shell.home / "run" / "tiny.json"
    old = time.time() - 25 * 3600
    os.utime(state, (old, old))
    assert "tiny" not in shell.run("status").stdout
    assert json.loads(shell.run("status", "--json").stdout)["services"] == []
    assert "tiny" in shell.run("status", "--all").stdout
    assert "tiny" in shell.run("status", "--name", "tiny").stdout


@pytest.mark.net
def test_completion_knows_services_and_agents(shell: Shell) -> None:
    """Against the demo, whose agents have names."""
    del shell.env["MLX_STACK_WORKER"]
    assert shell.up().returncode == 0
    assert shell.run("chat", "--agent", "reviewer", "-p", "Hello").returncode == 0

    for verb in ("down", "logs", "chat"):
        assert completions(shell.home, f"{verb} ti") == ["tiny"]
    assert completions(shell.home, "agents show rev") == ["reviewer"]
    assert completions(shell.home, "agents show nob") == []
