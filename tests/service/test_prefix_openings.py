"""First words of cached prefixes: those of an agent, else of their tokens."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs

from mlxstack.core.agent_labels import UNNAMED, prefix_label
from mlxstack.core.preset import PrefixCacheSpec
from mlxstack.core.status import PrefixView
from mlxstack.service.parts.prefix_openings import opening_of
from tests.api.running import Running, running, tiny_preset
from tests.patience import PATIENCE_S

SYSTEM = "You are a careful clerk of the river office. " * 12
OPENING = "You are a careful clerk of the river"


@pytest.mark.parametrize(
    ("text", "opening"),
    [
        (" system\nYou are a clerk.\nBe kind.", "You are a clerk. Be kind."),
        ("developer\n\nYou are a clerk.", "You are a clerk."),
        ("You are a clerk.", "You are a clerk."),
        ("", ""),
    ],
)
def test_opening_of_a_prompt_are_without_its_role(text: str, opening: str) -> None:
    assert opening_of(text) == opening


def test_a_learned_name_is_no_name_for_people() -> None:
    learned = PrefixView("learned-1", "learned-1", opening="You are a clerk.", agents=("ann",))
    assert prefix_label(learned, {}) == "You are a clerk. (ann)"
    assert prefix_label(structs.replace(learned, opening=""), {"ann": "Ann"}) == "prefix of Ann"
    alone = PrefixView("learned-1", "learned-1")
    assert prefix_label(alone, {}) == "learned-1"
    assert prefix_label(PrefixView("k"), {}) == UNNAMED
    assert prefix_label(structs.replace(learned, is_pinned=True), {}) == "learned-1"


def ask(live: Running, text: str) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    body = {"messages": messages, "max_tokens": 4}
    answer = httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    answer.raise_for_status()


def openings(live: Running) -> list[str]:
    found: dict[str, Any] = httpx.get(f"{live.url}/cache", timeout=PATIENCE_S).json()
    assert all(one["head"] == [] for one in found["prefixes"])
    return [one["opening"] for one in found["prefixes"]]


@pytest.mark.mlx
@pytest.mark.net
def test_prefixes_have_openings_after_a_restart(tmp_path: Path) -> None:
    cache = PrefixCacheSpec(block_size=32)
    preset = tiny_preset(tmp_path / "tiny", prefix_cache=cache)
    with running(preset, tmp_path / "home") as live:
        for n in range(4):
            ask(live, f"{n} is where this conversation starts. " * 8)
    with running(preset, tmp_path / "home") as live:
        ask(live, "4 is where this conversation starts. " * 8)
        with_title = openings(live)
        # As after requests of tokens: no words of an agent are known.
        live.service.agent_registry._titles.clear()
        without_title = openings(live)
    assert with_title and set(with_title) == {OPENING}
    assert without_title == with_title
