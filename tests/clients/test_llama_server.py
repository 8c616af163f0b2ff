"""The run of llama.cpp's own tests: its page, its verdicts, its presets; `make peers` runs it."""

import json
from pathlib import Path

import msgspec
import pytest

from mlxstack.config import presets
from mlxstack.host.home import Home
from tests.clients.llama_server.__main__ import FAULT, IDS, PAGE, reasons, verdicts
from tests.clients.llama_server.shim import options, preset

BASIC = "--port 9 --temp 0.8 --seed 42 --host 127.0.0.1 --batch-size 32 --no-slots --alias a"


def test_the_page_names_listed_tests() -> None:
    reason_of = reasons(PAGE.read_text())
    listed = {line.removeprefix("unit/") for line in IDS.read_text().splitlines()}
    assert len(listed) - len(reason_of) >= 115
    assert reason_of.keys() <= listed


def test_a_verdict_is_a_fault_where_the_page_says_something_else() -> None:
    first, two, three, *passing = IDS.read_text().splitlines()
    reason_of = {name.removeprefix("unit/"): "it is so" for name in (two, three)}
    outcomes = dict.fromkeys([first, three, *passing[1:]], "passed") | {
        two: "failed",
        passing[1]: "failed",
    }
    texts = list(verdicts(outcomes, reason_of).values())
    assert texts[:2] == ["passed", "differs: it is so"]
    assert [check.startswith(FAULT) for check in texts[2:6]] == [True, True, True, False]
    assert "not run" in texts[3] and "failed" in texts[4]
    reason_of = dict.fromkeys(reason_of, "by chance, it is so")
    assert [text[:6] for text in verdicts(outcomes, reason_of).values()][1:3] == [
        "differ",
        "passed",
    ]


@pytest.mark.parametrize(
    ("more", "section", "expected"),
    [
        ("--parallel 2 --ctx-size 512 --metrics", "slots", {"count": 2, "n_ctx": 256}),
        ("--parallel 2 --ctx-size 512 --kv-unified", "slots", {"count": 2, "n_ctx": 512}),
        ("--embedding --parallel 2 --ctx-size 512", "slots", {"count": 1, "n_ctx": 512}),
        ("--parallel 2 --ctx-size 512 --api-key k", "server", {"api_keys": ["k"]}),
        ("--parallel 2 --ctx-size 512 --sleep-idle-seconds 1", "server", {"idle_unload_s": 1.0}),
    ],
)
def test_the_shim_makes_a_preset_of_options(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: str,
    section: str,
    expected: dict[str, object],
) -> None:
    monkeypatch.setenv("SUITE_MODEL", "demo")
    sections = preset(options(f"{BASIC} {more}".split()))
    file = tmp_path / "suite.yaml"
    file.write_text(json.dumps(sections))
    read = json.loads(msgspec.json.encode(presets.load(str(file), Home(tmp_path)).preset))
    assert read[section].items() >= expected.items()
