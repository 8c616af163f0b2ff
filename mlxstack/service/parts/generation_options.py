"""Options of a request: sampling, tool choice, limits."""

from enum import StrEnum

from msgspec import Struct

from mlxstack.core.request import Priority, SamplingParams
from mlxstack.text.grammar.response_format import ResponseConstraint

MAX_TOP_LOGPROBS = 20
UNLIMITED = -1
"""Token limit that means the context alone, as in llama-server."""


class ToolChoiceMode(StrEnum):
    """Tool choice: allowed, forbidden or required, with the same prompt."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


class GenerationOptions(Struct, frozen=True):
    """Options of a request, all but its messages.

    `bias_texts` are biases of each token of a text, in addition to those of `sampling`.
    `forced_tool` is the tool that a required call must name, `allowed_tools` the only ones that
    calls may name if there are any, `thinking_budget` the most tokens of reasoning. `max_tokens`
    None takes the preset's, UNLIMITED runs until the model ends or the context is full, 0 only
    computes the prompt. `slot` pins; `agent` is an explicit agent, `session_hint` a client's name
    for the conversation, `client` the program that sent the request. `is_one_call` ends the reply
    after its first tool call, whose id begins with `call_prefix`. `has_progress` adds the progress
    of the prompt as parts. `predicted_text` is the answer that the client expects. `omitted_tools`
    are the tools of a vendor's servers, which are not offered to the model.
    """

    id: str
    max_tokens: int | None = None
    sampling: SamplingParams = SamplingParams()
    bias_texts: tuple[tuple[str, float], ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    slot: int | None = None
    agent: str | None = None
    session_hint: str | None = None
    client: str = ""
    use_cache: bool = True
    tool_choice: ToolChoiceMode = ToolChoiceMode.AUTO
    forced_tool: str | None = None
    allowed_tools: tuple[str, ...] = ()
    response_format: ResponseConstraint | None = None
    thinking_budget: int | None = None
    call_prefix: str = "call_"
    is_one_call: bool = False
    has_progress: bool = False
    priority: Priority = Priority.NORMAL
    salt: str = ""
    predicted_text: str = ""
    omitted_tools: tuple[str, ...] = ()
    request: str = ""
