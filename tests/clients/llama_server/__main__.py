"""`make peers`: llama.cpp's own server tests against our service.

The argument is the source package `llama_cpp_python`. Exit code 1 if a test fails that the page of
differences does not name, or if one passes that it names.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

from mlxstack.host.hardware import for_mlx
from tests.clients.llama_server import model
from tests.ports import unused_port

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
IDS = HERE / "ids.txt"
PAGE = HERE.parent / "llama_server_differences.md"
TESTS = re.compile(r"[^/]+/vendor/llama\.cpp/tools/server/tests/")
UNIT = "unit/"
ROW = re.compile(r"^\| (`.+`) \| (.+) \|$", re.MULTILINE)
FAULT = "FAULT"
CHANCE = "by chance"
"""Begins the reason of a test that passes or not by what the model samples."""
MAX_SECONDS = 120
"""For one test, the start of its servers included."""


def main() -> None:
    """Unpack the tests, run them, and print the verdict of each."""
    folder = Path(sys.prefix).resolve() / "suite"
    suite = _unpack(Path(sys.argv[1]), folder)
    outcomes = _run(suite, folder)
    verdict_of = verdicts(outcomes, reasons(PAGE.read_text(encoding="utf-8")))
    for name, check in verdict_of.items():
        print(f"{name}: {check}")
    n_passed = sum(check.startswith("passed") for check in verdict_of.values())
    n_faults = sum(check.startswith(FAULT) for check in verdict_of.values())
    print(f"{n_passed} of {len(verdict_of)} pass, {n_faults} differ from the page")
    sys.exit(n_faults > 0)


def reasons(page: str) -> dict[str, str]:
    """Reason why a test does not pass, by its id."""
    rows = ROW.findall(page)
    return {name: reason for names, reason in rows for name in re.findall(r"`([^`]+)`", names)}


def verdicts(outcomes: Mapping[str, str], reason_of: Mapping[str, str]) -> dict[str, str]:
    """Verdict of each listed test; one that is not as the page says begins with FAULT."""
    verdict_of = {}
    for line in IDS.read_text(encoding="utf-8").splitlines():
        name = line.removeprefix(UNIT)
        outcome = outcomes.get(line, "not run")
        reason = reason_of.get(name)
        match outcome, reason:
            case "passed", None:
                verdict_of[name] = "passed"
            case "passed", str(chance) if chance.startswith(CHANCE):
                verdict_of[name] = f"passed {chance}"
            case "passed", _:
                verdict_of[name] = f"{FAULT}: passed, and the page says: {reason}"
            case _, None:
                verdict_of[name] = f"{FAULT}: {outcome}"
            case _:
                verdict_of[name] = f"differs: {reason}"
    return verdict_of


def _unpack(package: Path, folder: Path) -> Path:
    """Folder of the tests, out of the source package."""
    with tarfile.open(package) as files:
        for member in files:
            if place := TESTS.match(member.name):
                member.name = member.name[place.end() :]
                files.extract(member, folder, filter="data")
    return folder


def _run(suite: Path, folder: Path) -> dict[str, str]:
    """Outcomes by id; of several for one test, the worst."""
    outcomes = folder / "outcomes.jsonl"
    outcomes.unlink(missing_ok=True)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    env = os.environ | {
        "MLX_STACK_CPU": "1",
        "PORT": str(unused_port()),
        "PYTHONPATH": str(ROOT),
        "SUITE_IDS": str(IDS),
        "SUITE_MODEL": str(model.write(folder / model.NAME, text)),
        "SUITE_OUTCOMES": str(outcomes),
    }
    lines = IDS.read_text(encoding="utf-8").splitlines()
    files = sorted({line.partition("::")[0] for line in lines})
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
    command += ["-p", "tests.clients.llama_server.outcomes", f"--timeout={MAX_SECONDS}", *files]
    with (folder / "log").open("w") as log:
        subprocess.run(
            command, cwd=suite, env=env | for_mlx(env), stdout=log, stderr=log, check=False
        )
    worst: dict[str, str] = {}
    for line in outcomes.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if worst.get(entry["id"], "passed") == "passed":
            worst[entry["id"]] = entry["outcome"]
    return worst


if __name__ == "__main__":
    main()
