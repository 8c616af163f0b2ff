"""One generation request in tokens, as the scheduler and the engine see it."""

from enum import IntEnum

from msgspec import Struct

from mlxstack.core.ports import Constraint


class Priority(IntEnum):
    """Lower goes first. Given by the endpoint or the key's tier, never by the body."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


class SamplingParams(Struct, frozen=True):
    """How the next token is chosen. Neutral values switch a rule off.

    `temperature` 0 is greedy; `logit_bias` holds (token, added logit) pairs; `window` is how
    many last tokens the penalties look at; `top_logprobs` None asks for no logprobs at all.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    window: int = 64
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int | None = None


class Request(Struct, frozen=True):
    """A prompt of tokens and how to go on from it.

    `slot` pins the ask to a seat. `agent` names an explicit agent, whose asks run one after
    another; `hint` is a client's own name for the conversation, which may say where to look
    first but never makes anybody wait; `name` is what people see: the explicit agent, or the
    name that the conversation was given for its content. `cuts` are token positions worth a
    checkpoint, ascending.
    `deadline` and `arrived` are seconds of the monotonic clock. `salt` separates tenants' caches.
    `is_first_turn`: the model has said nothing in this conversation yet.
    `request` is the id of the HTTP request, for the log. `guide` rules what may be chosen.
    """

    id: str
    tokens: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    eos: frozenset[int] = frozenset()
    slot: int | None = None
    agent: str | None = None
    session_hint: str | None = None
    display_name: str | None = None
    is_first_turn: bool = False
    priority: Priority = Priority.NORMAL
    use_cache: bool = True
    checkpoint_positions: tuple[int, ...] = ()
    salt: str = ""
    request_id: str = ""
    constraint: Constraint | None = None
    arrived: float = 0.0
    deadline: float | None = None
