"""A person's next turn, begun in the pause: only new words are computed when it comes."""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs
from PIL import Image
from typer.testing import CliRunner

from mlxstack.cli.main import app
from mlxstack.core.preset import Anticipation, ModelSpec, PrefixCacheSpec, Preset, SlotSpec
from mlxstack.features.early_turns import service as early_turns
from mlxstack.features.early_turns.engine import EarlyPrefill
from tests import models
from tests.api.running import TINY, Running, running, tiny_preset
from tests.patience import PATIENCE_S, wait_until
from tests.service.standin import early_turns_of
from tests.text.conftest import CHATML_ADDED, CHATML_SPECIAL, byte_level, loaded
from tests.text.stripping import STRIPPING

pytestmark = [pytest.mark.mlx, pytest.mark.net]
SLACK = 128
CALL = {"name": "look", "arguments": '{"place": "the lake"}'}
TOOL = {"name": "look", "parameters": {"type": "object", "properties": {"place": {}}}}
ONLY_DONE = 'root ::= "It is done."'
NEXT = "And how wide is it?"
LONG_ANSWER = (
    "the picture shows a house near the lake and an old boat with a red sail that nobody has used "
    "for many years since the river ran dry in the summer"
)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with under("loop", tmp_path_factory.mktemp("loop")) as found:
        yield found


@contextmanager
def under(template: str, folder: Path) -> Iterator[Running]:
    """A tiny model under a template that strips thoughts."""
    model = models.write(folder / "model", TINY)
    tokenizer = byte_level(CHATML_SPECIAL, CHATML_ADDED)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    loaded(model, tokenizer, STRIPPING[template], {"eos_token": "<|im_end|>"})
    preset = structs.replace(tiny_preset(model), slots=SlotSpec(count=2, n_ctx=4096))
    with powered(preset, folder / "home") as found:
        yield found


@contextmanager
def powered(preset: Preset, home: Path) -> Iterator[Running]:
    """A service on a computer with spare power."""
    with running(preset, home) as found:
        early_turns_of(found.service).may_begin = lambda: True
        yield found


@pytest.fixture
def http(live: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=PATIENCE_S) as client:
        yield client


def history(subject: str) -> list[dict[str, Any]]:
    """A tool loop whose client sends its thoughts back, up to the last result."""
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"Measure {subject}."},
    ]
    for step in range(2):
        thought = f"Step {step} of {subject}: I have to look at it again. " * 5
        call = {"id": f"call_{step}", "type": "function", "function": CALL}
        said = {"role": "assistant", "content": "", "reasoning_content": thought}
        result = f"Water, {step} and {subject}, all over the place. " * 5
        turns += [
            {**said, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{step}", "content": result},
        ]
    return turns


def chat(http: httpx.Client, messages: list[dict[str, Any]], **more: Any) -> httpx.Response:
    """A request of an agent; the answer is one sentence after a short thought."""
    body = {
        "messages": messages,
        "tools": [{"type": "function", "function": TOOL}],
        "temperature": 0,
        "max_tokens": 200,
        "thinking_budget_tokens": 30,
        "grammar": ONLY_DONE,
        "tool_choice": "none",
        "chat_template_kwargs": {"enable_thinking": True},
        **more,
    }
    return http.post("/v1/chat/completions", json=body).raise_for_status()


def message(answer: httpx.Response) -> dict[str, Any]:
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop", choice
    return dict(choice["message"])


def n_computed(answer: httpx.Response) -> int:
    usage = answer.json()["usage"]
    return int(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])


def n_tokens(http: httpx.Client, text: str) -> int:
    return len(http.post("/tokenize", json={"content": text}).json()["tokens"])


def pause(live: Running, n_before: int) -> None:
    """Wait until the next turn is begun, and to the end."""

    def is_begun() -> bool:
        now = live.service.engine.snapshot()
        left = sum(slot.n_early_left for slot in now.slots)
        return now.counters.n_early_tokens > n_before and not left

    wait_until(is_begun, "nothing was begun early")


