"""Log lines of a service: written as JSON, rendered for people."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.formatting import NONE, count, share, short_time

SUPERVISOR = "supervisor"
"""Source of the lines that a supervisor adds to the log of its worker."""
REQUESTS = "mlxstack.requests"
"""Source of the lines of finished requests."""
USUAL_ENDS = {"eos", "length"}

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


class RequestFigures(Struct, frozen=True):
    """Fields of a finished request that people read."""

    agent: str | None
    prompt: int
    cached: int
    generated: int
    queued_ms: float
    others_ms: float
    ttft_ms: float
    ended: str
    miss: str | None

    def __str__(self) -> str:
        """One short sentence."""
        parts = [
            f"{count(self.prompt)} tokens",
            f"{share(self.cached, self.prompt)} reused",
            f"{count(self.generated)} generated",
            f"first token {short_time(self.ttft_ms / 1000)}",
        ]
        if self.queued_ms >= 1000:
            parts.append(f"waited {short_time(self.queued_ms / 1000)}")
        if self.others_ms >= 1000:
            parts.append(f"waited {short_time(self.others_ms / 1000)} for other prompts")
        if self.miss is not None:
            parts.append(f"miss: {self.miss}")
        if self.ended not in USUAL_ENDS:
            parts.append(self.ended)
        return f"{self.agent or NONE}  {', '.join(parts)}"


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


def with_name(line: LogLine, names: Mapping[str, str]) -> LogLine:
    """A line of a request with the agent's name for its id."""
    agent = line.fields.get("agent")
    if not isinstance(agent, str) or agent not in names:
        return line
    return replace(line, fields=line.fields | {"agent": names[agent]})


def for_people(line: LogLine, *, is_whole: bool = False) -> str:
    """A line with time and unusual level, or with all it holds."""
    if line.time is None:
        return line.message
    message = line.message
    if is_whole:
        names = [f"{line.time:%Y-%m-%d %H:%M:%S}", line.level, line.source]
    else:
        if line.source == REQUESTS:
            with suppress(msgspec.ValidationError):
                message = str(msgspec.convert(line.fields, RequestFigures))
        names = [f"{line.time:%H:%M:%S}", "" if line.level == "INFO" else line.level]
    values = [f"{name}={value}" for name, value in line.fields.items()] if is_whole else []
    text = " ".join(filter(None, (*names, message, *values)))
    if line.traceback:
        return f"{text}\n{line.traceback}"
    return text
