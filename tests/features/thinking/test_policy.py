"""Layers of thinking bounds: which one decides, and what an effort becomes."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mlxstack.core.preset import ModelSpec, Preset, SamplingSpec
from mlxstack.core.thinking import ClientSpec, Effort, ThinkingBound, ThinkingSpec
from mlxstack.features.thinking.policy import (
    EFFORT_BUDGETS,
    TemplateThinking,
    ThinkingLayer,
    client_spec,
    decide,
    preset_layers,
)

LEVELS = TemplateThinking(has_levels=True, has_off=True)
SWITCH = TemplateThinking(has_off=True)
NOTHING = TemplateThinking()
budgets = st.none() | st.sampled_from([-1, 0, 1, 700, 5000, 100_000])
efforts = st.none() | st.sampled_from(list(Effort))
templates = st.sampled_from([LEVELS, SWITCH, NOTHING])
settings = st.tuples(budgets, efforts, st.none() | st.booleans())
stacks = st.lists(settings, max_size=5).map(
    lambda rows: [ThinkingLayer(f"layer {i}", *row) for i, row in enumerate(rows)]
)


def limit(bound: ThinkingBound) -> float:
    """Budget as a number that compares."""
    return float("inf") if bound.budget is None else bound.budget


@given(stacks, templates)
def test_the_strongest_number_decides_unless_a_stronger_word_lowers_it(
    layers: list[ThinkingLayer], template: TemplateThinking
) -> None:
    bound = decide(layers, template).bound
    numbered = next((layer for layer in layers if layer.budget is not None), None)
    if numbered is None or numbered.budget is None:
        return
    number = numbered.budget if numbered.budget >= 0 else float("inf")
    assert limit(bound) <= number
    if limit(bound) < number:
        assert bound.budget_by == bound.effort_by
        names = [layer.name for layer in layers]
        is_off = bound.effort is Effort.NONE
        assert is_off or names.index(bound.budget_by) < names.index(numbered.name)


@given(settings, stacks, templates)
def test_weaker_layers_do_not_change_what_a_layer_sets_whole(
    strongest: tuple[int | None, Effort | None, bool | None],
    weaker: list[ThinkingLayer],
    template: TemplateThinking,
) -> None:
    layer = ThinkingLayer("request", *strongest)
    if layer.budget is None or layer.effort is None or layer.is_on is None:
        return
    alone = decide([layer], template)
    together = decide([layer, *weaker], template)
    assert together.bound.budget == alone.bound.budget
    if layer.is_off or layer.has_level:
        assert together.bound == alone.bound and together.level == alone.level


@given(stacks, templates)
def test_off_is_the_templates_switch_or_a_budget_of_nothing(
    layers: list[ThinkingLayer], template: TemplateThinking
) -> None:
    decision = decide([ThinkingLayer("request", is_on=False), *layers], template)
    assert (decision.bound.effort, decision.bound.effort_by) == (Effort.NONE, "request")
    assert decision.level is None
    if template.has_off:
        assert decision.is_on is False
    else:
        assert decision.bound.budget == 0


def test_a_word_is_the_templates_level_or_a_number() -> None:
    layers = [ThinkingLayer("agent", effort=Effort.LOW), ThinkingLayer("preset", 5000)]
    leveled = decide(layers, LEVELS)
    assert leveled.level is Effort.LOW
    assert leveled.bound == ThinkingBound(5000, "preset", Effort.LOW, "agent")
    numbered = decide(layers, SWITCH)
    assert numbered.level is None
    low = EFFORT_BUDGETS[Effort.LOW]
    assert numbered.bound == ThinkingBound(low, "agent", Effort.LOW, "agent")
    high = [replace(layers[0], effort=Effort.HIGH), layers[1]]
    assert decide(high, SWITCH).bound.budget == 5000, "a word raises no number"


def test_the_number_of_a_layer_outranks_its_own_word() -> None:
    layers = [ThinkingLayer("agent", 2048, Effort.LOW)]
    assert decide(layers, SWITCH).bound == ThinkingBound(2048, "agent", Effort.LOW, "agent")


def test_an_effort_switches_on_what_a_weaker_layer_switches_off() -> None:
    layers = [ThinkingLayer("agent", effort=Effort.HIGH), ThinkingLayer("preset", is_on=False)]
    assert decide(layers, SWITCH).is_on is True
    assert decide(layers[:1], SWITCH).is_on is None


def test_minus_one_removes_the_bound_of_weaker_layers() -> None:
    layers = [ThinkingLayer("request", -1), ThinkingLayer("preset", 5000)]
    assert decide(layers, SWITCH).bound == ThinkingBound(None, "request")


def test_more_effort_has_more_tokens() -> None:
    numbers = [EFFORT_BUDGETS[effort] for effort in Effort]
    assert numbers == sorted(numbers) and len(set(numbers)) == len(numbers)


CLIENTS = {
    "claude-code": ClientSpec(thinking_budget=100, subagents=ThinkingSpec(effort=Effort.LOW)),
    "open*": ClientSpec(thinking_budget=200),
}


def test_a_client_is_its_product_whatever_it_calls_itself() -> None:
    for product in ("claude-cli", "claude-code", "Claude-CLI"):
        assert client_spec(CLIENTS, product) == ("claude-code", CLIENTS["claude-code"])
    assert client_spec(CLIENTS, "opencode") == ("open*", CLIENTS["open*"])
    assert client_spec({"codex": ClientSpec()}, "codex_exec") is not None
    for product in ("", "aider", "claude"):
        assert client_spec(CLIENTS, product) is None


def test_layers_of_a_preset_go_from_a_clients_sub_agents_to_sampling() -> None:
    preset = Preset(
        model=ModelSpec("demo"),
        sampling=SamplingSpec(thinking_budget=400, thinking=False),
        subagents=ThinkingSpec(thinking_budget=300),
        clients=CLIENTS,
    )
    own = list(preset_layers(preset, "claude-cli", is_subagent=False))
    assert [layer.name for layer in own] == ["client claude-code", "preset"]
    assert (own[-1].budget, own[-1].is_on) == (400, False)
    others = list(preset_layers(preset, "claude-cli", is_subagent=True))
    assert [layer.name for layer in others] == [
        "sub-agents of claude-code", "sub-agents", "client claude-code", "preset",
    ]  # fmt: skip
    assert [layer.budget for layer in others] == [None, 300, 100, 400]
