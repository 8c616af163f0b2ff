"""Configs of the pages on editors and Open WebUI, read as the editor reads them, and used."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from tests.api.running import Running
from tests.clients.agents import (
    DONE,
    N_CTX,
    SCRIPT,
    TASK,
    environment,
    generations,
    installed,
    n_cached,
    n_prompt,
    observed,
    offered,
    project,
)
from tests.clients.stage import playing, run

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.slow]

DOCS = Path(__file__).parents[2] / "docs" / "clients"
ADDRESS = "http://127.0.0.1:7109"
MODEL = "qwen3.6-35b-a3b"

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}, "description": {"type": "string"}},
        },
    },
}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with playing(tmp_path_factory.mktemp("editors"), SCRIPT, N_CTX) as stage:
        yield stage


def section(page: str, title: str) -> str:
    text = (DOCS / page).read_text(encoding="utf-8")
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


def block(page: str, title: str, language: str) -> str:
    (code,) = re.findall(rf"```{language}\n(.*?)```", section(page, title), re.DOTALL)
    return str(code)


def here(url: str, live: Running) -> str:
    """The URL of the page, with the address of the service of this test."""
    assert url.startswith(ADDRESS)
    return url.replace(ADDRESS, live.url)


def stream_with_tools(base_url: str, key: str, model: str, max_tokens: int) -> str:
    """The request of an editor's agent: streamed, with tools, usage at the end."""
    client = openai.OpenAI(base_url=base_url, api_key=key)
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "system", "content": "You are an editor."},
                  {"role": "user", "content": TASK.format("opencode")}],
        tools=[TOOL],
        max_tokens=max_tokens,
        stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert chunks[-1].usage is not None
    calls = [c.delta.tool_calls for chunk in chunks for c in chunk.choices if c.delta.tool_calls]
    return "".join(
        delta.function.arguments or "" for call in calls for delta in call if delta.function
    )


def test_cline_finds_the_service_with_the_fields_of_the_page(live: Running) -> None:
    text = section("editors.md", "Cline")
    fields = dict(re.findall(r"^\| ([^|]+?) \| `?([^|`]+?)`? \|$", text, re.MULTILINE))
    url = here(fields["Base URL"], live)
    assert "MARKER" in stream_with_tools(url, fields["API Key"], fields["Model ID"], 4096)
    assert int(fields["Context Window Size"]) == 65536


def test_zed_finds_the_service_with_the_settings_of_the_page(live: Running) -> None:
    settings = json.loads(block("editors.md", "Zed", "json"))
    (provider,) = settings["language_models"]["openai_compatible"].values()
    (model,) = provider["available_models"]
    assert model["max_tokens"] > model["max_output_tokens"]
    url = here(provider["api_url"], live)
    assert "MARKER" in stream_with_tools(url, "k", model["name"], model["max_output_tokens"])


def test_xcode_finds_the_service_with_the_port_of_the_page(live: Running) -> None:
    (port,) = re.findall(r"\| Port \| `(\d+)`", section("editors.md", "Xcode"))
    url = here(f"http://127.0.0.1:{port}", live)
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    assert "MARKER" in stream_with_tools(f"{url}/v1", "k", model, 4096)


def test_crush_finds_the_service_with_the_lines_of_the_page(live: Running) -> None:
    lines = block("crush-and-goose.md", "Crush", "bash").splitlines()
    provider, model, *choices = (shlex.split(line) for line in lines)
    url = here(provider[provider.index("--base-url") + 1], live)
    key = provider[provider.index("--api-key") + 1]
    name, _, model_id = model[2].partition("/")
    assert name == provider[2]
    assert choices == [["model", size, model[2]] for size in ("large", "small")]
    max_tokens = int(model[model.index("--default-max-tokens") + 1])
    assert "MARKER" in stream_with_tools(url, key, model_id, max_tokens)


