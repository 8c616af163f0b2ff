# Formula for a tap of your own: `brew tap OWNER/tap`, then `brew install --HEAD OWNER/tap/mlx-stack`.
# OWNER is the account that publishes the repository. Never run by Homebrew yet: the project has no
# Mac to test on. MLX has wheels only, so dependencies come from PyPI, which a tap may do.
class MlxStack < Formula
  desc "MLX inference server for several coding agents on one Mac"
  homepage "https://github.com/OWNER/mlx-stack"
  head "https://github.com/OWNER/mlx-stack.git", branch: "main"

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "python@3.12"

  def install
    python = Formula["python@3.12"].opt_bin/"python3.12"
    system python, "-m", "venv", libexec
    system libexec/"bin/python", "-m", "pip", "install", "--no-cache-dir", buildpath
    bin.install_symlink libexec/"bin/mlx-stack"
    generate_completions_from_executable(
      bin/"mlx-stack", "--show-completion", shells: [:bash, :zsh, :fish], shell_parameter_format: :arg
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
    assert_match "demo", shell_output("#{bin}/mlx-stack presets")
    system bin/"mlx-stack", "up", "demo", "--port", free_port.to_s
    system bin/"mlx-stack", "chat", "-p", "Hello!"
    system bin/"mlx-stack", "down"
  end
end
