"""`python -m tests.mutants [--list] [WORD...]`: switches off each protection in a copy of the
repository and runs its test; `--list` prints them instead.

With words, only mutants with one of them in protection, file or test. Exits with the number of
survivors.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.rows import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
COPIED = ("mlxstack", "tests", "presets", "docs", "pyproject.toml", "README.md")
WAIT_S = 300
FAILED = 1
"""pytest's status when a test failed; another one means that the test did not run."""


def main(arguments: Sequence[str]) -> int:
    """How many of the chosen protections no test misses."""
    searched = [word for word in arguments if word != "--list"]
    chosen = [mutant for mutant in MUTANTS if is_chosen(mutant, searched)]
    if "--list" in arguments:
        print("| protection | switched off in | what then fails |\n|---|---|---|")
        for mutant in chosen:
            print(f"| {mutant.protection} | `{mutant.file}` | `{mutant.test}` |")
        return 0
    n_alive = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, copy / name)
        for mutant in chosen:
            is_noticed = notices(copy, mutant)
            n_alive += not is_noticed
            print(f"{'noticed ' if is_noticed else 'SURVIVED'} {mutant.protection}", flush=True)
    print(f"{n_alive} of {len(chosen)} survived")
    return n_alive


def is_chosen(mutant: Mutant, searched: Sequence[str]) -> bool:
    texts = (mutant.protection, mutant.file, mutant.test)
    return not searched or any(word in text for word in searched for text in texts)


def notices(copy: Path, mutant: Mutant) -> bool:
    """Whether the test fails without the protection."""
    path = copy / mutant.file
    text = path.read_text()
    path.write_text(text.replace(mutant.old, mutant.new))
    options = ["--soak", "-q", "-x", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, mutant.test]
    try:
        env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            command, cwd=copy, env=env, capture_output=True, timeout=WAIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(text)
    # A service that a mutant leaves hanging may abort the exit of a run whose test has failed.
    was_killed = done.returncode < 0 and f"FAILED {mutant.test}".encode() in done.stdout
    return done.returncode == FAILED or was_killed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
