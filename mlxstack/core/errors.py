"""Error hierarchy with user-facing messages; each API dialect adds its envelope.

StackError
├── BadRequest             the caller sent something that cannot work
│   ├── TooLong            the prompt does not fit the context of a slot
│   ├── InvalidSlot        no slot has this number
│   ├── TemplateOverrun    the chat template exceeds a limit for this conversation
│   ├── TooLarge           the body is bigger than the service accepts
│   ├── UnknownCoding      the body is compressed in a way that is not decoded here
│   ├── UpgradeRefused     the request asks for another protocol
│   ├── NoThreads          the conversation would have to be stored here
│   ├── UnknownResponse    an earlier response would have to be stored here
│   └── Unsupported        a feature that this model or preset does not serve
├── Unauthorized           no key, or a wrong one
├── Forbidden              a known caller without the permission
├── NotFound               no such file, agent or path
│   ├── WrongMethod        the path exists, for other methods
│   └── UnknownModel       a model of this name is not served, and the preset is strict
├── Conflict               the thing is in a state that forbids the act
│   └── Taken              a name or a port of this computer that is in use
├── Busy                   the queue is full; come back later
│   └── OutOfMemory        the KV budget cannot hold this now
├── Loading                the model is not there yet
├── Broken                 the engine failed; the request was not at fault
│   └── DeviceError        the GPU failed; the KV of running requests is lost
├── DiskFull               the disk, or the share of it that the preset allows, is full
├── Damaged                a stored file is not what it claims to be
│   ├── Unreadable         the disk would not read it now; it may be sound
│   └── UnknownVersion     another release wrote it; it may be sound
└── SetupError             the preset or the machine cannot start this service
    └── DoesNotFit         the service needs more memory than the running ones leave
"""


class StackError(Exception):
    """An error with cause and remedy, in one sentence or two."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class BadRequest(StackError):
    """`param` is the path of the offending field, such as `messages[0].content`."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class TooLong(BadRequest):
    """Prompt of `got` tokens in `param`, for a context of `limit`."""

    def __init__(self, got: int, limit: int, param: str = "messages") -> None:
        super().__init__(f"the prompt has {got} tokens, its context holds {limit}", param)
        self.got = got
        self.limit = limit


class TemplateOverrun(BadRequest):
    """Rendering beyond a limit; `reason` is the predicate that names it."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the chat template of this model {reason} for this conversation; send a shorter "
            "one, or serve a model with another template"
        )
        self.reason = reason


class TooLarge(BadRequest):
    """A body of more bytes than the service reads."""


class UnknownCoding(BadRequest):
    """A `Content-Encoding` that is not among the `known` ones."""

    def __init__(self, coding: str, supported: str) -> None:
        super().__init__(
            f"the body has the content-encoding {coding!r}, which is not decoded here; "
            f"known are {supported}"
        )
        self.known = supported


class UpgradeRefused(BadRequest):
    """A request for another protocol, such as a WebSocket."""


class NoThreads(BadRequest):
    """A request of a thread, which Anthropic's servers would store."""

    def __init__(self) -> None:
        super().__init__(
            "thread is not supported: no conversations are stored here; send all messages, "
            "without it",
            "thread",
        )


class UnknownResponse(BadRequest):
    """A reference to a response, none being stored."""

    def __init__(self, name: str) -> None:
        # Clients match these words and send the whole input.
        super().__init__(
            f"Previous response with id {name!r} not found: no responses are stored here; "
            "send the whole input",
            "previous_response_id",
        )


class Unsupported(BadRequest):
    """A feature that is off, or that this model does not have."""


class InvalidSlot(BadRequest):
    """A slot number outside of the `n_slots` of this service."""

    def __init__(self, slot: int, n_slots: int) -> None:
        slots = f"slots 0 to {n_slots - 1}" if n_slots > 1 else "slot 0 only"
        super().__init__(f"Invalid slot ID {slot}: this service has {slots}", "id_slot")


class Unauthorized(StackError):
    """Missing or wrong API key."""


class Forbidden(StackError):
    """The API key does not permit the call."""


class NotFound(StackError):
    """Unknown file, agent or path."""


class WrongMethod(NotFound):
    """A path that takes only the `allowed` methods."""

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class UnknownModel(NotFound):
    """No model of this name is served, and the preset is strict."""


class Conflict(StackError):
    """The thing is in a state that forbids the act."""


class Taken(Conflict):
    """A name or a port of this computer that is taken."""


class Busy(StackError):
    """No capacity now; retry after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class OutOfMemory(Busy):
    """The KV budget cannot hold this request beside the running ones."""


class Loading(StackError):
    """The model is still being loaded."""


class Broken(StackError):
    """The engine failed; the request was not at fault."""


class DeviceError(Broken):
    """The GPU failed a computation; KV of running requests is lost."""


class DiskFull(StackError):
    """Disk full, or the preset's share of it."""


class Damaged(StackError):
    """A stored file is truncated, altered, or foreign."""


class Unreadable(Damaged):
    """Read error of a stored file, whose content may be sound."""


class UnknownVersion(Damaged):
    """Stored file of a format version that this release cannot read.

    It counts as a miss and is left as it is: the release that wrote it may come back.
    """


class SetupError(StackError):
    """The preset or the machine cannot start this service."""


class DoesNotFit(SetupError):
    """A service needs more memory than the running ones leave."""


def describe_error(error: Exception, operation: str) -> StackError:
    """A StackError as it is; any other error as Broken, during `operation`."""
    if isinstance(error, StackError):
        return error
    return Broken(f"the engine failed on {operation}: {type(error).__name__}: {error}")
