"""The real Codex against a service whose engine is scripted; only where somebody installed it."""

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct, structs

from mlxstack.core.preset import ServerSpec, SlotSpec
from mlxstack.core.request import Request
from tests.api.running import serving, standing
from tests.clients.agents import CODEX_CONFIG
from tests.patience import PATIENCE_S
from tests.service.standin import FACTS

BINARY = os.environ.get("MLX_STACK_CODEX", "")

pytestmark = [
    pytest.mark.net,
    pytest.mark.slow,
    pytest.mark.skipif(not BINARY, reason="MLX_STACK_CODEX names no binary of the Codex CLI"),
]


class Run(Struct):
    """What Codex printed, and the prompts that the engine was asked."""

    events: list[dict[str, Any]]
    prompts: list[str]

    def items(self, kind: str) -> list[dict[str, Any]]:
        """The completed items of one type."""
        done = [e["item"] for e in self.events if e["type"] == "item.completed"]
        return [item for item in done if item["type"] == kind]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def codex(folder: Path, n_ctx: int, *answers: str) -> Run:
    """One headless run in which the model says these answers in turn."""
    service, engine = standing(ServerSpec(port=0))
    service.preset = structs.replace(service.preset, slots=SlotSpec(n_ctx=n_ctx))
    engine.loading.set_result(FACTS)
    submit = engine.submit

    def next_answer(ask: Request) -> None:
        said = answers[min(len(engine.asked), len(answers) - 1)]
        engine.script = engine.tokenizer.encode(f"</think>\n{said}", add_special_tokens=False)
        submit(ask)

    engine.submit = next_answer  # type: ignore[method-assign]
    (folder / "work").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener, serving(service, listener) as live:
        (folder / "config.toml").write_text(CODEX_CONFIG.format(url=live.url))
        done = subprocess.run(
            [
                BINARY, "exec", "--json", "--skip-git-repo-check",
                "--dangerously-bypass-approvals-and-sandbox", "run the marker command",
            ],
            cwd=folder / "work",
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(folder),
                "CODEX_HOME": str(folder),
                "LOCAL_KEY": "x",
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    prompts = [engine.tokenizer.decode(list(ask.tokens)) for ask in engine.asked]
    return Run([json.loads(line) for line in lines], prompts)


def test_the_tool_loop_and_a_namespace_call(tmp_path: Path) -> None:
    answers = (
        call("exec_command", cmd="echo MARKER_$((40+2))"),
        call("close_agent", target="nobody"),
        "All done.",
    )
    run = codex(tmp_path, 131072, *answers)
    (command,) = run.items("command_execution")
    assert "MARKER_42" in command["aggregated_output"]
    assert len(run.prompts) == 3
    assert "MARKER_42" in run.prompts[1]
    assert "invalid agent id nobody" in run.prompts[2], "it was dispatched"
    assert "unsupported call" not in run.prompts[2]
    assert run.items("agent_message")[-1]["text"] == "All done."
    assert run.events[-1]["type"] == "turn.completed"


def test_a_full_context_is_final(tmp_path: Path) -> None:
    run = codex(tmp_path, 4096, "never said")
    assert run.prompts == []
    assert run.events[-1]["type"] == "turn.failed"
    assert "ran out of room" in run.events[-1]["error"]["message"]
