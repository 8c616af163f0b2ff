"""Generation request in tokens, for scheduler and engine."""

from enum import IntEnum, StrEnum

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.interfaces import Constraint
from mlxstack.core.loops import RepeatedCall
from mlxstack.core.prompt_tokens import ImageSpan, PromptTokens
from mlxstack.core.thinking import ThinkingBound


class Priority(IntEnum):
    """Priority of an endpoint or key tier; lower goes first.

    The body never sets it.
    """

    HIGH = 0
    NORMAL = 1
    LOW = 2


UNLIMITED = -1
"""Token limit that means the context alone, as in llama-server."""


class TurnKind(StrEnum):
    """Kind of a turn: whether a person waits for its answer."""

    PERSON = "person"
    """The default: no mark of another kind."""
    SUBAGENT = "sub-agent"
    SCRIPT = "script"
    """A client that runs without a terminal: scripts, cron jobs."""
    HELPER = "helper"
    """A title, a summary or a probe of a client, of which no later prompt is a continuation."""


class TurnReading(Struct, frozen=True):
    """Kind of a turn, and whether later ones cannot use its KV."""

    kind: TurnKind = TurnKind.PERSON
    drops_kv: bool = False


PERSON_TURN = TurnReading()


class SamplingParams(Struct, frozen=True):
    """Sampling parameters. Neutral values switch a rule off."""

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    window: int = 64
    """Number of last tokens that penalties look at."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, added logit) pairs."""
    top_logprobs: int | None = None
    """Number of alternatives of each token; None requests no logprobs."""


class Caller(Struct, frozen=True):
    """Sender of a request."""

    agent: str | None = None
    """Explicit agent, whose requests run one after another."""
    session_hint: str | None = None
    """The client's own name for the conversation: where to look first; delays no request."""
    client: str = ""
    """Name of the program."""
    version: str = ""
    """Version of the program."""
    salt: str = ""
    """Separates the KV of tenants."""
    priority: Priority = Priority.NORMAL
    turn_kind: TurnKind = TurnKind.PERSON
    request_id: str = ""
    """Id of the HTTP request, for the log."""
    marks: tuple[tuple[str, str], ...] = ()
    """Headers by which clients mark their turns, names in lower case."""


class Request(Struct, frozen=True):
    """A tokenized prompt with its images, and its generation parameters."""

    id: str
    prompt: PromptTokens
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    eos: frozenset[int] = frozenset()
    caller: Caller = Caller()
    slot: int | None = None
    """Slot that the request is pinned to."""
    display_name: str | None = None
    """The explicit agent, or the name derived from the conversation."""
    is_first_turn: bool = False
    """The conversation holds no answer yet."""
    use_cache: bool = True
    drops_kv: bool = False
    """Its KV goes at its end, and its slot gets the context back that was in it."""
    prediction: tuple[int, ...] = ()
    """Answer that the client expects, to draft from."""
    constraint: Constraint | None = None
    thought_end: Constraint | None = None
    """Constraint of a free answer from where its thought is to be closed."""
    stop_loops: bool = False
    """End the answer, or its thought, when its tokens repeat exactly."""
    arrived: float = 0.0
    """Seconds of the monotonic clock, as is `deadline`."""
    deadline: float | None = None
    thinking: ThinkingBound | None = None
    """Bound of its reasoning, where the model reasons."""
    repeated_call: RepeatedCall | None = None
    is_background: bool = False
    """Background work: its prefill chunks are as short as beside decoding requests."""
    is_for_peer: bool = False
    """Another service asked for its KV, so no third one is asked for it."""

    @property
    def agent(self) -> str | None:
        """Explicit agent of the caller."""
        return self.caller.agent

    @property
    def salt(self) -> str:
        """Salt of the caller's KV."""
        return self.caller.salt

    @property
    def priority(self) -> Priority:
        """Priority of the caller."""
        return self.caller.priority

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token ids of the prompt, virtual ones for its images."""
        return self.prompt.tokens

    @property
    def images(self) -> tuple[ImageSpan, ...]:
        """Ranges of the prompt's images, ascending."""
        return self.prompt.images

    @property
    def checkpoint_positions(self) -> tuple[int, ...]:
        """Ascending token positions worth a checkpoint."""
        return self.prompt.checkpoint_positions


def with_image_ends(request: Request) -> Request:
    """The request with a checkpoint position at the end of each image."""
    if not request.images:
        return request
    ends = {image.end for image in request.images}
    positions = tuple(sorted(ends.union(request.checkpoint_positions)))
    return replace(request, prompt=replace(request.prompt, checkpoint_positions=positions))
