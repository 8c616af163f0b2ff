"""Logs rotate, are read across rotations, and are followed across them."""

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

from mlxstack.host.logs import RotatingLog, follow, tail


def test_a_journal_rotates_and_tail_reads_across(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    journal = RotatingLog(path, max_bytes=100)
    for n in range(30):
        journal.write(f"line {n} 100% sure %s")
    journal.close()
    assert path.with_name("a.log.1").exists()
    assert path.stat().st_size <= 100
    assert tail(path, 6) == [f"line {n} 100% sure %s" for n in range(24, 30)]
    assert journal.last_lines[-1] == "line 29 100% sure %s"
    assert tail(path, 0) == []
    assert tail(tmp_path / "none.log", 5) == []


def test_a_journal_is_utf8_wherever_it_is_written(tmp_path: Path) -> None:
    write = "RotatingLog(Path(sys.argv[1])).write('f\\xfcr \\u2713')"
    code = f"import sys; from mlxstack.host.logs import *; {write}"
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    path = tmp_path / "a.log"
    args = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(args, env=env, capture_output=True, check=True)
    assert (tail(path, 1), done.stderr) == (["für ✓"], b"")


def test_follow_loses_no_line_at_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    journal = RotatingLog(path, max_bytes=60)
    journal.write("old")
    written = iter(range(20))

    def wait() -> None:
        for _ in range(2):
            journal.write(f"line {next(written)}")

    ahead = follow(path, wait)
    assert [next(ahead) for _ in range(18)] == [f"line {n}" for n in range(18)]
    journal.close()


def test_follow_waits_for_the_file_and_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    steps = iter(["", "half", " and half\nnext\n"])

    def wait() -> None:
        text = next(steps)
        if text:
            with path.open("a") as file:
                file.write(text)

    ahead = follow(path, wait)
    assert [next(ahead), next(ahead)] == ["half and half", "next"]


def test_the_end_of_a_long_log_is_read_without_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    lines = [f"{n}: ä {'x' * 100}" for n in range(1000)]
    with path.open("wb") as file:
        file.truncate(2**26)
        file.seek(0, os.SEEK_END)
        file.write("\n".join(["", *lines, "unfinished"]).encode())
    tracemalloc.start()
    found = tail(path, 500)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == [*lines[-499:], "unfinished"]
    assert peak < 2**20
