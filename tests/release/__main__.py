"""`make release`: dist/ with wheel, sdist, SBOM, formula and checksums, tried as users install.

Nothing is published: the two commands for that are printed.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from mlxstack import __version__
from tests.release.formula import formula, mac_pins
from tests.release.pins import ROOT

DIST = ROOT / "dist"
TRIED = ROOT / ".venv" / "release"
TOOLS = ROOT / ".venv" / "audit" / "bin"
PYTEST = [sys.executable, "-m", "pytest", "-q"]


def main() -> None:
    """Build, try each way of installation, and write what belongs to a release."""
    shutil.rmtree(DIST, ignore_errors=True)
    _run([*PYTEST, "tests/release"])
    _run([TOOLS / "uv", "build", "--quiet", "--out-dir", DIST, ROOT])
    (wheel,), (source,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    for way, file in (("uv", wheel), ("pipx", wheel), ("pip", wheel), ("pip", source)):
        shutil.rmtree(TRIED, ignore_errors=True)
        programs = _install(way, file)
        print(f"{way}: {file.name}", flush=True)
        _run([*PYTEST, "tests/test_readme.py"], MLX_STACK_BIN=str(programs))
    shutil.rmtree(TRIED)
    _run(["make", "--no-print-directory", "sbom"])
    url = f"https://github.com/OWNER/mlx-stack/releases/download/v{__version__}/{source.name}"
    text = formula(mac_pins(TOOLS / "uv"), url, _sha256(source))
    (DIST / "mlx-stack.rb").write_text(text, encoding="utf-8")
    files = sorted(file for file in DIST.iterdir() if file.name != ".gitignore")
    sums = "".join(f"{_sha256(file)}  {file.name}\n" for file in files)
    (DIST / "SHA256SUMS").write_text(sums, encoding="utf-8")
    print(sums, end="")
    print("To publish:")
    print(f"  uv publish dist/{wheel.name} dist/{source.name}")
    print(f"  gh release create v{__version__} dist/* --title v{__version__} --notes-from-tag")


def _install(way: str, file: Path) -> Path:
    """Folder with the programs of an empty environment into which a file was installed."""
    if way == "uv":
        folders = {"UV_TOOL_DIR": str(TRIED / "tools"), "UV_TOOL_BIN_DIR": str(TRIED / "bin")}
        _run([TOOLS / "uv", "tool", "install", "--quiet", file], **folders)
        return TRIED / "tools" / "mlx-stack" / "bin"
    if way == "pipx":
        folders = {"PIPX_HOME": str(TRIED / "tools"), "PIPX_BIN_DIR": str(TRIED / "bin")}
        _run([TOOLS / "pipx", "install", "--quiet", file], **folders)
        return TRIED / "tools" / "venvs" / "mlx-stack" / "bin"
    _run([sys.executable, "-m", "venv", TRIED / "env"])
    _run([TRIED / "env" / "bin" / "python", "-m", "pip", "install", "--quiet", file])
    return TRIED / "env" / "bin"


def _run(command: list[str | Path], **variables: str) -> None:
    done = subprocess.run(list(map(str, command)), env=os.environ | variables, check=False)
    if done.returncode != 0:
        sys.exit(f"make release failed: {' '.join(map(str, command))}")


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
