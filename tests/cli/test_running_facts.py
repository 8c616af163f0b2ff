"""`up` and `status` tell why a model is not batched, what its template loses, and MLX's memory."""

import json

import pytest

from tests.cli.terminal import Shell
from tests.matrix.configs import config_of
from tests.models import VOCAB, write

pytestmark = [pytest.mark.mlx, pytest.mark.net]

WITHOUT_TOOLS = """
{%- for m in messages %}{{- m.role + ': ' + m.content + '\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}
"""


def test_a_verdict_against_batching_is_told_by_up_and_status(shell: Shell) -> None:
    """StarCoder's code gives all rows the position of one."""
    write(shell.folder / "model", config_of("gpt_bigcode") | {"vocab_size": VOCAB})
    (shell.folder / "model" / "chat_template.jinja").write_text(WITHOUT_TOOLS)
    shell.preset.write_text(
        f"model: {{id: ./model}}\nslots: {{count: 2, n_ctx: 256}}\n"
        f"server: {{port: {shell.port}, api_keys: [secret-key], drain_s: 1}}\n"
    )
    up = shell.run("up", str(shell.preset), MLX_STACK_WORKER="")
    assert up.returncode == 0, up.stderr
    assert "note: decoding slot by slot: the row view cannot serve it" in up.stderr
    assert "warning: chat template: the template shows no tools" in up.stderr
    seen = shell.services()["tiny"]
    assert seen["state"] == "healthy"
    assert seen["detail"].startswith("decoding slot by slot: the row view cannot serve it")
    assert seen["why_not_batching"].startswith("the row view cannot serve it")
    assert 0 < seen["mlx_active_bytes"] < seen["memory_bytes"]
    table = shell.run("status").stdout
    assert "decoding slot by slot" in table
    assert "MLX" in table
    again = shell.run("restart", "tiny", "--json", MLX_STACK_WORKER="")
    told = json.loads(again.stdout)
    assert told["why_not_batching"].startswith("the row view cannot serve it")
    assert any(one.startswith("the template shows no tools") for one in told["template_notes"])
