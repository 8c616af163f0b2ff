"""Reasoning models do not resend their thoughts: what stood before them is reused (C16)."""

from pathlib import Path

import httpx
import pytest

from mlxstack.core.preset import ModelSpec
from tests import models
from tests.api.running import running, tiny_preset
from tests.patience import PATIENCE_S

RULES = {"role": "system", "content": "You think before you answer. " * 12}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}, "temperature": 0}


@pytest.mark.parametrize("config", [models.LLAMA, models.SLIDING, models.HYBRID])
def test_c16_the_first_user_turn_is_reused_without_the_thoughts(
    tmp_path: Path, config: dict[str, object]
) -> None:
    folder = models.write(tmp_path / "thinker", {**config, "vocab_size": 1024})
    preset = tiny_preset(tmp_path / "tiny", model=ModelSpec(id=str(folder)))
    asked = [RULES, {"role": "user", "content": "How deep is the lake? " * 10}]
    with running(preset, tmp_path / "home") as live, httpx.Client(base_url=live.url) as http:

        def chat(messages: list[dict[str, str]]) -> dict[str, object]:
            body = {"messages": messages, "max_tokens": 12, "session_id": "a", **THINKING}
            found = http.post(
                "/v1/chat/completions", json=body, timeout=PATIENCE_S
            ).raise_for_status()
            return dict(found.json())

        first = chat(asked)
        assert first["choices"][0]["message"]["reasoning_content"]  # type: ignore[index]
        plain = {"messages": asked, "add_generation_prompt": False}
        text = http.post("/apply-template", json=plain).json()["prompt"]
        expected = {"content": text, "parse_special": True}
        n_asked = len(http.post("/tokenize", json=expected).json()["tokens"])
        answer = {"role": "assistant", "content": "As deep as a house."}
        second = chat([*asked, answer, {"role": "user", "content": "And how wide?"}])
        usage = second["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= n_asked - 1  # type: ignore[index]
