"""The tested set in constraints.txt: pinned with hashes, and what the project wants."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PIN = re.compile(
    r"^([A-Za-z0-9_.-]+)==([^ ;\\]+)(?: ; [^\\]+)? \\\n((?:    --hash=sha256:.*\n)+)", re.M
)


def pins() -> dict[str, list[str]]:
    pins_of: dict[str, list[str]] = {}
    for match in PIN.finditer((ROOT / "constraints.txt").read_text()):
        pins_of.setdefault(canonicalize_name(match[1]), []).append(match[2])
    return pins_of


def test_everything_is_pinned_with_hashes() -> None:
    text = (ROOT / "constraints.txt").read_text()
    lines = [line for line in text.splitlines() if line and line[0] not in " #"]
    assert len(lines) == sum(len(versions) for versions in pins().values()) > 50


def test_the_tested_set_is_what_the_project_wants() -> None:
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())
    requirements = [*about["project"]["dependencies"], *about["dependency-groups"]["dev"]]
    for requirement in map(Requirement, requirements):
        versions = pins()[canonicalize_name(requirement.name)]
        assert all(version in requirement.specifier for version in versions), requirement
