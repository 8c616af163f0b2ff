"""Options of a request: sampling overrides, tool choice, limits."""

from enum import StrEnum

from msgspec import Struct

from mlxstack.core.request import Priority
from mlxstack.text.grammar.response_format import ResponseConstraint

MAX_TOP_LOGPROBS = 20
UNLIMITED = -1
"""Token limit that means the context alone, as in llama-server."""


class SamplingOverrides(Struct, frozen=True):
    """Sampling fields of a request, None where it has none.

    `bias_texts` are biases of each token of a text, in addition to `logit_bias` of token ids.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    window: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    bias_texts: tuple[tuple[str, float], ...] = ()
    top_logprobs: int | None = None


class ToolChoiceMode(StrEnum):
    """Tool choice: allowed, forbidden or required, with the same prompt."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


class GenerationOptions(Struct, frozen=True):
    """Options of a request, all but its messages.

    `forced_tool` is the tool that a required call must name, `allowed_tools` the only ones that
    calls may name if there are any, `thinking_budget` the most tokens of reasoning. `max_tokens`
    None takes the preset's, UNLIMITED runs until the model ends or the context is full, 0 only
    computes the prompt. `slot` pins; `agent` is an explicit agent, `session_hint` a client's name
    for the conversation, `client` the program that sent the request, `display_name` the shown name
    of one without an explicit agent. `is_one_call` ends the reply after its first tool call, whose
    id begins with `call_prefix`. `has_progress` adds the progress of the prompt as parts.
    `predicted_text` is the answer that the client expects.
    """

    id: str
    max_tokens: int | None = None
    sampling: SamplingOverrides = SamplingOverrides()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    slot: int | None = None
    agent: str | None = None
    session_hint: str | None = None
    client: str = ""
    display_name: str | None = None
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
    request: str = ""
