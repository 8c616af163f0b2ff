"""Bound and effort of reasoning, decided by layers of settings.

Pure. The layers are, the strongest first: request, agent, sub-agents of a client, sub-agents,
client, preset.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.preset import Preset
from mlxstack.core.thinking import ClientSpec, Effort, ThinkingBound, ThinkingSpec

EFFORT_BUDGETS: dict[Effort, int] = {
    Effort.NONE: 0,
    Effort.MINIMAL: 512,
    Effort.LOW: 1024,
    Effort.MEDIUM: 8192,
    Effort.HIGH: 24_576,
    Effort.XHIGH: 32_768,
    Effort.MAX: 65_536,
}
"""Tokens for a template without a switch for effort.

Low, medium and high are those of Gemini (ai.google.dev/gemini-api/docs/openai).
"""

PROGRAMS = {
    "claude-code": ("claude-cli", "claude-code"),
    "codex": ("codex*",),
    "qwen-code": ("qwencode", "qwen-code"),
}
"""Products in the User-Agent of clients that call themselves otherwise."""


class ThinkingLayer(Struct, frozen=True):
    """Settings of one layer; None leaves a value to weaker layers."""

    name: str
    budget: int | None = None
    """Maximum number of reasoning tokens; negative: none."""
    effort: Effort | None = None
    is_on: bool | None = None
    """Whether the model reasons at all."""

    @property
    def is_off(self) -> bool:
        """Whether this layer switches thinking off."""
        return self.is_on is False or (self.is_on is None and self.effort is Effort.NONE)

    @property
    def has_level(self) -> bool:
        """Whether it sets an effort other than none."""
        return self.effort is not None and self.effort is not Effort.NONE

    @property
    def asks_for_thoughts(self) -> bool:
        """Whether this layer expects thoughts."""
        return self.is_on is True or self.has_level or bool(self.budget)


class TemplateThinking(Struct, frozen=True):
    """Switches of a chat template."""

    has_levels: bool = False
    """It has one for levels of effort."""
    has_off: bool = False
    """It has one that switches thinking off."""


class ThinkingDecision(Struct, frozen=True):
    """Decision for one request."""

    bound: ThinkingBound
    level: Effort | None = None
    """Level for the template's own switch; None leaves it as it is."""
    is_on: bool | None = None
    """State for the template's own switch; None leaves it as it is."""


def decide(layers: Sequence[ThinkingLayer], template: TemplateThinking) -> ThinkingDecision:
    """Decide budget, effort and switch by layers, the strongest first.

    A layer's number outranks those of weaker layers. A word of effort without a switch in the
    template is a number too: it lowers a weaker layer's, and yields to its own layer's.
    """
    off = _off_layer(layers)
    if off is not None and not template.has_off:
        return ThinkingDecision(ThinkingBound(0, off.name, Effort.NONE, off.name))
    if off is not None:
        bound = _numbered(layers)
        return ThinkingDecision(replace(bound, effort=Effort.NONE, effort_by=off.name), is_on=False)
    leveled = next((layer for layer in layers if layer.has_level), None)
    if leveled is None:
        return ThinkingDecision(_numbered(layers))
    bound = _numbered(layers) if template.has_levels else _lowered(layers, leveled)
    bound = replace(bound, effort=leveled.effort, effort_by=leveled.name)
    level = leveled.effort if template.has_levels else None
    return ThinkingDecision(bound, level, _is_switched_on(layers, leveled))


def _off_layer(layers: Sequence[ThinkingLayer]) -> ThinkingLayer | None:
    """Layer that switches thinking off, unless a stronger one expects thoughts."""
    for layer in layers:
        if layer.is_off:
            return layer
        if layer.asks_for_thoughts:
            return None
    return None


def _numbered(layers: Iterable[ThinkingLayer]) -> ThinkingBound:
    """Bound by the number of the strongest layer that has one."""
    for layer in layers:
        if layer.budget is not None:
            budget = None if layer.budget < 0 else layer.budget
            return ThinkingBound(budget, layer.name)
    return ThinkingBound()


def _lowered(layers: Sequence[ThinkingLayer], leveled: ThinkingLayer) -> ThinkingBound:
    """Bound where the effort of the layer `leveled` is a number too."""
    assert leveled.effort is not None
    position = layers.index(leveled)
    stronger = _numbered(layers[: position + 1])
    if stronger.budget_by:
        return stronger
    by_effort = ThinkingBound(EFFORT_BUDGETS[leveled.effort], leveled.name)
    weaker = _numbered(layers[position + 1 :])
    if weaker.budget is None or weaker.budget > EFFORT_BUDGETS[leveled.effort]:
        return by_effort
    return weaker


def _is_switched_on(layers: Sequence[ThinkingLayer], leveled: ThinkingLayer) -> bool | None:
    """True where an effort outranks a layer that switches thinking off."""
    weaker = layers[layers.index(leveled) + 1 :]
    return True if any(layer.is_off for layer in weaker) else None


def client_spec(clients: Mapping[str, ClientSpec], product: str) -> tuple[str, ClientSpec] | None:
    """Name and settings of the first client with this product."""
    if not product:
        return None
    for name, spec in clients.items():
        patterns = PROGRAMS.get(name.lower(), (name,))
        if any(fnmatchcase(product.lower(), pattern.lower()) for pattern in patterns):
            return name, spec
    return None


def preset_layers(preset: Preset, product: str, *, is_subagent: bool) -> Iterator[ThinkingLayer]:
    """Layers of a preset for a program, the strongest first."""
    client = client_spec(preset.clients, product)
    if client is not None and is_subagent:
        name, spec = client
        yield _layer(f"sub-agents of {name}", spec.subagents)
    if is_subagent:
        yield _layer("sub-agents", preset.subagents)
    if client is not None:
        name, spec = client
        yield _layer(f"client {name}", spec)
    sampling = preset.sampling
    yield replace(_layer("preset", sampling), is_on=sampling.thinking)


def _layer(name: str, spec: ThinkingSpec) -> ThinkingLayer:
    return ThinkingLayer(name, spec.thinking_budget, spec.effort)
