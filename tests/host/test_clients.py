"""Z14: what clients are told, read back by the readers of their formats."""

import json
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace

from mlxstack.host.coding_clients import CLIENTS, ClientSetup, Endpoint, as_shell, too_small

SERVICE = Endpoint("http://127.0.0.1:7109", 'org/a "model\'s" name', 65536, "secret $HOME 'key'")
SMALL = Endpoint("http://127.0.0.1:7109", "demo", 4096)


def setup(client: str, folder: Path, service: Endpoint = SERVICE) -> ClientSetup:
    return CLIENTS[client](service, folder)


def test_z14_claude_knows_the_context_and_forgets_the_users_own_key(tmp_path: Path) -> None:
    told = setup("claude", tmp_path)
    assert told.variables["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:7109"
    assert told.variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "65536"
    assert told.variables["CLAUDE_STREAM_IDLE_TIMEOUT_MS"] == "3600000", "pings are no content"
    assert told.variables["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == SERVICE.model
    assert "ANTHROPIC_API_KEY" in told.unset
    assert told.caution is None
    settings = json.loads(told.files[told.options[1]])
    assert settings["env"] == told.variables | dict.fromkeys(told.unset, "")
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


def test_z14_opencode_gets_a_provider_with_limits_and_no_file(tmp_path: Path) -> None:
    told = setup("opencode", tmp_path)
    config = json.loads(told.variables["OPENCODE_CONFIG_CONTENT"])
    name, _, model = config["model"].partition("/")
    limit = config["provider"][name]["models"][model]["limit"]
    assert limit == {"context": 65536, "output": 16384}
    assert config["provider"][name]["options"]["apiKey"] == SERVICE.api_key
    assert not told.files


def test_z14_aider_knows_the_sizes_of_the_model(tmp_path: Path) -> None:
    told = setup("aider", tmp_path)
    about = json.loads(told.files[told.variables["AIDER_MODEL_METADATA_FILE"]])
    assert about[told.variables["AIDER_MODEL"]]["max_input_tokens"] == 65536
    assert told.variables["AIDER_OPENAI_API_BASE"] == "http://127.0.0.1:7109/v1"


def test_hermes_gets_a_managed_scope_beside_the_users_settings(tmp_path: Path) -> None:
    told = setup("hermes", tmp_path)
    folder = Path(told.variables["HERMES_MANAGED_DIR"])
    model = yaml.safe_load(told.files[str(folder / "config.yaml")])["model"]
    assert (model["default"], model["context_length"]) == (SERVICE.model, 65536)
    assert (model["base_url"], model["api_key"]) == ("http://127.0.0.1:7109/v1", SERVICE.api_key)


def test_hermes_is_refused_where_it_refuses_the_context() -> None:
    assert too_small("hermes", SERVICE) is None
    assert "less than 64,000" in str(too_small("hermes", replace(SERVICE, n_ctx=32768)))
    assert "refuses a context" in str(too_small("hermes", SMALL))
    assert "sends about 32,000" in str(too_small("openclaw", replace(SERVICE, n_ctx=32768)))


def test_openclaw_gets_config_and_state_in_our_folder(tmp_path: Path) -> None:
    told = setup("openclaw", tmp_path)
    assert all(Path(path).is_relative_to(tmp_path) for path in told.variables.values())
    settings = json.loads(told.files[told.variables["OPENCLAW_CONFIG_PATH"]])
    name, _, model_id = settings["agents"]["defaults"]["model"]["primary"].partition("/")
    provider = settings["models"]["providers"][name]
    assert provider["apiKey"] == SERVICE.api_key
    assert [(m["id"], m["contextWindow"]) for m in provider["models"]] == [(model_id, 65536)]
    assert told.default_arguments == ("chat",)


@pytest.mark.parametrize("accepts_images", [True, False])
def test_clients_know_whether_the_model_takes_images(tmp_path: Path, accepts_images: bool) -> None:
    service = Endpoint("http://127.0.0.1:7109", "local", 65536, accepts_images=accepts_images)
    kinds = ["text", "image"] if accepts_images else ["text"]
    told = setup("opencode", tmp_path, service)
    config = json.loads(told.variables["OPENCODE_CONFIG_CONTENT"])
    model = config["provider"]["mlx-stack"]["models"]["local"]
    assert (model["attachment"], model["modalities"]["input"]) == (accepts_images, kinds)
    told = setup("pi", tmp_path, service)
    (model,) = json.loads(told.files[str(tmp_path / "models.json")])["providers"]["mlx-stack"][
        "models"
    ]
    assert model["input"] == kinds
    told = setup("aider", tmp_path, service)
    about = json.loads(told.files[told.variables["AIDER_MODEL_METADATA_FILE"]])
    assert about["openai/local"]["supports_vision"] is accepts_images
    told = setup("qwen", tmp_path, service)
    settings = json.loads(told.files[told.variables["QWEN_CODE_SYSTEM_SETTINGS_PATH"]])
    assert settings["model"]["generationConfig"] == {
        "contextWindowSize": 65536,
        "modalities": {"image": accepts_images},
    }
    limits = ("QWEN_CODE_API_TIMEOUT_MS", "QWEN_STREAM_IDLE_TIMEOUT_MS")
    assert [told.variables[limit] for limit in limits] == ["0", "0"]


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
