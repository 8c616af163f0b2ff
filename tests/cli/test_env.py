"""Z14: `env` and `run` against a running service."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from tests.cli.pseudo_terminal import Terminal
from tests.cli.terminal import Shell
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.net


def program(folder: Path, name: str) -> str:
    """A PATH on which `name` tells its arguments and its environment as JSON."""
    file = folder / "bin" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(
        "#!/usr/bin/env python3\nimport json, os, sys\n"
        "print(json.dumps({'args': sys.argv[1:], 'env': dict(os.environ)}))\n"
    )
    file.chmod(0o755)
    return f"{file.parent}:{os.environ['PATH']}"


def test_z14_env_tells_the_alias_and_the_context_of_the_service(served: Shell) -> None:
    before = set((served.home / "clients").rglob("*"))
    found = json.loads(served.run("env", "claude", "--json").stdout)
    assert found["variables"]["ANTHROPIC_BASE_URL"] == f"http://127.0.0.1:{served.port}"
    assert found["variables"]["ANTHROPIC_MODEL"] == "tiny"
    assert found["variables"]["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "1024"
    by_url = served.run("env", "openai", "--url", f"http://127.0.0.1:{served.port}/")
    assert f"export OPENAI_BASE_URL=http://127.0.0.1:{served.port}/v1\n" in by_url.stdout
    codex = served.run("env", "codex")
    assert codex.stderr.startswith("warning: codex sends about ")
    assert set((served.home / "clients").rglob("*")) == before


def test_z14_the_key_of_the_service_is_passed_on(shell: Shell) -> None:
    assert shell.up("--set", "server.api_keys=[sesame]").returncode == 0
    found = json.loads(shell.run("env", "aider", "--json").stdout)
    assert found["variables"]["AIDER_OPENAI_API_KEY"] == "sesame"


@pytest.mark.mlx
def test_z14_a_key_of_which_only_the_digest_is_known_is_asked_for(shell: Shell) -> None:
    del shell.env["MLX_STACK_WORKER"]
    digest = hashlib.sha256(b"sesame").hexdigest()
    assert shell.up("--set", f"server.api_keys=['sha256:{digest}']").returncode == 0
    locked = shell.run("env", "aider")
    assert (locked.returncode, locked.stdout) == (1, "")
    assert "this command sends the key that MLX_STACK_API_KEY holds" in locked.stderr
    opened = shell.run("env", "aider", MLX_STACK_API_KEY="sesame")
    assert "export AIDER_OPENAI_API_KEY=sesame\n" in opened.stdout


def test_z14_run_starts_the_client_so(served: Shell) -> None:
    path = program(served.folder, "claude")
    done = served.run(
        "run",
        "claude",
        "--anyway",
        "--",
        "-p",
        "say it",
        "--url",
        PATH := "x",
        PATH=path,
        ANTHROPIC_API_KEY="k",
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    settings = json.loads(Path(seen["args"][1]).read_text())
    assert settings["env"]["ANTHROPIC_BASE_URL"] == f"http://127.0.0.1:{served.port}"
    assert settings["permissions"]["deny"] == ["WebSearch"]
    assert seen["args"] == ["--settings", seen["args"][1], "-p", "say it", "--url", PATH]
    assert "claude mcp add" in done.stderr
    assert seen["env"]["ANTHROPIC_MODEL"] == "tiny"
    assert "ANTHROPIC_API_KEY" not in seen["env"]


@pytest.mark.parametrize(
    ("known", "expected"), [("", "127.0.0.1"), ("a.example", "a.example,127.0.0.1")]
)
def test_clients_reach_the_service_past_a_proxy(served: Shell, known: str, expected: str) -> None:
    path = program(served.folder, "qwen")
    proxy = {"PATH": path, "HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": known, "no_proxy": ""}
    seen = json.loads(served.run("run", "qwen", "--anyway", **proxy).stdout)
    assert (seen["env"]["NO_PROXY"], seen["env"]["no_proxy"]) == (expected, expected)


def test_z14_run_writes_into_a_folder_of_ours_only(served: Shell) -> None:
    users = served.folder / "user"
    users.mkdir()
    path = program(served.folder, "codex")
    done = served.run("run", "codex", "--anyway", "exec", "hello", PATH=path, HOME=str(users))
    seen = json.loads(done.stdout)
    assert seen["args"] == ["exec", "hello"]
    config = Path(seen["env"]["CODEX_HOME"]) / "config.toml"
    assert config.is_relative_to(served.home)
    assert config.stat().st_mode & 0o777 == 0o600
    assert list(users.iterdir()) == []


@pytest.mark.parametrize(
    ("typed", "args"), [((), ["chat"]), (("agent", "exec"), ["agent", "exec"])]
)
def test_a_client_gets_default_arguments_where_its_user_names_none(
    served: Shell, typed: tuple[str, ...], args: list[str]
) -> None:
    path = program(served.folder, "openclaw")
    done = served.run("run", "openclaw", "--anyway", "--", *typed, PATH=path)
    assert json.loads(done.stdout)["args"] == args


def test_a_client_whose_prompts_do_not_fit_is_not_started(served: Shell) -> None:
    path = program(served.folder, "opencode")
    done = served.run("run", "opencode", PATH=path)
    assert (done.returncode, done.stdout) == (5, "")
    assert "a slot of tiny holds 1,024: it cannot work there; `mlx-stack plan` names" in done.stderr
    assert "`--anyway` starts it all the same" in done.stderr
    served.env["PATH"] = path
    terminal = Terminal(served, "run", "opencode")
    terminal.until("Start it all the same? [y/N]")
    terminal.type("y")
    terminal.until("OPENCODE_CONFIG_CONTENT")
    assert terminal.process.wait(PATIENCE_S) == 0


def test_z14_run_openai_starts_any_program(served: Shell) -> None:
    done = served.run("run", "openai", "--", "sh", "-c", "echo $OPENAI_MODEL; exit 9")
    assert (done.returncode, done.stdout) == (9, "tiny\n")
    assert served.run("run", "openai").returncode == 2


def test_z14_what_cannot_be_is_said(shell: Shell, served: Shell) -> None:
    nobody = shell.run("env", "claude")
    assert nobody.returncode == 3
    assert "no service is running" in nobody.stderr
    typo = shell.run("env", "cloude")
    assert typo.returncode == 2
    assert "did you mean `claude`?" in typo.stderr
    missing = served.run("run", "aider", "--anyway", PATH="/nowhere")
    assert missing.returncode == 1
    assert "there is no program `aider`" in missing.stderr
