"""Pins for a Mac: the resolver's own answer within constraints.txt."""

import os
import shutil
import subprocess
import tempfile
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from packaging.tags import compatible_tags, cpython_tags, mac_platforms
from packaging.utils import parse_wheel_filename

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
MACOS = "14.0"


class Pin(NamedTuple):
    """One wheel for an Apple silicon Mac."""

    name: str
    version: str
    url: str
    sha256: str


def resolver() -> Path | None:
    """uv: that of `make audit`, else that of PATH."""
    own = ROOT / ".venv" / "audit" / "bin" / "uv"
    program = shutil.which("uv")
    return own if own.exists() else Path(program) if program else None


def resolved(uv: Path, python: str, *, macos: str = MACOS, more: str = "") -> list[Pin]:
    """Wheels of the package for one Python on a Mac, with `more` requirements.

    Raises CalledProcessError where a dependency has no wheel there.
    """
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder) / "pylock.toml"
        subprocess.run(
            [
                str(uv), "pip", "compile", str(ROOT / "pyproject.toml"), "-",
                "--constraints", str(ROOT / "constraints.txt"), "--only-binary", ":all:",
                "--python-platform", "aarch64-apple-darwin", "--python-version", python,
                "--format", "pylock.toml", "--output-file", str(lock), "--quiet",
            ],
            input=more,
            env={**os.environ, "MACOSX_DEPLOYMENT_TARGET": macos},
            check=True,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )  # fmt: skip
        packages = tomllib.loads(lock.read_text(encoding="utf-8"))["packages"]
    return sorted(_pin(package, python, macos) for package in packages)


def _pin(package: dict[str, Any], python: str, macos: str) -> Pin:
    """The wheel that pip prefers there, as the PEPs on tags order them."""
    version = _numbers(python)
    platforms = list(mac_platforms(_numbers(macos), "arm64"))
    tags = [*cpython_tags(version, platforms=platforms), *compatible_tags(version, "cp", platforms)]
    rank_of = {tag: position for position, tag in enumerate(tags)}

    def rank(wheel: dict[str, Any]) -> int:
        *_, own = parse_wheel_filename(wheel["url"].rpartition("/")[2])
        return min(rank_of.get(tag, len(rank_of)) for tag in own)

    wheel = min(package["wheels"], key=rank)
    return Pin(package["name"], package["version"], wheel["url"], wheel["hashes"]["sha256"])


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")
    return int(major), int(minor)
