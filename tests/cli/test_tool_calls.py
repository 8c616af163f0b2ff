"""`verify --tools`: its requests, checks and verdicts, and a run on the demo within its time."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from msgspec.structs import replace
from typer.testing import CliRunner

from mlxstack.bench.environment import Conditions
from mlxstack.cli.exit_codes import Misuse
from mlxstack.cli.main import app
from mlxstack.cli.preset_list import catalog, with_fits
from mlxstack.cli.verification.tools import repair_agent
from mlxstack.cli.verification.tools.call_check import CallCheck, CallOutcome, check, repeats
from mlxstack.cli.verification.tools.call_tasks import (
    N_OF_KIND,
    QUICK,
    CallKind,
    CallSizes,
    CallTask,
    call_tasks,
)
from mlxstack.cli.verification.tools.chat_server import ChatAnswer, ChatServer
from mlxstack.cli.verification.tools.kept_results import keep, summaries
from mlxstack.cli.verification.tools.tool_report import (
    BetterModel,
    TemplateLosses,
    ToolReport,
    better_model,
    kind_results,
)
from mlxstack.cli.verification.tools.tool_run import ToolPlan, ToolRun, tool_report
from mlxstack.cli.verification.tools.work_estimate import WorkRates, estimate_s
from mlxstack.host.home import Home
from mlxstack.text.template.tool_losses import LostPart

TASKS = call_tasks(QUICK)
NUMBER = next(task for task in TASKS if task.kind is CallKind.NUMBER)
PARALLEL = next(task for task in TASKS if task.kind is CallKind.PARALLEL)
NO_SERVER = "http://127.0.0.1:9"
REPORT = ToolReport(
    preset="tiny",
    model="org/tiny",
    conditions=Conditions("", "", {}, "", "", 0.0),
    seconds=1.0,
    estimate_s=1.0,
    limit_s=2.0,
    is_quick=True,
    n_calls=100,
    n_valid=80,
    n_exact=70,
    n_loops=0,
    n_left_out=0,
    template=TemplateLosses("digest"),
    kinds=(),
    checks=(),
)


def answered(*calls: tuple[str, Any], content: str = "", finish: str = "tool_calls") -> ChatAnswer:
    """An answer with calls by name and arguments."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": str(index), "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(calls)
        ]
    return ChatAnswer(message, finish, 10, 10)


def expected(task: CallTask) -> tuple[tuple[str, str], ...]:
    """The calls of a task, as a model writes them."""
    return tuple((call.name, json.dumps(call.arguments)) for call in task.expected)


@pytest.mark.parametrize("sizes", [QUICK, CallSizes()])
def test_there_are_a_hundred_requests_whose_own_calls_are_valid_and_exact(sizes: CallSizes) -> None:
    tasks = call_tasks(sizes)
    assert [sum(task.kind is kind for task in tasks) for kind in CallKind] == [N_OF_KIND] * 10
    for task in tasks:
        found = check(task, answered(*expected(task)))
        assert (found.outcome, found.is_exact) == (CallOutcome.VALID, True), task
        for offered in task.tools:
            Draft202012Validator.check_schema(offered["function"]["parameters"])
    (code,) = {len(t.expected[0].arguments["content"].splitlines()) for t in tasks
               if t.kind is CallKind.CODE}  # fmt: skip
    assert code == sizes.n_lines


@pytest.mark.parametrize(
    ("task", "answer", "outcome"),
    [
        (NUMBER, answered(content="I cannot."), CallOutcome.NO_CALL),
        (
            NUMBER,
            answered(content='```json\n{"name": "other", "arguments": {}}\n```'),
            CallOutcome.UNREAD,
        ),
        (NUMBER, answered(("other", "{}")), CallOutcome.OTHER_TOOL),
        (NUMBER, answered(("move", '{"x": 1')), CallOutcome.NOT_JSON),
        (NUMBER, answered(("move", "[]")), CallOutcome.NOT_JSON),
        (NUMBER, answered(("move", '{"x": 1, "y": 2, "steps": 101}')), CallOutcome.NOT_SCHEMA),
        (NUMBER, answered(("move", '{"x": 1, "y": 2, "steps": 100}')), CallOutcome.VALID),
        (PARALLEL, answered(expected(PARALLEL)[0]), CallOutcome.TOO_FEW),
    ],
)
def test_the_outcome_of_an_answer(task: CallTask, answer: ChatAnswer, outcome: CallOutcome) -> None:
    found = check(task, answer)
    assert (found.outcome, found.is_exact, found.is_loop) == (outcome, False, False)


def test_a_valid_call_that_was_not_asked_for_is_in_the_report() -> None:
    found = check(NUMBER, answered(("move", '{"x": 1, "y": 2, "steps": 100}')))
    assert found.detail == 'move({"x": 1, "y": 2, "steps": 100})'
    assert check(NUMBER, answered(*expected(NUMBER))).detail == ""


@given(st.text(max_size=50), st.text(min_size=1, max_size=60))
def test_copies_at_the_end_are_a_loop(before: str, piece: str) -> None:
    assert repeats(before + piece * 24)


def test_a_loop_is_an_answer_that_was_cut_in_copies() -> None:
    looping = answered(content="again " * 20, finish="length")
    assert check(NUMBER, looping).is_loop
    ended = replace(looping, finish_reason="stop")
    assert not check(NUMBER, ended).is_loop
    assert check(NUMBER, replace(ended, has_loop=True)).is_loop
    assert not repeats("def f(x):\n    return x\n\n\ndef g(x):\n    return 2 * x\n" * 2)


