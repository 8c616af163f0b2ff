"""Log lines: JSON as a program reads it, and short lines for people."""

import io
import json
import logging
from datetime import UTC, datetime

import pytest

from mlxstack.host.log_lines import (
    REQUESTS,
    JSONFormatter,
    LogLine,
    for_people,
    read,
    text_of,
    with_name,
)

NOON = datetime(2026, 11, 26, 12, 30, 5, tzinfo=UTC)


@pytest.fixture
def output() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def logger(output: io.StringIO) -> logging.Logger:
    """A logger that writes as those of a worker do."""
    handler = logging.StreamHandler(output)
    handler.setFormatter(JSONFormatter())
    found = logging.Logger("mlxstack.test")
    found.addHandler(handler)
    return found


def test_a_logger_writes_one_json_object_a_line(
    logger: logging.Logger, output: io.StringIO
) -> None:
    logger.info('%d rows of "x"\nand ü', 3, extra={"fields": {"agent": "shop api", "slot": None}})
    [text] = output.getvalue().splitlines()
    written = json.loads(text)
    assert datetime.fromisoformat(written.pop("time")).tzinfo is not None
    assert written == {
        "level": "INFO",
        "source": "mlxstack.test",
        "message": '3 rows of "x"\nand ü',
        "fields": {"agent": "shop api", "slot": None},
    }


def test_a_traceback_is_a_part_of_its_line(logger: logging.Logger, output: io.StringIO) -> None:
    try:
        raise ValueError("odd")
    except ValueError:
        logger.exception("a step failed")
    [text] = output.getvalue().splitlines()
    line = read(text)
    assert line.is_error and line.message == "a step failed"
    assert line.traceback.endswith("ValueError: odd")
    assert for_people(line).endswith("ERROR a step failed\n" + line.traceback)


@pytest.mark.parametrize(
    ("line", "short", "whole"),
    [
        (
            LogLine(time=NOON, level="INFO", source="a.b", message="ready", fields={"slot": 0}),
            "12:30:05 ready",
            "2026-11-26 12:30:05 INFO a.b ready slot=0",
        ),
        (
            LogLine(time=NOON, level="WARNING", source="a.b", message="odd"),
            "12:30:05 WARNING odd",
            "2026-11-26 12:30:05 WARNING a.b odd",
        ),
    ],
)
def test_people_read_a_line_short_or_whole(line: LogLine, short: str, whole: str) -> None:
    again = read(text_of(line))
    assert again == line
    assert for_people(again) == short
    assert for_people(again, is_whole=True) == whole


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-26 09:54:08,032 INFO mlxstack.serve demo is ready",
        "Traceback (most recent call last):",
        "[1, 2]",
        '{"time": "now", "message": "x"}',
        '{"message": 3}',
        "",
    ],
)
def test_a_line_that_is_not_ours_stays_as_it_is(text: str) -> None:
    assert read(text) == LogLine(message=text)
    assert for_people(read(text)) == for_people(read(text), is_whole=True) == text


REQUEST = {
    "agent": "shop api", "prompt": 1200, "cached": 600, "generated": 12, "queued_ms": 7,
    "others_ms": 0, "ttft_ms": 470, "ended": "eos", "miss": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({}, "shop api  1.2k tokens, 50% reused, 12 generated, first token 470ms"),
        (
            {"agent": None, "prompt": 10, "cached": 0, "queued_ms": 2500, "others_ms": 1500}
            | {"ended": "cancelled", "miss": "new conversation"},
            "-  10 tokens, 0% reused, 12 generated, first token 470ms, waited 2.50s, "
            "waited 1.50s for other prompts, miss: new conversation, cancelled",
        ),
        ({"prompt": None}, "request finished"),
    ],
)
def test_a_request_is_one_sentence(changed: dict[str, object], sentence: str) -> None:
    line = LogLine(
        time=NOON, level="INFO", source=REQUESTS, message="request finished",
        fields=REQUEST | changed,
    )  # fmt: skip
    assert for_people(line) == f"12:30:05 {sentence}"
    named = for_people(with_name(line, {"shop api": "Fix the bill"}))
    assert named == for_people(line).replace("shop api", "Fix the bill")
    assert "queued_ms=" in for_people(line, is_whole=True)


def test_errors_are_those_of_loggers_and_of_commands() -> None:
    assert LogLine(level="ERROR", message="x").is_error
    assert read("error: the weights are not there").is_error
    assert not LogLine(level="WARNING", message="no error").is_error
