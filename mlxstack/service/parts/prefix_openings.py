"""First words of cached prefixes, by an agent's prompt or their tokens."""

from collections.abc import Sequence

from msgspec.structs import replace

from mlxstack.core.conversation import Role
from mlxstack.core.status import PrefixView
from mlxstack.service.parts.agent_registry import AgentRegistry, first_words
from mlxstack.service.parts.text_processor import TextProcessor

ROLES = {*Role, "developer", "model"}
"""Words that templates write before a message."""


def with_openings(
    prefixes: Sequence[PrefixView], registry: AgentRegistry, text_processor: TextProcessor | None
) -> tuple[PrefixView, ...]:
    """Prefixes with their first words in place of their first tokens."""
    return tuple(_with_opening(prefix, registry, text_processor) for prefix in prefixes)


def _with_opening(
    prefix: PrefixView, registry: AgentRegistry, text_processor: TextProcessor | None
) -> PrefixView:
    titles = (registry.title(agent) for agent in prefix.agents)
    opening = next((title.opening for title in titles if title is not None and title.opening), "")
    if not opening and prefix.head and text_processor is not None:
        opening = opening_of(text_processor.plain_text(prefix.head))
    return replace(prefix, opening=opening, head=())


def opening_of(text: str) -> str:
    """First words of a prompt, without the role of its first message."""
    first, _, remainder = text.strip().partition("\n")
    return first_words(remainder if first.strip() in ROLES else text)
