"""`install` and `uninstall`: the unit file in its place, the system's supervisor told."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from tests import models, systemd
from tests.cli.terminal import Shell
from tests.ports import unused_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="drives systemctl")


def systemctl(shell: Shell, code: int = 0) -> str:
    """A PATH on which `systemctl` writes down how it was called, and ends with `code`."""
    file = shell.folder / "bin" / "systemctl"
    file.parent.mkdir(exist_ok=True)
    file.write_text(
        f'#!/bin/sh\necho "$@" >> {shell.folder}/calls\necho "no bus" >&2\nexit {code}\n'
    )
    file.chmod(0o755)
    return f"{file.parent}:/usr/bin:/bin"


def calls(shell: Shell) -> list[str]:
    return (shell.folder / "calls").read_text().splitlines()


def unit_of(shell: Shell) -> Path:
    return shell.folder / "config" / "systemd" / "user" / "mlx-stack-tiny.service"


def test_print_shows_and_makes_nothing(shell: Shell) -> None:
    done = shell.run("install", str(shell.preset), "--print", "--set", "slots.count=2")
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("ExecStart="))
    assert f'"up" "{shell.preset}" "--set" "slots.count=2" "--foreground"' in line
    assert f'Environment="MLX_STACK_HOME={shell.home}"' in done.stdout
    assert "loginctl enable-linger" in done.stderr and "journalctl --user" in done.stderr
    by_name = shell.run("install", "tiny.yaml", "--print", "--set", "slots.count=2")
    assert by_name.stdout == done.stdout
    assert not shell.home.exists()
    as_json = json.loads(shell.run("install", str(shell.preset), "--print", "--json").stdout)
    assert as_json["path"].endswith("mlx-stack-tiny.service")


def test_install_again_and_uninstall(shell: Shell) -> None:
    env = {"PATH": systemctl(shell), "XDG_CONFIG_HOME": str(shell.folder / "config")}
    done = shell.run("install", str(shell.preset), **env)
    assert done.returncode == 0, done.stderr
    name = "mlx-stack-tiny.service"
    fresh = ["--user daemon-reload", f"--user enable {name}", f"--user restart {name}"]
    assert calls(shell) == fresh
    assert "enable-linger" in done.stderr
    text = unit_of(shell).read_text()
    assert (shell.home / "logs").is_dir()
    assert shell.run("install", str(shell.preset), **env).returncode == 0
    assert calls(shell) == [*fresh, f"--user disable --now {name}", *fresh]
    assert unit_of(shell).read_text() == text
    assert shell.run("uninstall", str(shell.preset), **env).returncode == 0
    assert calls(shell)[-1] == f"--user disable --now {name}"
    assert not unit_of(shell).exists()
    again = shell.run("uninstall", str(shell.preset), **env)
    assert again.returncode == 1
    assert "is not installed" in again.stderr


def test_a_supervisor_that_refuses_is_quoted(shell: Shell) -> None:
    env = {"PATH": systemctl(shell, code=1), "XDG_CONFIG_HOME": str(shell.folder / "config")}
    done = shell.run("install", str(shell.preset), **env)
    assert done.returncode == 1
    assert "`systemctl --user daemon-reload`: no bus" in done.stderr
    assert unit_of(shell).exists()


def test_what_up_refuses_is_not_installed(shell: Shell) -> None:
    env = {"PATH": systemctl(shell), "XDG_CONFIG_HOME": str(shell.folder / "config")}
    args = ("install", str(shell.preset))
    assert shell.up().returncode == 0
    running = shell.run(*args, **env)
    assert running.returncode == 4 and "`mlx-stack down tiny` stops it" in running.stderr
    taken = shell.run(*args, "--name", "other", **env)
    assert taken.returncode == 4 and f"port {shell.port} is taken" in taken.stderr
    assert "choose another port with --port" in taken.stderr
    large = shell.run(
        *args, "--set", "name=other", "--set", "server.port=0", **env, MLX_STACK_MEMORY="1MB"
    )
    assert large.returncode == 5 and "MLX_STACK_MEMORY" in large.stderr, large.stderr
    gone = shell.run(*args, "--set", "name=other", "--set", "model.id=/nowhere/x", **env)
    assert gone.returncode == 5 and "there is no folder /nowhere/x" in gone.stderr
    assert not (shell.folder / "config").exists() and not (shell.folder / "calls").exists()


def test_a_unit_keeps_the_environment_that_the_preset_was_read_with(shell: Shell) -> None:
    env = {"PATH": systemctl(shell), "XDG_CONFIG_HOME": str(shell.folder / "config")}
    kept = {
        "MLX_STACK_SLOTS_COUNT": "2",
        "MLX_STACK_PEER_KEY": "secret-peer",
        "HF_TOKEN": "hf_secret",
        "HF_ENDPOINT": "https://hub.example",
    }
    shown = shell.run("install", str(shell.preset), "--print", **kept)
    assert 'Environment="MLX_STACK_SLOTS_COUNT=2"' in shown.stdout
    assert "secret" not in shown.stdout
    assert shown.stderr.startswith(
        "without HF_TOKEN, MLX_STACK_PEER_KEY, which only the installed file holds\n"
    )
    assert shell.run("install", str(shell.preset), **env, **kept).returncode == 0
    lines = unit_of(shell).read_text().splitlines()
    assert {f'Environment="{name}={value}"' for name, value in kept.items()} <= set(lines)
    assert f"WorkingDirectory={shell.folder}" in lines
    assert unit_of(shell).stat().st_mode & 0o777 == 0o600


def test_a_preset_that_is_wrong_is_not_installed(shell: Shell) -> None:
    config = shell.folder / "config"
    done = shell.run("install", "nonsense", XDG_CONFIG_HOME=str(config))
    assert done.returncode == 5
    assert not config.exists()


def test_a_service_of_another_name_than_its_preset_is_uninstalled(shell: Shell) -> None:
    env = {"PATH": systemctl(shell), "XDG_CONFIG_HOME": str(shell.folder / "config")}
    night = unit_of(shell).with_name("mlx-stack-night.service")
    done = shell.run("install", str(shell.preset), "--set", "name=night", **env)
    assert night.exists() and "mlx-stack uninstall night" in done.stdout
    wrong = shell.run("uninstall", str(shell.preset), **env)
    assert wrong.returncode == 1
    assert wrong.stderr.endswith("; installed: mlx-stack-night.service\n")
    assert shell.run("uninstall", "night", **env).returncode == 0
    assert not night.exists()


@pytest.mark.parametrize("by", ["tiny", "tiny.yaml"])
def test_a_service_is_uninstalled_though_its_preset_is_gone(shell: Shell, by: str) -> None:
    env = {"PATH": systemctl(shell), "XDG_CONFIG_HOME": str(shell.folder / "config")}
    assert shell.run("install", str(shell.preset), **env).returncode == 0
    shell.preset.unlink()
    done = shell.run("uninstall", by, **env)
    assert done.returncode == 0, done.stderr
    assert not unit_of(shell).exists()


def test_a_unit_finds_models_and_the_network_as_the_shell_does(shell: Shell) -> None:
    kept = {
        "XDG_CACHE_HOME": str(shell.folder / "cache"),
        "HF_HUB_CACHE": str(shell.folder / "hub"),
        "https_proxy": "http://proxy.example:3128",
        "NO_PROXY": "localhost",
        "SSL_CERT_FILE": "/etc/ssl/own.pem",
    }
    relative = {"HF_HOME": "models", "XDG_DATA_HOME": "", "HOME": "."}
    secret = {"ALL_PROXY": "http://me:secret@proxy.example:3128"}
    done = shell.run("install", str(shell.preset), "--print", **kept, **relative, **secret)
    lines = done.stdout.splitlines()
    assert {f'Environment="{name}={value}"' for name, value in kept.items()} <= set(lines)
    assert f'Environment="HF_HOME={shell.folder / "models"}"' in lines
    assert f'Environment="HOME={shell.folder}"' in lines
    assert "XDG_DATA_HOME" not in done.stdout
    assert "secret" not in done.stdout
    assert "ALL_PROXY" in done.stderr
    env = {"PATH": systemctl(shell), "XDG_CONFIG_HOME": str(shell.folder / "config")}
    assert shell.run("install", str(shell.preset), **env, **secret).returncode == 0
    assert f'Environment="ALL_PROXY={secret["ALL_PROXY"]}"' in unit_of(shell).read_text()


def arguments_of(shell: Shell, *args: str) -> list[str]:
    """Arguments that a unit gives to `up`, as systemd would read them."""
    done = shell.run("install", *args, "--print")
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("ExecStart="))
    arguments = shlex.split(line.removeprefix("ExecStart="))
    assert arguments[1:4] == ["-m", "mlxstack.cli.main", "up"]
    return arguments[4:]


def test_each_option_of_up_reaches_up(shell: Shell) -> None:
    options = (
        *("--ctx", "512", "--slots", "2", "--kv-bits", "8", "--draft", "./draft"),
        *("--name", "night", "--host", "127.0.0.1", "--port", str(shell.port)),
        *("--set", "slots.count=2", "--set", "queue.timeout_s=5"),
    )
    absolute = [str(shell.folder / "draft") if word == "./draft" else word for word in options]
    assert arguments_of(shell, "tiny.yaml", *options) == [
        str(shell.preset), *absolute, "--foreground",
    ]  # fmt: skip
    up, install = (
        {
            line.split()[0]
            for line in shell.run(verb, "--help").stdout.splitlines()
            if line.startswith("  --")
        }
        for verb in ("up", "install")
    )
    assert up - install == {"--foreground", "--dry-run", "--if-needed"}


@pytest.mark.mlx
def test_a_model_folder_is_installed_with_options_and_removed_by_its_folder(shell: Shell) -> None:
    folder = models.build(shell.folder / "small-model", "tiny")
    arguments = arguments_of(shell, "small-model", "--ctx", "256")
    assert arguments == [str(folder), "--ctx", "256", "--foreground"]
    env = {"PATH": systemctl(shell), "XDG_CONFIG_HOME": str(shell.folder / "config")}
    args = ("small-model", "--ctx", "256", "--port", str(shell.port))
    done = shell.run("install", *args, **env)
    assert done.returncode == 0, done.stderr
    unit = unit_of(shell).with_name("mlx-stack-small-model.service")
    assert unit.exists()
    assert shell.run("uninstall", "./small-model", **env).returncode == 0
    assert not unit.exists()


def test_several_models_are_installed_as_a_gateway(shell: Shell) -> None:
    env = {"PATH": systemctl(shell), "XDG_CONFIG_HOME": str(shell.folder / "config")}
    args = ("install", "tiny.yaml", "demo-embedding", "--name", "front")
    done = shell.run(*args, **env)
    assert done.returncode == 0, done.stderr
    unit = unit_of(shell).with_name("mlx-stack-front.service")
    text = unit.read_text()
    models = f'"up" "{shell.preset}" "demo-embedding" "--name" "front" "--foreground"'
    assert models in text
    # The drain of the gateway, then that of its members.
    assert int(text.partition("TimeoutStopSec=")[2].split()[0]) > 10
    systemd.verify(unit)
    again = shell.run(*args, **env)
    assert again.returncode == 0, again.stderr
    assert "--user disable --now mlx-stack-front.service" in calls(shell)
    assert shell.run("uninstall", "front", **env).returncode == 0
    assert not unit.exists()


def test_a_gateway_that_up_refuses_is_not_installed(shell: Shell) -> None:
    env = {"PATH": systemctl(shell), "XDG_CONFIG_HOME": str(shell.folder / "config")}
    assert shell.up().returncode == 0
    running = shell.run("install", "tiny.yaml", "demo-embedding", **env)
    assert running.returncode == 4 and "`mlx-stack down tiny` stops it" in running.stderr
    assert shell.run("down").returncode == 0
    twins = shell.run("install", "tiny.yaml", "demo", "--name", "demo", **env)
    assert twins.returncode == 5 and "are called `demo`" in twins.stderr
    one_model = shell.run("install", "tiny.yaml", "demo", "--ctx", "2k", **env)
    assert one_model.returncode == 2 and "go with one model" in one_model.stderr
    no_mode = shell.run("install", "--mode", "nonsense", **env)
    assert no_mode.returncode == 5 and "no mode is called" in no_mode.stderr
    assert not (shell.folder / "config").exists() and not (shell.folder / "calls").exists()


def test_modes_and_any_model_are_installed(shell: Shell) -> None:
    assert arguments_of(shell, "--mode", "demo-mode") == ["--mode", "demo-mode", "--foreground"]
    port = str(unused_port())
    arguments = arguments_of(shell, "demo", "--any-model", "--port", port)
    assert arguments == ["demo", "--any-model", "--port", port, "--foreground"]


def test_the_path_of_a_unit_names_each_folder_once(shell: Shell) -> None:
    path = f"/usr/bin:/bin::.:/usr/bin:{shell.folder}/gone:/bin"
    shown = shell.run("install", "tiny.yaml", "--print", PATH=path)
    assert 'Environment="PATH=/usr/bin:/bin"' in shown.stdout.splitlines()
