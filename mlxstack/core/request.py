"""Generation request in tokens, for scheduler and engine."""

from enum import IntEnum

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.interfaces import Constraint
from mlxstack.core.prompt_tokens import ImageSpan, PromptTokens


class Priority(IntEnum):
    """Priority of an endpoint or key tier; lower goes first.

    The body never sets it.
    """

    HIGH = 0
    NORMAL = 1
    LOW = 2


class SamplingParams(Struct, frozen=True):
    """Sampling parameters. Neutral values switch a rule off.

    `temperature` 0 is greedy; `logit_bias` holds (token, added logit) pairs; `window` is the number
    of last tokens that penalties look at; `top_logprobs` None requests no logprobs.
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
    """A tokenized prompt with its images, and its generation parameters.

    `slot` pins the request to a slot. `agent` names an explicit agent, whose requests run one after
    another; `session_hint` is a client's own name for the conversation, which may say where to look
    first but never delays a request; `display_name` is the explicit agent, or the name derived from
    the conversation. `deadline` and `arrived` are seconds of the monotonic clock. `salt` separates
    tenants' caches. `client` is the program that sent it, to learn what clients send back.
    `is_first_turn`: the conversation holds no answer yet. `prediction` is the answer that the
    client expects, to draft from. `request_id` is the id of the HTTP request, for the log.
    `is_for_peer`: another service asked for its KV, so no third one is asked for it.
    """

    id: str
    prompt: PromptTokens
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    eos: frozenset[int] = frozenset()
    slot: int | None = None
    agent: str | None = None
    session_hint: str | None = None
    client: str = ""
    display_name: str | None = None
    is_first_turn: bool = False
    priority: Priority = Priority.NORMAL
    use_cache: bool = True
    salt: str = ""
    prediction: tuple[int, ...] = ()
    request_id: str = ""
    constraint: Constraint | None = None
    arrived: float = 0.0
    deadline: float | None = None
    is_for_peer: bool = False

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
