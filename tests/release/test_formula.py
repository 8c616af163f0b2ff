"""The Homebrew formula: pins of constraints.txt, and the rules of `brew style`.

Rules: https://docs.brew.sh/Formula-Cookbook and Homebrew's cops FormulaAudit/ComponentsOrder,
FormulaAudit/Desc, FormulaAudit/Test, Layout/LineLength (118; urls are free).
"""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.patience import PATIENCE_S
from tests.release.formula import FORMULA, formula
from tests.release.pins import ROOT, Pin

RESOURCE = re.compile(
    r'^  resource "([a-z0-9-]+)" do\n    url "(\S+)", using: :nounzip\n'
    r'    sha256 "([0-9a-f]{64})"\n  end$',
    re.MULTILINE,
)
ORDER = ("desc", "homepage", "url", "sha256", "head", "depends_on", "resource", "def install",
         "service", "test")  # fmt: skip


def pins() -> list[Pin]:
    resources = []
    for name, url, sha256 in RESOURCE.findall(FORMULA.read_text(encoding="utf-8")):
        resources.append(Pin(name, url.rpartition("/")[2].split("-")[1], url, sha256))
    return resources


def offences(text: str) -> list[str]:
    """Rules of `brew style` that a formula breaks."""
    broken = []
    lines = text.splitlines()
    for line in lines:
        if len(line) > 118 and not re.match(r'\s+url "', line):
            broken.append(f"longer than 118: {line}")
        if line != line.rstrip() or "\t" in line or "'" in line.partition("#")[0]:
            broken.append(f"spaces, tabs or single quotes: {line}")
    parts = [match[1] for line in lines if (match := re.match(r"  (def \w+|\w+)", line))]
    places = [ORDER.index(part) for part in parts if part in ORDER]
    if places != sorted(places) or {"desc", "homepage", "def install", "test"} - set(parts):
        broken.append(f"components missing or out of order: {parts}")
    (desc,) = re.findall(r'^  desc "(.+)"$', text, re.MULTILINE)
    if len(desc) > 80 or re.match(r"(?i)(an?|the) |mlx-stack", desc) or desc.endswith("."):
        broken.append(f"desc: {desc}")
    names = [resource[0] for resource in RESOURCE.findall(text)]
    if names != sorted(set(names)) or text.count("  resource ") != len(names):
        broken.append("resources: twice, out of order, or without url and sha256")
    if not re.search(r"  test do\n(?:.*\n)*?.*(?:assert|system)", text):
        broken.append("the test block tests nothing")
    if "\n\n\n" in text or not text.endswith("\nend\n"):
        broken.append("blank lines, or no last line break")
    return broken


def test_the_formula_is_that_of_its_pins() -> None:
    assert FORMULA.read_text(encoding="utf-8") == formula(pins())


def test_each_resource_is_pinned_in_the_tested_set() -> None:
    tested: dict[str, set[str]] = {}
    for block in re.split(r"\n(?=\S)", (ROOT / "constraints.txt").read_text(encoding="utf-8")):
        if match := re.match(r"([A-Za-z0-9_.-]+)==(\S+)", block):
            key = f"{canonicalize_name(match[1])} {match[2]}"
            tested.setdefault(key, set()).update(re.findall(r"sha256:([0-9a-f]{64})", block))
    strange = [
        pin for pin in pins() if pin.sha256 not in tested.get(f"{pin.name} {pin.version}", ())
    ]
    assert strange == []


def test_each_dependency_of_a_mac_is_a_resource() -> None:
    about = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    mac = {"sys_platform": "darwin", "python_version": "3.12", "platform_machine": "arm64"}
    requirements = [
        *about["project"]["dependencies"],
        *about["build-system"]["requires"],
        "mlx-metal",
    ]
    own = {pin.name: pin.version for pin in pins()}
    for requirement in map(Requirement, requirements):
        if requirement.marker is None or requirement.marker.evaluate(mac):
            assert own[canonicalize_name(requirement.name)] in requirement.specifier


@pytest.mark.parametrize("url", ["", "https://github.com/OWNER/mlx-stack/releases/x.tar.gz"])
def test_the_formula_follows_brew_style(url: str, tmp_path: Path) -> None:
    text = formula(pins(), url, "0" * 64 if url else "")
    assert offences(text) == []
    if (brew := shutil.which("brew")) is not None:
        file = tmp_path / "mlx-stack.rb"
        file.write_text(text, encoding="utf-8")
        subprocess.run([brew, "style", str(file)], check=True, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("part", "broken"),
    [
        ('desc "MLX', 'desc "An MLX'),
        ("depends_on arch: :arm64", 'url "https://example.org/x"'),
        ('assert_match "demo"', "# " + "x" * 120),
        ("  test do", "  other do"),
        ("    sha256 ", "    sha512 "),
    ],
)
def test_a_formula_that_breaks_a_rule_is_found(part: str, broken: str) -> None:
    text = formula(pins())
    assert part in text
    assert offences(text.replace(part, broken, 1)) != []
