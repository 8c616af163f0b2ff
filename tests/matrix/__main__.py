"""`python -m tests.matrix` examines every model type and writes docs/models.md.

`python -m tests.matrix NAME ...` examines these and prints their rows. Each type has a process of
its own, so that one which brings MLX down is a line of the table and not the end of it.
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import msgspec

from tests.matrix import table
from tests.matrix.builder import model_types
from tests.matrix.configs import VARIANTS
from tests.matrix.examine import Row, examine

LIMIT_S = 600
N_PROCESSES = 2
ONE = "--one"


def apart(name: str) -> Row:
    """Examine in a process of its own; its death is a fault."""
    command = [sys.executable, "-m", "tests.matrix", ONE, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    lines = [text for text in done.stdout.splitlines() if text.startswith("{")]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return Row(name, faults=(f"its process ended with {done.returncode}: {last}",))
    row = msgspec.json.decode(lines[-1], type=Row)
    print(table.line(row), *row.faults, sep="\n  ", flush=True)  # noqa: T201
    return row


def main(names: list[str]) -> int:
    """The number of types that break a promise."""
    if names[:1] == [ONE]:
        row = examine(names[1])
        print(msgspec.json.encode(row).decode(), flush=True)  # noqa: T201
        return 0
    everything = sorted([*model_types(), *VARIANTS], key=str.lower)
    with ThreadPoolExecutor(N_PROCESSES) as pool:
        rows = list(pool.map(apart, names or everything))
    broken = [row for row in rows if row.faults]
    for row in broken:
        print(row.name, *row.faults, sep="\n  ")  # noqa: T201
    if not names and not broken:
        table.PAGE.write_text(table.page(rows, table.PAGE.read_text()))
    return len(broken)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