def n_early(live: Running) -> int:
    return live.service.engine.snapshot().counters.n_early_tokens


def test_after_a_pause_only_new_tokens_are_computed(live: Running, http: httpx.Client) -> None:
    check_pause(live, http)


@pytest.mark.parametrize("template", ["latest", "calls"])
def test_other_templates_strip_thoughts_too(tmp_path: Path, template: str) -> None:
    with (
        under(template, tmp_path) as other,
        httpx.Client(base_url=other.url, timeout=PATIENCE_S) as http,
    ):
        check_pause(other, http)


def check_pause(live: Running, http: httpx.Client) -> None:
    turns = history("the lake")
    before = n_early(live)
    first = chat(http, turns)
    pause(live, before)
    asked = [*turns, message(first), {"role": "user", "content": NEXT}]
    second = chat(http, asked)
    n_begun = n_early(live) - before
    n_new = n_tokens(http, NEXT)
    assert n_computed(second) <= n_new + SLACK
    assert n_begun > n_new + SLACK, "more than that would have been computed without"
    assert second.headers["x-mlx-stack-begun-early"] == f"{n_begun} tokens, used {n_begun}"
    assert "x-mlx-stack-cache-miss-reason" not in second.headers
    cold = chat(http, asked, cache_prompt=False)
    assert message(second)["content"] == message(cold)["content"]
    assert message(second)["reasoning_content"] == message(cold)["reasoning_content"]


def test_it_is_told(live: Running, http: httpx.Client) -> None:
    turns = history("the pond")
    before = n_early(live)
    first = chat(http, turns)
    pause(live, before)
    slot = next(one for one in http.get("/slots").json() if one["n_early"])
    assert (slot["is_processing"], slot["n_early_left"]) == (False, 0)
    second = chat(http, [*turns, message(first), {"role": "user", "content": NEXT}])
    found = http.get(f"/requests/{second.json()['id']}").json()
    assert found["n_used_early"] == found["n_begun_early"] == n_early(live) - before
    learned = live.service.engine.loaded.features[EarlyPrefill]._histories
    assert ("client", "python-httpx") in learned
    why = CliRunner().invoke(app, ["cache", "why", found["id"], "--url", live.url])
    assert f"begun early: {found['n_begun_early']} tokens, used" in why.output
    metrics = http.get("/metrics").text
    now = live.service.engine.snapshot().counters
    assert f"mlxstack_early_tokens_total {float(now.n_early_tokens)}" in metrics
    assert f"mlxstack_early_tokens_used_total {float(now.n_early_used)}" in metrics
    assert "mlxstack_early_tokens_wasted_total" in metrics


def test_another_turn_than_expected_gets_the_same_words(live: Running, http: httpx.Client) -> None:
    turns = history("the sea")
    before = n_early(live)
    chat(http, turns)
    pause(live, before)
    other = [*turns[:4], {"role": "user", "content": NEXT}]
    second = chat(http, other)
    assert message(second) == message(chat(http, other, cache_prompt=False))


def test_a_request_in_the_pause_ends_it(
    live: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_turns, "PAUSE_S", 3600.0)
    turns = history("the river")
    before = n_early(live)
    first = chat(http, turns)
    assert len(early_turns_of(live.service).pauses) == 1
    second = [*turns, message(first), {"role": "user", "content": NEXT}]
    chat(http, second, max_tokens=2)
    assert not early_turns_of(live.service).pauses, "a cut answer is not expected to go on"
    assert n_early(live) == before


