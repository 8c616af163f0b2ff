"""Log lines of a service: written as JSON, rendered for people."""

import logging
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct

SUPERVISOR = "supervisor"
"""Source of the lines that a supervisor adds to the log of its worker."""

ERROR_PREFIX = "error: "


class LogLine(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Line of a log; `fields` are values for programs.

    A line that is not JSON, as of native code or of an older release, is a `message` alone.
    """

    time: datetime | None = None
    level: str = ""
    source: str = ""
    message: str
    fields: dict[str, Any] = {}
    traceback: str = ""

    @property
    def is_error(self) -> bool:
        """Whether a logger or a failed command wrote an error."""
        return self.level in {"ERROR", "CRITICAL"} or self.message.startswith(ERROR_PREFIX)


class JSONFormatter(logging.Formatter):
    """Formats a record as one JSON object; `extra={"fields": ...}` adds values."""

    def format(self, record: logging.LogRecord) -> str:
        """Line of a record, without its newline."""
        line = LogLine(
            time=datetime.fromtimestamp(record.created).astimezone(),
            level=record.levelname,
            source=record.name,
            message=record.getMessage(),
            fields=getattr(record, "fields", {}),
            traceback=self.formatException(record.exc_info) if record.exc_info else "",
        )
        return text_of(line)


def log_as_json() -> None:
    """Configure the loggers of a worker: JSON lines on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JSONFormatter())
    logging.basicConfig(handlers=[handler], level="INFO")
    logging.getLogger("httpx").setLevel("WARNING")


def text_of(line: LogLine) -> str:
    """A line as it is written."""
    return msgspec.json.encode(line).decode()


def read(text: str) -> LogLine:
    """A line as it was written."""
    try:
        return msgspec.json.decode(text, type=LogLine)
    except msgspec.DecodeError:
        return LogLine(message=text)


def for_people(line: LogLine, *, is_whole: bool = False) -> str:
    """A line with time and unusual level, or with all it holds."""
    if line.time is None:
        return line.message
    if is_whole:
        names = [f"{line.time:%Y-%m-%d %H:%M:%S}", line.level, line.source]
    else:
        names = [f"{line.time:%H:%M:%S}", "" if line.level == "INFO" else line.level]
    values = [f"{name}={value}" for name, value in line.fields.items()] if is_whole else []
    text = " ".join(filter(None, (*names, line.message, *values)))
    return f"{text}\n{line.traceback}" if line.traceback else text
