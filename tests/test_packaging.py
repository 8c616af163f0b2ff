"""What stands ready for GitHub and Homebrew names things that exist, and the same versions."""

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml
from typer.main import get_command

from mlxstack.cli.main import app

ROOT = Path(__file__).parents[1]
WORKFLOW = ROOT / ".github" / "workflows" / "test.yml"
FORMULA = ROOT / ".github" / "homebrew" / "mlx-stack.rb"
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def jobs() -> dict[str, Any]:
    workflow_jobs: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]
    return workflow_jobs


def commands() -> str:
    return "\n".join(step.get("run", "") for job in jobs().values() for step in job["steps"])


def is_supported(python: str) -> bool:
    least = PROJECT["requires-python"].removeprefix(">=")
    return [int(n) for n in python.split(".")] >= [int(n) for n in least.split(".")]


def test_the_workflow_runs_the_suite_on_linux_and_on_apple_silicon() -> None:
    rows = jobs()["suite"]["strategy"]["matrix"]["include"]
    systems = {row["os"] for row in rows}
    assert any(name.startswith("ubuntu-") for name in systems)
    assert any(re.fullmatch(r"macos-1[4-9]", name) for name in systems), "arm64 since macos-14"
    assert all(is_supported(row["python"]) for row in rows)
    assert "make test" in commands()
    targets = set(re.findall(r"make ([a-z]+)", commands()))
    assert targets <= set(re.findall(r"^([a-z]+):", MAKEFILE, re.MULTILINE))


def test_the_workflow_installs_as_the_readme_says_and_uses_verbs_that_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "uv tool install ." in commands() and "pipx install ." in commands()
    assert "uv tool install" in readme and "pipx install" in readme
    verbs = get_command(app).commands  # type: ignore[attr-defined]
    used = set(re.findall(r"mlx-stack\"?,? \"?([a-z]+)", commands() + FORMULA.read_text()))
    assert {"up", "chat", "down"} <= used
    assert {verb for verb in used if verb not in verbs and verb != "inference"} == set()


def test_the_formula_has_a_python_that_the_package_supports() -> None:
    (python,) = set(re.findall(r'depends_on "python@([\d.]+)"', FORMULA.read_text()))
    assert is_supported(python)
    assert f"python{python}" in FORMULA.read_text().replace(f"python@{python}", "")


def test_make_up_installs_no_developers_tools() -> None:
    rules = dict(re.findall(r"^(\S+): *(.*?)(?: ##.*)?$", MAKEFILE, re.MULTILINE))
    assert rules["up"] == rules["down"] == "$(VENV)/installed"
    recipe, developers = (
        MAKEFILE.split(f"\n$(VENV)/{target}:")[1].split("\n\n")[0]
        for target in ("installed", "ready")
    )
    assert "pip install" in recipe and "--group" not in recipe
    assert "--group dev" in developers


def test_the_wheel_needs_nothing_that_only_developers_have() -> None:
    names = {re.split(r"[<>=\[; ]", dependency)[0] for dependency in PROJECT["dependencies"]}
    assert not names & {"pytest", "mypy", "ruff", "hypothesis", "schemathesis", "cairosvg"}


def test_no_remedy_installs_a_package_of_our_name_from_the_index() -> None:
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "mlxstack").rglob("*.py")]
    for file in files:
        remedy = re.search(r"(?:pip|pipx|uv tool) install ['\"]?mlx-stack", file.read_text("utf-8"))
        assert remedy is None, file