def test_nothing_is_begun_without_spare_power(
    live: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def refuse() -> bool:
        asked.append(True)
        return False

    monkeypatch.setattr(early_turns, "PAUSE_S", 0.0)
    monkeypatch.setattr(early_turns_of(live.service), "may_begin", refuse)
    before = n_early(live)
    chat(http, history("the well"))
    wait_until(lambda: not (early_turns_of(live.service).pauses or not asked))
    assert n_early(live) == before


def test_a_preset_switches_it_off(tmp_path: Path) -> None:
    spec = PrefixCacheSpec(anticipate=Anticipation.OFF)
    preset = tiny_preset(tmp_path / "tiny", prefix_cache=spec)
    with running(preset, tmp_path / "home") as live, httpx.Client(base_url=live.url) as http:
        message(chat(http, [{"role": "user", "content": "Hello."}]))
        assert not early_turns_of(live.service).pauses


def test_the_demo_model_goes_on_after_its_tool_loop(tmp_path: Path) -> None:
    """It thinks, calls a tool and answers by itself; its thoughts are stripped."""
    preset = structs.replace(
        tiny_preset(tmp_path / "unused"), model=ModelSpec(id="demo"), slots=SlotSpec(2, 2048)
    )
    weather = {"name": "get_weather", "description": "Get the weather of a city."}
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"type": "function", "function": {**weather, "parameters": city}}]
    free = {"tools": tools, "grammar": None, "thinking_budget_tokens": None, "tool_choice": "auto"}
    home = tmp_path / "home"
    with powered(preset, home) as live, httpx.Client(base_url=live.url, timeout=PATIENCE_S) as http:
        turns: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]
        called = message_of_call(chat(http, turns, **free))
        result = "sunny, 21 degrees"
        call_id = called["tool_calls"][0]["id"]
        turns += [called, {"role": "tool", "tool_call_id": call_id, "content": result}]
        answer = message(chat(http, turns, **free))
        wait_until(lambda: not early_turns_of(live.service).pauses)
        asked = [*turns, answer, {"role": "user", "content": "Thanks. What can you do?"}]
        second = chat(http, asked, **free)
        assert n_computed(second) <= n_tokens(http, "Thanks. What can you do?") + SLACK
        cold = chat(http, asked, cache_prompt=False, **free)
        assert message(second) == message(cold)


def test_a_picture_in_a_tool_result_is_still_there_in_the_next_turn(tmp_path: Path) -> None:
    """The thought before it is stripped, so all behind the call is computed again."""
    preset = structs.replace(
        tiny_preset(tmp_path / "unused"), model=ModelSpec(id="demo"), slots=SlotSpec(2, 2048)
    )
    text = {"type": "string", "maxLength": 6}
    schema = {"type": "object", "properties": {"q": text}, "required": ["q"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    home = tmp_path / "home"
    with powered(preset, home) as live, httpx.Client(base_url=live.url, timeout=PATIENCE_S) as http:
        turns: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]
        free = {"tools": [tool], "grammar": None, "thinking_budget_tokens": None}
        called = message_of_call(chat(http, turns, **free, tool_choice="required"))
        shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture()}"}}
        seen = [{"type": "text", "text": "seen:"}, shown, {"type": "text", "text": "that is all"}]
        call_id = called["tool_calls"][0]["id"]
        turns += [called, {"role": "tool", "tool_call_id": call_id, "content": seen}]
        n_before = n_early(live)
        answer = message(chat(http, turns, grammar=f'root ::= "{LONG_ANSWER}"', tools=[tool]))
        pause(live, n_before)
        asked = [*turns, answer, {"role": "user", "content": "And now?"}]
        second = chat(http, asked, **free, tool_choice="none")
        assert second.headers["x-mlx-stack-begun-early"]
        cold = chat(http, asked, cache_prompt=False, **free, tool_choice="none")
        assert message(second) == message(cold)


def picture() -> str:
    """A PNG of four colors, in Base64."""
    out = BytesIO()
    blocks = Image.frombytes("RGB", (2, 2), bytes(range(0, 240, 20)))
    blocks.resize((256, 256), Image.Resampling.NEAREST).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def message_of_call(answer: httpx.Response) -> dict[str, Any]:
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls", choice
    return dict(choice["message"])
