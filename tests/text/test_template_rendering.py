"""Rendering a chat template takes bounded time and memory, whatever its author wrote."""

import datetime
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jinja2
import psutil
import pytest
from msgspec.structs import replace

from mlxstack.core.conversation import Conversation, Message, Role
from mlxstack.core.errors import Busy, TemplateOverrun
from mlxstack.text import limited_process
from mlxstack.text.assembly import assemble_text
from mlxstack.text.prompt.report import MAX_REFUSAL, notes, refusal
from mlxstack.text.rendering import renderers as template_rendering
from mlxstack.text.rendering.jinja_environment import compiled
from mlxstack.text.rendering.renderers import RENDERERS, TemplateRefusal, TemplateRenderers
from mlxstack.text.rendering.worker import MAX_REASON
from mlxstack.text.template.adaptation import TemplateCapabilities
from mlxstack.text.template.capabilities import TemplateProbe, find_capabilities
from tests import forked
from tests.features.formats.formats import Format, made_tokenizer
from tests.patience import PATIENCE_S
from tests.text.conftest import CHATML

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LATE = "{% if messages|length > 8 %}" + LOOP + "{% endif %}"
TURNS = [{"role": ("user", "assistant")[at % 2], "content": f"turn {at}"} for at in range(9)]


@pytest.fixture
def renderers() -> Iterator[TemplateRenderers]:
    made = TemplateRenderers()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_rendering, "LIMIT_S", 0.5)


def test_the_reason_of_a_refusal_is_short(renderers: TemplateRenderers) -> None:
    with pytest.raises(TemplateRefusal) as refused:
        renderers.render("{{ raise_exception('x' * 9999999) }}", {})
    assert str(refused.value) == "x" * MAX_REASON


@pytest.mark.parametrize("half", ["\\ud83d", "\\udfff"])
def test_half_a_character_of_a_template_is_replaced(
    renderers: TemplateRenderers, half: str
) -> None:
    assert renderers.render(f"{{{{ 'a{half}b' }}}}", {}) == "a\ufffdb"
    with pytest.raises(TemplateRefusal, match=r"^a\ufffdb$"):
        renderers.render(f"{{{{ raise_exception('a{half}b') }}}}", {})


def test_a_rendering_is_no_longer_than_the_conversation_explains(
    renderers: TemplateRenderers,
) -> None:
    with pytest.raises(TemplateOverrun, match="writes 9 MB"):
        renderers.render("{{ 'x' * 9999999 }}", {"messages": TURNS})
    long = [{"role": "user", "content": "x" * 2_000_000}]
    source = "{{ messages[0].content * 4 }}"
    assert len(renderers.render(source, {"messages": long})) == 8_000_000