def test_goose_finds_the_service_with_the_variables_of_the_page(live: Running) -> None:
    lines = block("crush-and-goose.md", "goose", "bash").splitlines()
    assignments = (line.removeprefix("export ").partition("=") for line in lines if "=" in line)
    variables = {name: word for name, _, word in assignments}
    base, path = f"{variables['OPENAI_HOST']}/{variables['OPENAI_BASE_PATH']}".split("/v1/")
    assert path == "chat/completions"
    key, model = variables["OPENAI_API_KEY"], variables["GOOSE_MODEL"]
    assert "MARKER" in stream_with_tools(f"{here(base, live)}/v1", key, model, 4096)


def test_openclaw_finds_the_service_with_the_provider_of_the_page(live: Running) -> None:
    page = (DOCS / "hermes-and-openclaw.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    settings = json.loads(text)
    ((name, provider),) = settings["models"]["providers"].items()
    (model,) = provider["models"]
    assert settings["agents"]["defaults"]["model"]["primary"] == f"{name}/{model['id']}"
    url = here(provider["baseUrl"], live)
    assert "MARKER" in stream_with_tools(url, provider["apiKey"], model["id"], model["maxTokens"])


def test_vs_code_finds_the_service_with_the_models_of_the_page(live: Running) -> None:
    (provider,) = json.loads(block("editors.md", "VS Code", "json"))
    (model,) = provider["models"]
    assert provider["vendor"] == "customendpoint"
    assert model["maxInputTokens"] + model["maxOutputTokens"] == 65536
    base, path = here(model["url"], live).split("/v1/")
    assert path == "chat/completions"
    arguments = stream_with_tools(f"{base}/v1", provider["apiKey"], model["id"], 4096)
    assert "MARKER" in arguments


def test_continue_finds_the_service_with_the_config_of_the_page(live: Running) -> None:
    (model,) = yaml.safe_load(block("editors.md", "Continue", "yaml"))["models"]
    options = model["defaultCompletionOptions"]
    assert options["contextLength"] > options["maxTokens"]
    url = here(model["apiBase"], live)
    arguments = stream_with_tools(url, model["apiKey"], model["model"], options["maxTokens"])
    assert "MARKER" in arguments


@pytest.mark.client
def test_continue_itself_runs_a_tool_with_the_config_of_the_page(
    live: Running, tmp_path: Path
) -> None:
    program = installed("cn")
    config = tmp_path / "config.yaml"
    with observed(live) as relay:
        config.write_text(block("editors.md", "Continue", "yaml").replace(ADDRESS, relay.url))
        argv = [program, "--config", str(config), "--auto", "-p", TASK.format("continue")]
        assert DONE in run(argv, project(tmp_path), **environment(tmp_path))
    call, result = generations(relay.exchanges)
    assert {"Bash", "MultiEdit", "Read", "Write"} <= offered(call).keys()
    assert n_cached(result) >= 0.99 * n_prompt(call)


def test_open_webui_reaches_the_service_under_the_name_of_docker(live: Running) -> None:
    page = (DOCS / "open-webui.md").read_text(encoding="utf-8")
    command = shlex.split(re.findall(r"```bash\n(.*?)```", page, re.DOTALL)[0].replace("\\\n", ""))
    variables = dict(
        word.split("=", 1) for word in command if word.startswith(("OPENAI", "ENABLE"))
    )
    name, path = re.findall(r"http://([\w.]+):7109(/v1)", variables["OPENAI_API_BASE_URL"])[0]
    host = {"host": f"{name}:{live.url.rpartition(':')[2]}"}
    key = {"authorization": f"Bearer {variables['OPENAI_API_KEY']}"}
    models = httpx.get(f"{live.url}{path}/models", headers=host | key)
    model = models.json()["data"][0]["id"]
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": "MARKER_42"}]}
    answer = httpx.post(f"{live.url}{path}/chat/completions", headers=host | key, json=body)
    assert answer.status_code == 200 and answer.text.rstrip().endswith("[DONE]")
    page_of_docker = host | {"origin": f"http://{name}:3000"}
    assert httpx.get(f"{live.url}{path}/models", headers=page_of_docker).status_code == 403


@pytest.mark.parametrize(
    "page", ["crush-and-goose.md", "editors.md", "hermes-and-openclaw.md", "open-webui.md"]
)
def test_a_page_names_one_address(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert set(re.findall(r"http://[\w.]+:7109", text)) <= {
        ADDRESS,
        "http://host.docker.internal:7109",
    }
