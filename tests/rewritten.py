"""Writes the modules of tests as pytest compiles them: `python -m tests.rewritten`.

Each worker of a first run would rewrite the assertions of all modules, at the same time.
"""

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from _pytest.assertion import rewrite

TESTS = Path(__file__).parent
PATTERNS = ("test_*.py", "conftest.py")
N_AT_ONCE = 20
"""Files of one piece of work."""


def write(file: Path) -> None:
    """Write the compiled module of a file that pytest will read, if it is not there."""
    compiled = rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
    if rewrite._read_pyc(file, compiled) is None:
        compiled.parent.mkdir(exist_ok=True)
        about, code = rewrite._rewrite_test(file, None)  # type: ignore[arg-type]
        rewrite._write_pyc(None, code, about, compiled)  # type: ignore[arg-type]


def main() -> None:
    """Write those of all files of tests, on all cores."""
    files = [file for pattern in PATTERNS for file in sorted(TESTS.rglob(pattern))]
    with ProcessPoolExecutor() as pool:
        list(pool.map(write, files, chunksize=N_AT_ONCE))


if __name__ == "__main__":
    main()
