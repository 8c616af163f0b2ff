"""`mlx-stack template`: what was found, prompts and messages, from tokenizer files alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mlxstack.cli.main import app
from mlxstack.core.errors import SetupError
from mlxstack.core.preset import KVSpec, ModelSpec
from mlxstack.demo import MODEL_DIR
from mlxstack.engine.loading.loader import load
from mlxstack.engine.loading.tokenizer_folder import load_tokenizer

USER = {"role": "user", "content": "Say 1."}
TOOL = {
    "type": "function",
    "function": {
        "name": "act",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The demo's model without its weights."""
    made = tmp_path / "model"
    made.mkdir()
    for file in MODEL_DIR.iterdir():
        if file.suffix in {".json", ".jinja"} and "safetensors" not in file.name:
            shutil.copy(file, made)
    return made


def run(*args: str, text: str | None = None) -> str:
    result = CliRunner().invoke(app, ["template", *args], input=text)
    assert result.exit_code == 0, result.output
    return result.stdout


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_the_report_says_format_switches_losses_and_reuse(folder: Path) -> None:
    found = json.loads(run(str(folder), "--json"))
    assert found["format"]["calls"][0].startswith("<tool_call>")
    assert found["thinking_off"] == {"enable_thinking": False}
    assert found["lost"] == []
    assert found["reuse"]["tool loop"] > 0.99
    shown = run(str(folder))
    assert "refused or lost" in shown
    assert "reuse, tool loop" in shown


def test_bodies_become_the_prompts_of_the_service(folder: Path, tmp_path: Path) -> None:
    bodies = [
        {"messages": [USER], "tools": [TOOL]},
        {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": []},
        {"messages": 1},
    ]
    file = tmp_path / "bodies.jsonl"
    file.write_text("\n".join(map(json.dumps, bodies)) + "\nno JSON\n")
    with_tools, silent, empty, wrong, broken = lines(run(str(folder), "--render", str(file)))
    assert '"act"' in with_tools["prompt"]
    assert with_tools["prompt"].count("Say 1.") == 1
    assert len(with_tools["tokens"]) > len(silent["tokens"]) > 0
    assert "messages is empty" in empty["error"]
    assert "invalid line" in wrong["error"]
    assert "invalid line" in broken["error"]


def test_raw_answers_become_messages(folder: Path) -> None:
    body = {"messages": [USER], "tools": [TOOL]}
    raw = 'Hm.\n</think>\n\nI act.\n<tool_call>\n{"name": "act", "arguments": {"key": "5"}}\n'
    given = [
        {"body": body, "raw": raw + "</tool_call>"},
        {"body": {**body, "tool_choice": "none"}, "raw": raw + "</tool_call>"},
        {"body": body, "raw": raw.replace("{", "") + "</tool_call>"},
    ]
    text = "\n".join(map(json.dumps, given))
    called, silent, broken = lines(run(str(folder), "--parse", "-", text=text))
    assert called["reasoning_content"] == "Hm."
    assert called["content"] == "I act."
    function = called["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("act", {"key": "5"})
    assert called["n_unparsed"] == 0
    assert silent["tool_calls"] == []
    assert broken["n_unparsed"] == 1


def test_a_folder_without_a_tokenizer_is_said(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["template", str(tmp_path)])
    assert result.exit_code != 0
    assert "holds no tokenizer.json" in str(result.exception)


@pytest.mark.parametrize("names", ["one", "list"])
def test_a_template_that_only_the_processor_has_is_taken(tmp_path: Path, names: str) -> None:
    folder = shutil.copytree(MODEL_DIR, tmp_path / "model")
    text = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    template = text if names == "one" else [{"name": "default", "template": text}]
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert load_tokenizer(folder).has_chat_template
    told, usual = (json.loads(run(str(one), "--json")) for one in (folder, MODEL_DIR))
    assert told == usual


def test_why_a_tokenizer_does_not_load_is_one_line(tmp_path: Path) -> None:
    folder = shutil.copytree(MODEL_DIR, tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    spec = ModelSpec(id=str(folder))
    with pytest.raises(SetupError) as refused:
        load_tokenizer(folder)
    with pytest.raises(SetupError) as unserved:
        load(spec, KVSpec())
    for one in (refused, unserved):
        assert "\n" not in one.value.message and "holds no tokenizer.json" in one.value.message
