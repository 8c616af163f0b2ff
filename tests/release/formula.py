"""Homebrew formula, written from the pins of constraints.txt.

`python -m tests.release.formula` writes the one in the repository, which builds from `head`.
"""

from pathlib import Path

from tests.release.pins import ROOT, Pin, resolved, resolver

FORMULA = ROOT / ".github" / "homebrew" / "mlx-stack.rb"
PYTHON = "3.12"
BUILD = "hatchling>=1.27\n"
"""The source is built without an index, so its build system is a resource too."""

HEAD = """\
# Formula for a tap of your own: `brew tap OWNER/tap`, `brew install {flag}OWNER/tap/mlx-stack`.
# OWNER is the account that publishes the repository. Never run by Homebrew yet: the project has no
# Mac to test on. MLX has wheels only, so dependencies are wheels of PyPI, which a tap may have.
# Written by `python -m tests.release.formula` from constraints.txt.
class MlxStack < Formula
  desc "MLX inference server for several coding agents on one Mac"
  homepage "https://github.com/OWNER/mlx-stack"
{stable}  head "https://github.com/OWNER/mlx-stack.git", branch: "main"

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "python@{python}"
"""
STABLE = """\
  url "{url}"
  sha256 "{sha256}"
"""
RESOURCE = """
  resource "{name}" do
    url "{url}", using: :nounzip
    sha256 "{sha256}"
  end
"""
TAIL = """
  def install
    python = Formula["python@{python}"].opt_bin/"python{python}"
    system python, "-m", "venv", libexec
    wheels = buildpath/"wheels"
    resources.each {{ |wheel| wheel.stage(wheels) }}
    pip = [libexec/"bin/python", "-m", "pip", "install", "--no-index", "--no-deps"]
    system(*pip, *wheels.glob("*.whl"))
    system(*pip, "--no-build-isolation", buildpath)
    bin.install_symlink libexec/"bin/mlx-stack"
    generate_completions_from_executable(
      bin/"mlx-stack", "--show-completion",
      shells: [:bash, :zsh, :fish], shell_parameter_format: :arg
    )
  end

  service do
    run [opt_bin/"mlx-stack", "up", "demo", "--foreground"]
    keep_alive crashed: true
    log_path var/"log/mlx-stack.log"
    error_log_path var/"log/mlx-stack.log"
  end

  test do
    ENV["MLX_STACK_HOME"] = testpath/"home"
    assert_match "demo", shell_output("#{{bin}}/mlx-stack presets")
    system bin/"mlx-stack", "up", "demo", "--port", free_port.to_s
    system bin/"mlx-stack", "chat", "-p", "Hello!"
    system bin/"mlx-stack", "down"
  end
end
"""


def formula(pins: list[Pin], url: str = "", sha256: str = "") -> str:
    """Formula with these resources; with `url` for a published source archive too."""
    stable = STABLE.format(url=url, sha256=sha256) if url else ""
    head = HEAD.format(flag="" if url else "--HEAD ", stable=stable, python=PYTHON)
    resources = "".join(RESOURCE.format(**pin._asdict()) for pin in pins)
    return head + resources + TAIL.format(python=PYTHON)


def mac_pins(uv: Path) -> list[Pin]:
    """Wheels of the formula's Python, with the build system."""
    return resolved(uv, PYTHON, more=BUILD)


if __name__ == "__main__":
    uv = resolver()
    assert uv is not None, "make audit installs uv"
    FORMULA.write_text(formula(mac_pins(uv)), encoding="utf-8")
