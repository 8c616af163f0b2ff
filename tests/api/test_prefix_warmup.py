"""What is warm when the service comes up again (D9, D10)."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxstack.core.preset import PrefixCacheSpec, Preset, ServerSpec, WarmPrefix
from mlxstack.host.memory_pressure import PressureLevel
from mlxstack.service.calls import background_tasks, prefix_warmup
from tests.api.running import Running, running, standing, tiny_preset
from tests.api.test_swap import until
from tests.patience import PATIENCE_S
from tests.service.standin import FACTS

TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"It can {name} things. " * 9}}
    for name in ("read", "write", "search")
]
SYSTEM = "You are careful. " * 40
# What people write by mistake into a file of messages.
ODD = (
    "{}", '{"messages": []}', '["hello"]', '[{"content": "x"}]', '[{"role": "boss"}]',
    '[{"role": "user", "content": 5}]', "[" * 100_000,
)  # fmt: skip


def ask(live: Running, text: str, tools: list[dict[str, Any]] | None = None) -> httpx.Response:
    body = {
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}],
        "tools": tools or [],
        "max_tokens": 2,
    }
    return httpx.post(
        f"{live.url}/v1/chat/completions", json=body, timeout=PATIENCE_S
    ).raise_for_status()


def warm(live: Running) -> None:
    asyncio.run_coroutine_threadsafe(prefix_warmup.warm_all(live.service), live.loop).result(
        PATIENCE_S
    )


def warming(folder: Path, **cache: Any) -> Preset:
    spec = PrefixCacheSpec(warm_on_startup=True, **cache)
    return tiny_preset(folder / "model", prefix_cache=spec)


def test_d10_tools_that_three_conversations_share_are_warm_after_a_restart(tmp_path: Path) -> None:
    preset = warming(tmp_path)
    with running(preset, tmp_path / "home") as live:
        for n in range(3):
            ask(live, f"{n} is where this conversation starts. " * 8, TOOLS)
    with running(preset, tmp_path / "home") as live:
        warm(live)
        view = httpx.get(f"{live.url}/cache").json()
        learned = [p for p in view["prefixes"] if p["name"].startswith("learned-")]
        assert learned
        hit = ask(live, "And now for something else. " * 8, TOOLS)
        n_cached = int(hit.headers["x-mlx-stack-cache-prefix-tokens"])
        without = ask(live, "And now without tools. " * 8)
        assert n_cached == max(p["n_tokens"] for p in learned)
        n_system = int(without.headers["x-mlx-stack-cache-prefix-tokens"])
        assert n_cached > n_system + 128, "the tools were warm too"


def test_d9_a_named_prefix_is_warm_for_the_first_request(tmp_path: Path) -> None:
    file = tmp_path / "system.json"
    file.write_text(json.dumps([{"role": "system", "content": SYSTEM}]))
    for n, odd in enumerate(ODD):
        (tmp_path / f"odd-{n}").write_text(odd)
    prefixes = (
        *(
            WarmPrefix(f"odd-{n}", messages_file=str(tmp_path / f"odd-{n}"))
            for n in range(len(ODD))
        ),
        WarmPrefix("careful", messages_file=str(file)),
        WarmPrefix("lost", text_file=str(tmp_path / "no-such-file")),
    )
    with running(warming(tmp_path, warm_prefixes=prefixes), tmp_path / "home") as live:
        warm(live)
        first = ask(live, "Hello.")
        assert first.headers["x-mlx-stack-cache-hit"] == "true"
        names = {p["name"]: p for p in httpx.get(f"{live.url}/cache").json()["prefixes"]}
        assert names["careful"]["is_pinned"]
        assert not [name for name in names if name.startswith(("odd", "lost"))]


def test_d9_content_in_parts_is_warmed_as_it_is_asked(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": SYSTEM}, {"type": "text", "text": "And kind. "}]
    file = tmp_path / "system.json"
    file.write_text(json.dumps([{"role": "system", "content": parts}]))
    prefixes = (WarmPrefix("careful", messages_file=str(file)),)
    with running(warming(tmp_path, warm_prefixes=prefixes), tmp_path / "home") as live:
        warm(live)
        found = httpx.get(f"{live.url}/cache").json()["prefixes"]
        n_warm = next(p["n_tokens"] for p in found if p["name"] == "careful")
        body = {
            "messages": [{"role": "system", "content": parts}, {"role": "user", "content": "Hi."}],
            "max_tokens": 2,
        }
        answer = httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
        assert int(answer.headers["x-mlx-stack-cache-prefix-tokens"]) >= n_warm


async def test_one_duty_that_fails_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service, engine = standing(ServerSpec(port=0))
    engine.loading.set_result(FACTS)
    await service.start()
    monkeypatch.setattr(background_tasks, "LOOK_S", 0.01)
    monkeypatch.setattr(background_tasks, "SAMPLE_S", 0.01)
    looks: list[int] = []

    def level() -> PressureLevel:
        looks.append(len(service.stats.samples))
        raise OSError("no such file")

    doing = asyncio.create_task(background_tasks.run_tasks(service, level))
    await until(lambda: len(looks) >= 3 and looks[-1] > looks[0])
    assert not doing.done()
    doing.cancel()
    await service.stop(0)
    assert "the relief of memory failed" in caplog.text
