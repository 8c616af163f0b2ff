"""Bound and effort of reasoning: as settings, and as decided for an answer."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct, field

from mlxstack.core.strict import Strict


class Effort(StrEnum):
    """Effort of reasoning, from least to most; `none` switches thinking off."""

    NONE = "none"
    MINIMAL = "minimal"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"
    XHIGH = "xhigh"
    MAX = "max"


class ThinkingSpec(Strict, frozen=True):
    """Bound and effort of reasoning; None is that of a weaker layer.

    Layers, the strongest first: request, agent, sub-agents of a client, sub-agents, client,
    `sampling`.
    """

    thinking_budget: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(
            description="Maximum tokens of the thoughts of an answer; then the model's own mark "
            "closes them, and the answer follows. 0 has none, -1 no maximum."
        ),
    ] = None
    effort: Annotated[
        Effort | None,
        Meta(
            description="Effort of reasoning: the chat template's own switch where it has one, "
            "else a thinking budget (docs/models.md)."
        ),
    ] = None


class ClientSpec(ThinkingSpec, frozen=True):
    """Settings of the requests of one program."""

    subagents: Annotated[ThinkingSpec, Meta(description="The same for its sub-agents.")] = field(
        default_factory=ThinkingSpec
    )


class ThinkingBound(Struct, frozen=True):
    """Bound and effort of one answer's reasoning, with their layers."""

    budget: int | None = None
    """Maximum number of reasoning tokens; None has none."""
    budget_by: str = ""
    """"request", "agent", "client NAME", "preset" ...; empty where no layer sets one."""
    effort: Effort | None = None
    effort_by: str = ""

    @property
    def description(self) -> str:
        """Bound and effort in words, each with its layer."""
        parts: list[str] = []
        if self.budget is not None:
            parts.append(f"at most {self.budget:,} tokens ({self.budget_by})")
        if self.effort is not None:
            parts.append(f"effort {self.effort} ({self.effort_by})")
        return ", ".join(parts) or "no bound"
