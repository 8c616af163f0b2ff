"""H3: every value on the first two screens is the one that /metrics and /slots tell."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxstack.core.formatting import count, share, size
from mlxstack.core.preset import SlotSpec
from mlxstack.tui.app import Dashboard
from mlxstack.tui.views.formatting import bar
from mlxstack.tui.widgets.text_lines import TextLines
from tests import patience
from tests.api.running import Running, running, tiny_preset
from tests.patience import PATIENCE_S
from tests.tui.test_live import board, cells, numbers, until, watching

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.slow]

COUNTED = {
    "llamacpp:prompt_tokens": "n_prompt_tokens",
    "llamacpp:prompt_tokens_cached": "n_cached_tokens",
    "llamacpp:tokens_predicted": "n_generated_tokens",
    "mlxstack_requests_completed": "n_completed",
    "mlxstack_model_calls": "n_model_calls",
    "mlxstack_decode_rows": "n_decode_rows",
}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A running service with three slots, in which one can talk for long."""
    folder: Path = tmp_path_factory.mktemp("model") / "tiny"
    preset = tiny_preset(folder, slots=SlotSpec(count=3, n_ctx=16_384))
    with running(preset, tmp_path_factory.mktemp("home")) as found:
        yield found


def body(agent: str, max_tokens: int) -> dict[str, Any]:
    said = [{"role": "user", "content": f"a story about {agent} " * 30}]
    return {
        "messages": said,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "session_id": agent,
    }


def lines(app: Dashboard, name: str) -> str:
    """What a person reads there."""
    return str(app.screen.query_one(f"#{name}", TextLines).render())


async def test_h3_at_rest_all_that_is_read_is_what_metrics_and_slots_tell(live: Running) -> None:
    async with (
        httpx.AsyncClient(base_url=live.url, timeout=PATIENCE_S) as http,
        watching(live.url) as pilot,
    ):
        for agent in ("ann", "bob", "ann"):
            (await http.post("/v1/chat/completions", json=body(agent, 20))).raise_for_status()
        told = numbers((await http.get("/metrics")).text)
        slots = (await http.get("/slots")).json()
        app = board(pilot)
        n_done = int(told["mlxstack_requests_completed"])
        await until(pilot, lambda: f"{n_done} done" in lines(app, "totals"))
        await until(
            pilot,
            lambda: (
                not any(
                    cells(pilot, one["id"])[2].startswith(("writing", "prefill")) for one in slots
                )
            ),
        )
        n_new = told["llamacpp:prompt_tokens"]
        n_known = told["llamacpp:prompt_tokens_cached"]
        assert n_known > 0
        totals = lines(app, "totals")
        reused = f"{count(n_known)} reused ({share(n_known, n_new + n_known)})"
        assert f"in {count(n_new)} + {reused}" in totals
        assert f"out {count(told['llamacpp:tokens_predicted'])} " in totals
        queued = int(told["llamacpp:requests_deferred"])
        assert f"queue {queued}/" in lines(app, "tile-queue")
        health = lines(app, "health")
        kv = size(told["mlxstack_kv_bytes"])
        assert kv.partition(" ")[0] in health
        for one in slots:
            row = cells(pilot, one["id"])
            assert row[1] == (one.get("agent") or "-")
            assert row[2].startswith("idle" if one["n_tokens"] else "empty")
            filled = bar(one["n_tokens"], one["n_ctx"], 6)
            assert row[3] == f"{filled} {count(one['n_tokens']):>5}"
            assert row[4] == share(one["cached_tokens"], one["n_prompt"])


async def test_h3_under_load_each_frame_lies_between_two_scrapes(live: Running) -> None:
    async with httpx.AsyncClient(base_url=live.url, timeout=PATIENCE_S) as http:
        talks = [
            asyncio.create_task(http.post("/v1/chat/completions", json=body(agent, 15_000)))
            for agent in ("cyd", "dan", "eve")
        ]
        async with watching(live.url) as pilot:
            app = board(pilot)
            await until(
                pilot, lambda: all(cells(pilot, i)[2].startswith("writing") for i in range(3))
            )
            for _ in range(3):
                await between_scrapes(http, app)
            assert not any(talk.done() for talk in talks)
        for talk in talks:
            talk.cancel()
        await asyncio.gather(*talks, return_exceptions=True)


async def between_scrapes(http: httpx.AsyncClient, app: Dashboard) -> None:
    """Scrape, wait for the next frame, scrape: what is shown is from between."""
    first = numbers((await http.get("/metrics")).text)
    slots = (await http.get("/slots")).json()
    scraped_at = time.time()
    await patience.until(lambda: app.model.frame.at - app.model.frame.snapshot_age_s >= scraped_at)
    frame = app.model.frame
    later = numbers((await http.get("/metrics")).text)
    slots_later = (await http.get("/slots")).json()
    for name, field in COUNTED.items():
        assert first[name] <= getattr(frame.snapshot.counters, field) <= later[name], name
    assert later["llamacpp:tokens_predicted"] > first["llamacpp:tokens_predicted"]
    for sooner, view, after in zip(slots, frame.snapshot.slots, slots_later, strict=True):
        assert sooner["agent"] == view.agent == after["agent"]
        assert sooner["n_tokens"] <= view.n_tokens <= after["n_tokens"]
