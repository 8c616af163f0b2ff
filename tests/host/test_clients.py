"""Z14: what clients are told, read back by the readers of their formats."""

import json
import subprocess
import tomllib
from pathlib import Path

import pytest

from mlxstack.host.coding_clients import CLIENTS, ClientSetup, Endpoint, as_shell

SERVICE = Endpoint("http://127.0.0.1:7109", 'org/a "model\'s" name', 65536, "secret $HOME 'key'")
SMALL = Endpoint("http://127.0.0.1:7109", "demo", 4096)


def setup(client: str, folder: Path, service: Endpoint = SERVICE) -> ClientSetup:
    return CLIENTS[client](service, folder)


def test_z14_claude_knows_the_context_and_forgets_the_users_own_key(tmp_path: Path) -> None:
    told = setup("claude", tmp_path)
    assert told.variables["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:7109"
    assert told.variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "65536"
    assert told.variables["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == SERVICE.model
    assert "ANTHROPIC_API_KEY" in told.unset
    assert told.caution is None
    small = setup("claude", tmp_path, SMALL)
    assert small.variables["ANTHROPIC_AUTH_TOKEN"]
    assert small.caution is not None
    assert "4096" in small.caution


def test_z14_codex_gets_a_provider_of_the_responses_api(tmp_path: Path) -> None:
    told = setup("codex", tmp_path)
    config = tomllib.loads(told.files[str(tmp_path / "config.toml")])
    provider = config["model_providers"][config["model_provider"]]
    assert config["model"] == SERVICE.model
    assert config["model_context_window"] == 65536
    assert provider["base_url"] == "http://127.0.0.1:7109/v1"
    assert provider["wire_api"] == "responses"
    assert told.variables[provider["env_key"]] == SERVICE.api_key
    assert told.variables["CODEX_HOME"] == str(tmp_path)


def test_z14_opencode_gets_a_provider_with_limits_and_no_key_in_the_file(tmp_path: Path) -> None:
    told = setup("opencode", tmp_path)
    text = told.files[told.variables["OPENCODE_CONFIG"]]
    config = json.loads(text)
    name, _, model = config["model"].partition("/")
    limit = config["provider"][name]["models"][model]["limit"]
    assert limit == {"context": 65536, "output": 16384}
    assert "secret" not in text


def test_z14_aider_knows_the_sizes_of_the_model(tmp_path: Path) -> None:
    told = setup("aider", tmp_path)
    about = json.loads(told.files[told.variables["AIDER_MODEL_METADATA_FILE"]])
    assert about[told.variables["AIDER_MODEL"]]["max_input_tokens"] == 65536
    assert told.variables["OPENAI_API_BASE"] == "http://127.0.0.1:7109/v1"


@pytest.mark.parametrize("client", CLIENTS)
def test_z14_a_shell_can_eval_it_whatever_the_names(client: str, tmp_path: Path) -> None:
    told = setup(client, tmp_path / "made by us")
    script = as_shell(told) + "env -0\n"
    env = {"PATH": "/usr/bin:/bin", "ANTHROPIC_API_KEY": "mine"}
    done = subprocess.run(["sh", "-ec", script], env=env, capture_output=True, check=True)
    pairs = [line.partition("=") for line in done.stdout.decode().split("\0") if line]
    seen = {key: value for key, _, value in pairs}
    assert told.variables.items() <= seen.items()
    assert not set(told.unset) & set(seen)
    for path, text in told.files.items():
        assert Path(path).read_text() == text