def test_a_template_that_refuses_all_is_soon_probed() -> None:
    asked: list[str] = []

    def refuse(probe: TemplateProbe, _: TemplateCapabilities) -> None:
        asked.append(probe.name)

    assert find_capabilities(refuse) == TemplateCapabilities()
    assert len(asked) < 20


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (LOOP, "0.5 s of CPU time"),
        ("{{ ('x' * 3000000000)|length }}", "1 GB of memory"),
        ("{{ 'ab'|batch(3000000000, 'x')|list|length }}", "1 GB of memory"),
        ("{{ 'x' * (99999999 * deep) }}", "more than 64 MB"),
    ],
)
def test_a_rendering_beyond_a_limit_ends_and_the_next_one_is_served(
    renderers: TemplateRenderers, source: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "CPU" not in reason:
        monkeypatch.setattr(template_rendering, "LIMIT_S", 30)
    with pytest.raises(TemplateOverrun, match=reason):
        renderers.render("{% if deep %}" + source + "{% endif %}", {"deep": True})
    assert renderers.render("{{ messages[2].content }}", {"messages": TURNS}) == "turn 2"
    assert renderers.n_overruns == 1


def test_the_watch_of_a_child_ends_it_where_the_kernel_keeps_no_limit(
    renderers: TemplateRenderers, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert renderers.render("{{ 1 }}", {}) == "1"
    monkeypatch.setattr(renderers._pool._idle[0], "_max_bytes", 1)
    with pytest.raises(TemplateOverrun, match="of memory"):
        renderers.render(LOOP, {})


def test_a_repeated_overrun_is_refused_at_once(renderers: TemplateRenderers) -> None:
    for _ in range(3):
        with pytest.raises(TemplateOverrun, match="of CPU time"):
            renderers.render(LOOP, {"messages": TURNS})
    assert renderers.n_overruns == 1


def test_all_renderings_of_a_request_share_one_budget(renderers: TemplateRenderers) -> None:
    slow = "{% for i in range(n) %}{% for j in range(1000) %}{% endfor %}{% endfor %}"
    with renderers.budget(), pytest.raises(TemplateOverrun):
        for n in range(100_000):
            renderers.render(slow, {"n": 100 + n % 2})
    with renderers.budget():
        assert renderers.render("{{ messages|length }}", {"messages": TURNS}) == "9"


def test_a_process_that_is_gone_is_replaced(renderers: TemplateRenderers) -> None:
    assert renderers.render("{{ 1 }}", {}) == "1"
    child: Any = renderers._pool._idle[0]._process
    child.kill()
    child.wait()
    assert renderers.render("{{ 2 }}", {}) == "2"


def test_the_process_of_a_template_has_no_variables_of_the_user(
    renderers: TemplateRenderers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    # A forked process would have the variables of another one.
    monkeypatch.setattr(subprocess.Popen, "_execute_child", forked.EXECUTE)
    assert renderers.render("{{ 1 }}", {}) == "1"
    child: Any = renderers._pool._idle[0]._process
    variables = psutil.Process(child.pid).environ()
    assert "HF_TOKEN" not in variables
    # CPython sets the locale itself where no variable names it.
    assert variables.keys() <= {*limited_process.OF_INTERPRETER, "LC_CTYPE"}


def test_the_text_is_that_of_the_template(renderers: TemplateRenderers) -> None:
    odd = [*TURNS, {"role": "user", "content": "half \ud83d and 日本 \ufdd4"}]
    given = {"messages": odd, "tools": [{"n": 2**70, "x": 1.5, "y": None}]}
    text = compiled(CHATML)(**given)
    assert renderers.render(CHATML, given) == text.replace("\ud83d", "\ufffd")
    with pytest.raises(TemplateRefusal, match="only two turns"):
        renderers.render("{{ raise_exception('only two turns') }}", {})
    with pytest.raises(TemplateRefusal):
        renderers.render("{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}", {})
    assert renderers.n_overruns == 0


def test_a_template_that_loops_in_long_conversations_is_tried_once_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt_maker = assemble_text(made_tokenizer(Format(""), LATE + CHATML)).prompt_maker
    monkeypatch.setattr(RENDERERS, "_overran_at", -template_rendering.WARY_S)
    short = Conversation((Message(Role.USER, "Hello"),))
    roles = (Role.USER, Role.ASSISTANT)
    long = Conversation(tuple(Message(roles[at % 2], f"turn {at}") for at in range(9)))
    before = RENDERERS.n_overruns
    text = prompt_maker.make(short).text
    for work in (prompt_maker.make, prompt_maker.text):
        with pytest.raises(TemplateOverrun, match="the chat template of this model takes longer"):
            work(long)
    assert RENDERERS.n_overruns == before + 1
    assert prompt_maker.make(short).text == text


def test_a_template_that_never_ends_is_refused_when_it_is_probed() -> None:
    with pytest.raises(TemplateOverrun):
        assemble_text(made_tokenizer(Format(""), LOOP + CHATML))


def test_a_template_that_refuses_every_conversation_is_noted() -> None:
    text = assemble_text(made_tokenizer(Format(""), "{{ raise_exception('no chat' * 99) }}"))
    refused = refusal(text.prompt_maker)
    capabilities = text.prompt_maker.template.capabilities
    (note,) = notes(capabilities, text.answer_format.report, refused)
    assert "refuses the conversation: no chat" in note
    assert len(note) < 2 * MAX_REFUSAL
    assert refusal(assemble_text(made_tokenizer(Format(""), CHATML)).prompt_maker) == ""


def test_an_answer_without_end_is_not_read_whole(
    renderers: TemplateRenderers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited_process, "MAX_ANSWERED", 1000)
    with pytest.raises(TemplateOverrun, match="makes more than"):
        renderers.render("{{ 'x' * 2000 }}", {})


@pytest.mark.slow
def test_slow_renderings_leave_threads_for_others(
    renderers: TemplateRenderers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_rendering, "LIMIT_S", 1.0)
    monkeypatch.setattr(template_rendering, "WARY_LIMIT_S", 1.0)
    monkeypatch.setattr(renderers._pool, "_limits", replace(template_rendering.LIMITS, quick_s=0.1))
    monkeypatch.setattr(limited_process, "STALL_S", PATIENCE_S)
    n_slow = template_rendering.MAX_SLOW

    def render(at: int) -> str:
        return renderers.render(LOOP, {"at": at})

    with ThreadPoolExecutor(2 * n_slow) as pool:
        jobs = [pool.submit(render, at) for at in range(2 * n_slow)]
    errors = [type(job.exception()) for job in jobs]
    assert errors.count(Busy) == errors.count(TemplateOverrun) == n_slow
    assert renderers.render("{{ 1 }}", {}) == "1"


@pytest.mark.parametrize(
    "call",
    [
        "datetime.now().year",
        "datetime.datetime.now().year",
        "datetime.strftime('%Y')",
        "strftime_now('%Y')",
    ],
)
def test_a_template_may_ask_for_the_date(call: str) -> None:
    year = str(datetime.datetime.now().astimezone().year)
    assert compiled("{{ " + call + " }}")() == year
    assert compiled("{{ 'Today is ' + datetime }}")().endswith(year)


def test_a_template_says_which_function_it_misses() -> None:
    with pytest.raises(jinja2.TemplateError, match="'moon_phase' is undefined"):
        compiled("{{ moon_phase() }}")()


def test_a_template_may_read_the_tools_as_functions() -> None:
    tools = [{"type": "function", "function": {"name": "edit"}}]
    rendering = compiled("{{ 'Functions: ' + functions }}")
    assert rendering(tools=tools) == 'Functions: [\n    {\n        "name": "edit"\n    }\n]'
    assert rendering(tools=None) == "Functions: []"
    assert rendering(tools=None, functions="own") == "Functions: own"
    assert compiled("{% set functions = tools %}{{ functions }}")(tools="own") == "own"