def checks(kind: CallKind, n_valid: int) -> list[CallCheck]:
    """Ten checks of a kind."""
    outcomes = [CallOutcome.VALID] * n_valid + [CallOutcome.NO_CALL] * (10 - n_valid)
    return [CallCheck(kind, outcome) for outcome in outcomes]


@pytest.mark.parametrize(
    ("kind", "n_valid", "lost", "loser"),
    [
        (CallKind.TURNS, 8, (LostPart.RESULTS,), ""),
        (CallKind.TURNS, 7, (LostPart.RESULTS,), "template"),
        (CallKind.TURNS, 7, (), "weights"),
        (CallKind.ENUM, 7, (LostPart.RESULTS,), "weights"),
        (CallKind.ENUM, 7, (LostPart.TOOLS,), "template"),
        (CallKind.ENUM, 7, (LostPart.TEXT,), "weights"),
    ],
)
def test_template_or_weights_lose_a_kind(
    kind: CallKind, n_valid: int, lost: tuple[LostPart, ...], loser: str
) -> None:
    (result,) = kind_results(checks(kind, n_valid), lost)
    assert (result.n_valid, result.loser) == (n_valid, loser)


def test_requests_without_time_count_for_nobody() -> None:
    made = [*checks(CallKind.ENUM, 10)[:3], CallCheck(CallKind.ENUM, CallOutcome.NOT_MADE)]
    (result,) = kind_results(made, ())
    assert (result.n, result.n_valid, result.loser) == (3, 3, "")


def test_another_model_with_the_same_template_is_named_as_better() -> None:
    rival = replace(REPORT, model="org/tiny-8bit", n_valid=95)
    others = [
        replace(rival, model="org/near", n_valid=84),
        replace(rival, model="org/other", n_valid=99, template=TemplateLosses("another")),
        replace(rival, model="org/long", n_valid=98, is_quick=False),
        replace(rival, model="org/partial", n_valid=97, n_calls=99),
        REPORT,
        rival,
    ]
    assert better_model(REPORT, others) == BetterModel("org/tiny-8bit", 95)
    assert better_model(rival, others) is None


def test_the_estimate_counts_what_prompts_share_once() -> None:
    fast = WorkRates(prefill=100.0, decode=10.0)
    first, second, *_ = TASKS
    alone = estimate_s(fast, [first], 0)
    assert alone < estimate_s(fast, [first, second], 0) < 2 * alone + estimate_s(fast, [second], 0)
    assert estimate_s(fast, [first], 10) > alone
    assert estimate_s(WorkRates(50.0, 5.0), TASKS, 0) == pytest.approx(
        2 * estimate_s(fast, TASKS, 0)
    )


def test_the_lists_show_the_last_result(tmp_path: Path) -> None:
    home = Home(tmp_path)
    keep(home, "demo", replace(REPORT, model="demo", n_valid=1))
    path = keep(home, "demo", replace(REPORT, model="demo", n_valid=43))
    (path.parent / "broken.json").write_text("{")
    assert str(summaries(home)["demo"]) == "43/100"
    listed = {listing.name: listing for listing in with_fits(catalog(home)[:2], home)}
    assert str(listed["demo"].tools) == "43/100"
    assert listed["demo-embedding"].tools is None


def test_no_request_goes_on_after_the_deadline() -> None:
    run = ToolRun(ToolPlan(n_repairs=10), 4, lambda *_: None)
    with ChatServer(NO_SERVER, "tiny", deadline=0.0) as server:
        made = run.calls(server, TASKS)
        repairs = run.repairs(server)
    assert [result.outcome for result in made] == [CallOutcome.NOT_MADE] * 100
    assert [result.is_complete for result in repairs] == [False] * 10


@pytest.mark.mlx
def test_a_run_on_the_demo_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The demo repairs nothing, and talks until it is cut.
    monkeypatch.setattr(repair_agent, "MAX_ANSWER", 48)
    notes: list[str] = []
    counts: list[tuple[str, int, int]] = []
    report = tool_report(
        "demo",
        Home(tmp_path),
        {**os.environ, "MLX_STACK_HOME": str(tmp_path)},
        notes.append,
        lambda *counted: counts.append(counted),
        ToolPlan(is_quick=True, n_repairs=2, against=(NO_SERVER,), n_of_kind=1),
    )
    assert (report.n_calls, report.n_left_out) == (10, 0)
    assert ("calls", 10, 10) in counts and counts[-1] == ("repairs", 2, 2)
    assert [repair.is_complete for repair in report.repairs] == [True] * 2
    (rival,) = report.against
    assert (rival.server, rival.repairs) == (NO_SERVER, ())
    assert rival.error.startswith("no server with a model answers")
    assert any("at the latest" in line for line in notes)
    assert report.template.by_template == ()
    assert summaries(Home(tmp_path))["demo"].n_valid == report.n_valid
    assert msgspec.json.decode(msgspec.json.encode(report), type=ToolReport) == report


@pytest.mark.parametrize(
    "options",
    [["--repairs"], ["--calls", "2"], ["--tools", "--against", "mlx_lm"], ["--tools", "--kernels"]],
)
def test_options_that_do_not_go_together_are_refused(options: list[str]) -> None:
    result = CliRunner().invoke(app, ["verify", "demo", *options])
    assert isinstance(result.exception, Misuse)
