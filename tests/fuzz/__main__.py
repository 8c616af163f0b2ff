"""Coverage-guided fuzzing: `python -m tests.fuzz MINUTES [TARGET ...]`, each target so long.

What is found is written to `.fuzz/TARGET/crash-*`; copied to `tests/fuzz/findings/TARGET` it is
run by the suite for ever. The corpus in `.fuzz/TARGET/corpus` is gone on with the next time.
"""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

TARGETS = ("presets", "files", "answers", "forging", "doors")
ROOT = Path(".fuzz")
MINUTE_S = 60
HANG_S = 20
MEGABYTES = 4096
LONGEST = 4096


def main(minutes: float, targets: tuple[str, ...]) -> int:
    """Each target in a process of its own; how many of them found something."""
    n_bad = 0
    for target in targets:
        seconds = str(int(minutes * MINUTE_S))
        command = [sys.executable, "-m", "tests.fuzz", "--one", target, seconds]
        code = subprocess.run(command, check=False).returncode
        print(f"{target}: {'nothing found' if code == 0 else f'exit status {code}'}", flush=True)
        n_bad += code != 0
    return n_bad


def one(target: str, seconds: str) -> None:
    """Never returns."""
    import atheris

    with atheris.instrument_imports(include=["mlxstack", "yaml"]):
        module = import_module(f"tests.fuzz.{target}")
    folder = ROOT / target
    (folder / "corpus").mkdir(parents=True, exist_ok=True)
    findings = Path(__file__).parent / "findings" / target
    seeds = [str(findings)] if findings.is_dir() else []
    arguments = [
        sys.argv[0],
        str(folder / "corpus"),
        *seeds,
        f"-max_total_time={seconds}",
        f"-timeout={HANG_S}",
        f"-rss_limit_mb={MEGABYTES}",
        f"-max_len={LONGEST}",
        f"-artifact_prefix={folder}/",
        "-len_control=0",
        "-print_final_stats=1",
    ]
    atheris.Setup(arguments, getattr(module, target))
    atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        one(sys.argv[2], sys.argv[3])
    sys.exit(main(float(sys.argv[1]), tuple(sys.argv[2:]) or TARGETS))
