"""The resolver's answer for the Macs that the project names."""

import subprocess
import tomllib

import pytest

from tests.release.pins import ROOT, resolved, resolver

UV = resolver()
pytestmark = [
    pytest.mark.net,
    pytest.mark.skipif(UV is None, reason="no uv; `make audit` installs it"),
]


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_every_dependency_has_a_wheel_for_macos_14(python: str) -> None:
    assert UV is not None
    about = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = {pin.name: pin for pin in resolved(UV, python)}
    assert len(pins) > len(about["dependencies"])
    assert pins["mlx"].url.endswith("macosx_14_0_arm64.whl")


def test_an_older_macos_has_no_mlx() -> None:
    assert UV is not None
    with pytest.raises(subprocess.CalledProcessError) as failed:
        resolved(UV, "3.12", macos="13.0")
    assert "macosx_13_0_arm64" in failed.value.stderr
