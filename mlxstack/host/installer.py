"""Command that installs an optional part of mlx-stack into its environment."""

import sys
from pathlib import Path


def install_command(extra: str) -> str:
    """Command that installs an extra of pyproject.toml, in the clone."""
    prefix = Path(sys.prefix)
    if (prefix / "uv-receipt.toml").exists():
        command = "uv tool install"
    elif (prefix / "pipx_metadata.json").exists():
        command = "pipx install --force"
    else:
        command = f"{sys.executable} -m pip install"
    return f"{command} '.[{extra}]'"
