"""Options of a request: sampling, tool choice, limits."""

from enum import StrEnum

from msgspec import Struct

from mlxstack.core.loops import RepeatedCall
from mlxstack.core.request import Caller, SamplingParams
from mlxstack.core.thinking import ThinkingBound
from mlxstack.text.grammar.schema_grammar import ResponseConstraint

MAX_TOP_LOGPROBS = 20


class ToolChoiceMode(StrEnum):
    """Tool choice: allowed, forbidden or required, with the same prompt."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


class GenerationOptions(Struct, frozen=True):
    """Options of a request, all but its messages."""

    id: str
    caller: Caller = Caller()
    max_tokens: int | None = None
    """None takes the preset's; UNLIMITED ends with the model or the context; 0 prefills only."""
    sampling: SamplingParams = SamplingParams()
    bias_texts: tuple[tuple[str, float], ...] = ()
    """Biases of each token of a text, in addition to those of `sampling`."""
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    slot: int | None = None
    """Slot that the request is pinned to."""
    use_cache: bool = True
    drops_kv: bool | None = None
    """Whether its KV is dropped at its end; None leaves it to the kind of its turn."""
    tool_choice: ToolChoiceMode = ToolChoiceMode.AUTO
    forced_tool: str | None = None
    """Tool that a required call must name."""
    allowed_tools: tuple[str, ...] = ()
    """The only tools that calls may name; all may if empty."""
    response_format: ResponseConstraint | None = None
    thinking_budget: int | None = None
    """Maximum number of reasoning tokens; UNLIMITED has none, None takes a default."""
    thinking: ThinkingBound | None = None
    """Bound of reasoning in force, where the model reasons."""
    max_context: int | None = None
    """Maximum tokens of prompt and answer together, beside the context of a slot."""
    stop_loops: bool = False
    """End the answer when its tokens repeat exactly."""
    repeated_call: RepeatedCall | None = None
    call_prefix: str = "call_"
    """Beginning of the ids of tool calls."""
    is_one_call: bool = False
    """The reply ends after its first tool call."""
    has_progress: bool = False
    """Add the progress of the prompt as parts."""
    predicted_text: str = ""
    """Answer that the client expects."""
    omitted_tools: tuple[str, ...] = ()
    """Tools of a vendor's servers, which are not offered to the model."""
