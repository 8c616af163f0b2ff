"""Drafts change how many passes an answer takes, and nothing else."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, QuantizedKVCache, RotatingKVCache
from msgspec.structs import replace

from mlxstack.core.engine_events import FinishReason, TokenSampled
from mlxstack.core.preset import KVSpec, ModelSpec, SlotSpec, Speculation
from mlxstack.core.request import SamplingParams
from mlxstack.engine import loop as engine_loop
from mlxstack.engine.decode.batch import Batch
from mlxstack.engine.decode.batch_row import BatchRow
from mlxstack.engine.decode.sampler import Sampler
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.loading import loader
from mlxstack.engine.model import cache_adapters
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.runner import ModelRunner
from mlxstack.engine.stats import EngineStats
from mlxstack.features.drafts.engine.draft_coordinator import DraftCoordinator
from mlxstack.features.drafts.engine.mtp_drafter import MTPDrafter
from mlxstack.features.formats.grammar.constraint import ConstraintLayout, GrammarConstraint
from mlxstack.policy.pass_layout import UNMEASURED, PassLayout, RowMode, WidthCosts
from mlxstack.text.grammar.compiler import GrammarCompiler
from tests.conftest import ModelOf
from tests.engine.harness import Driver, check_context, draft_freely, preset_of, prompt, running
from tests.features.drafts.mtp_models import add_head
from tests.matrix.builder import build
from tests.matrix.checks import WIDTH, ScriptedDrafter
from tests.matrix.configs import VOCAB
from tests.repetition import in_soak
from tests.tolerance import MODEL_ROUNDING, distance

pytestmark = pytest.mark.mlx
KINDS = ["tiny-swa", "tiny-hybrid", "tiny-8bit", "tiny-mla", "tiny-later", "tiny", "tiny-sinks"]
PRECISIONS = {
    "tiny-8bit": KVSpec(bits=8, group_size=32),
    "tiny-later": KVSpec(bits=4, group_size=32, quantized_start=100),
}
TYPES = ["llama4", "falcon_h1", "gemma3n"]
"""Models whose layers are chunked, have several caches, or share one."""
N_TOKENS = 18
LENGTHS = (30, 61, 97)
"""One context crosses the window of 64 while it decodes, one the position of quantization."""


class Stand:
    """A model of one kind, and prompts with their answers computed alone, one token at a time."""

    def __init__(self, model: Any, kv: KVSpec, rows: RowMode = RowMode.RAGGED) -> None:
        self.model = model
        self.runner = ModelRunner(model, rows=rows)
        self.cache_factory = CacheFactory(model, kv)
        self.prompts = [tuple(t % VOCAB for t in prompt(n, seed=n)) for n in LENGTHS]
        self.references: dict[tuple[int, ...], SlotContext] = {}
        self.answers = [self.run([p], [None])[0][0] for p in self.prompts]

    def fed(self, tokens: tuple[int, ...]) -> SlotContext:
        """A context of these tokens: the prompt's in one pass, the answer's one by one."""
        context = SlotContext(self.cache_factory)
        n = next(len(p) for p in self.prompts if p == tokens[: len(p)] or p[:-1] == tokens) - 1
        for a, b in pairwise([0, n, *range(n + 1, len(tokens) + 1)]):
            self.model(mx.array([tokens[a:b]]), cache=context.caches)
            context.extend(tokens[a:b])
            context.evaluate()
        return context

    def reference(self, tokens: tuple[int, ...]) -> SlotContext:
        """A context of these tokens that must not be changed."""
        if tokens not in self.references:
            self.references[tokens] = self.fed(tokens)
        return self.references[tokens]

    def run(
        self, prompts: list[tuple[int, ...]], patterns: list[list[int] | None]
    ) -> tuple[list[list[int]], list[SlotContext], Batch]:
        """Answers of rows that decode together; those with a pattern are drafted for."""
        batch = Batch(self.runner, DraftCoordinator(self.runner))
        contexts = [self.fed(tokens[:-1]) for tokens in prompts]
        each = zip(prompts, contexts, patterns, strict=True)
        for slot, (tokens, context, pattern) in enumerate(each):
            answer = self.answers[self.prompts.index(tokens)] if pattern else []
            drafter = ScriptedDrafter(list(tokens), answer, pattern) if pattern else None
            sampler = Sampler(SamplingParams(), tokens, 0)
            batch.join(
                BatchRow(slot, context, sampler, tokens[-1], N_TOKENS, drafter, request=str(slot))
            )
        answers: list[list[int]] = [[] for _ in prompts]
        while batch.in_flight or any(row.n_left for row in batch.rows):
            for sampled in batch.step():
                answers[int(sampled.request)].append(sampled.token)
        return answers, contexts, batch


@pytest.fixture(scope="module", params=[*KINDS[:3], *TYPES[:1], *in_soak(*KINDS[3:], *TYPES[1:])])
def stand(request: pytest.FixtureRequest, model_of: ModelOf) -> Stand:
    if request.param in TYPES:
        rows = RowMode.ALONE if request.param == "llama4" else RowMode.RAGGED
        return Stand(build(request.param), KVSpec(), rows)
    kv = PRECISIONS.get(request.param)
    folder = model_of("tiny" if kv else request.param)
    return Stand(loader.load(ModelSpec(id=str(folder)), kv or KVSpec()).model, kv or KVSpec())


PATTERN = st.lists(st.integers(0, WIDTH), min_size=1, max_size=6)


@settings(max_examples=6)
@given(patterns=st.lists(st.none() | PATTERN, min_size=len(LENGTHS), max_size=len(LENGTHS)))
def test_after_a_rollback_kv_is_as_if_refused_tokens_had_never_been_fed(
    stand: Stand, patterns: list[list[int] | None]
) -> None:
    answers, contexts, batch = stand.run(stand.prompts, patterns)
    assert answers == stand.answers
    for context, tokens, answer in zip(contexts, stand.prompts, answers, strict=True):
        check_context(context)
        n_answered = len(context) - len(tokens)
        assert tuple(context.tokens) == (*tokens, *answer)[: len(context)]
        assert N_TOKENS - WIDTH - 3 <= n_answered < N_TOKENS
        reference = stand.reference(tuple(context.tokens))
        for leaf, other in zip(context.leaves, reference.leaves, strict=True):
            for a, b in zip(stored(leaf), stored(other), strict=True):
                if isinstance(leaf, QuantizedKVCache):
                    assert mx.allclose(a, b, rtol=1e-3, atol=largest_step(leaf)).item(), type(leaf)
                else:
                    assert distance(a, b) <= MODEL_ROUNDING, type(leaf)
    if all(pattern and min(pattern) > 0 for pattern in patterns):
        n_passes = 1 if stand.runner.rows is RowMode.RAGGED else len(patterns)
        assert batch.n_calls < N_TOKENS * n_passes


def largest_step(leaf: QuantizedKVCache) -> float:
    """Of its quantized numbers; rounding may send one to the next."""
    scales = [mx.abs(a[1]).max().item() for a in (leaf.keys, leaf.values)]
    return 1.01 * max(scales)


def stored(leaf: Any) -> list[mx.array]:
    """All that later tokens can see, in the order of the tokens."""
    if isinstance(leaf, ArraysCache):
        return [a for a in leaf.cache if a is not None]
    if isinstance(leaf, RotatingKVCache):
        n = min(leaf.offset, leaf.max_size - 1)
        return [leaf._temporal_order(a)[..., -n:, :] for a in (leaf.keys, leaf.values)]
    if isinstance(leaf, ChunkedKVCache):
        end = leaf.offset - leaf.start_position
        start = end - leaf.offset % leaf.chunk_size
        return [a[..., start:end, :] for a in (leaf.keys, leaf.values)]
    parts = cache_adapters.span(leaf, 0, leaf.offset)
    if len(parts) == 2:
        return parts
    bits = {"group_size": leaf.group_size, "bits": leaf.bits}
    return [mx.dequantize(*parts[:3], **bits), mx.dequantize(*parts[3:], **bits)]


REPEATED = [prompt(n, seed=n) * 3 for n in (5, 17, 40, 48)]
FEW = tuple((token, 60.0) for token in (7, 8, 9))
"""A bias that leaves few tokens, so that a random model repeats itself now and then."""
RULES = [
    SamplingParams(logit_bias=FEW),
    SamplingParams(temperature=0.3, seed=1, top_p=0.9, logit_bias=FEW),
    SamplingParams(temperature=0.2, seed=2, top_k=20, repetition_penalty=1.05, logit_bias=FEW),
    SamplingParams(temperature=0.4, seed=3, min_p=0.05, presence_penalty=0.2),
    SamplingParams(frequency_penalty=0.1, top_logprobs=2, logit_bias=FEW),
    SamplingParams(top_logprobs=3),
    SamplingParams(temperature=0.1, seed=4),
    SamplingParams(temperature=0.3, seed=5, top_logprobs=2),
]


DRAFTED = ["tiny-swa + tiny-swa", "tiny-hybrid + tiny", "tiny-hybrid + mtp", "tiny-mla + mtp"]
"""Models with a draft model: itself, one that knows nothing of it, or a random MTP head."""


@pytest.fixture(
    scope="module",
    params=["tiny-hybrid", DRAFTED[0], *in_soak("demo", "tiny-swa", *KINDS[2:], *DRAFTED[1:])],
)
def pair(
    request: pytest.FixtureRequest, model_of: ModelOf, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Driver, Driver]]:
    """Engines with and without drafts; the first drafts whatever a pass costs."""
    kind, _, draft = request.param.partition(" + ")
    kv = PRECISIONS.get(kind)
    has_head = draft == "mtp"
    draft = draft.replace("mtp", "")
    found = [name if kv or name in {"demo", ""} else str(model_of(name)) for name in (kind, draft)]
    model = Path(str(model_of("tiny")) if kv else found[0])
    if has_head:
        model = add_head(model, tmp_path_factory.mktemp("head") / kind)
    without = preset_of(model, kv=kv or KVSpec(), slots=SlotSpec(count=8, n_ctx=512))
    without = replace(without, speculation=Speculation.OFF)
    spec = replace(without.model, draft=found[1] or None)
    preset = replace(without, model=spec, speculation=Speculation.AUTO)
    homes = [tmp_path_factory.mktemp("home") for _ in range(2)]
    with running(preset, homes[0]) as auto, running(without, homes[1]) as off:
        draft_freely(auto)
        yield auto, off
        drafts = auto.engine.loaded.loop.batch.proposer.model
        assert drafts is None or (drafts.n_drafted and not drafts.is_broken)
        assert kind != draft or (drafts is not None and drafts.n_accepted > 150)
        assert has_head == isinstance(drafts, MTPDrafter)


def said(driver: Driver, ask: str) -> list[tuple[int, list[int]]]:
    """The tokens of an answer, with the likeliest ones where asked for."""
    events = driver.events(ask, TokenSampled)
    for event in events:
        assert (event.logprob is None) == (event.top == ())
    return [(event.token, [token for token, _ in event.top]) for event in events]


def test_answers_are_the_same_with_drafts_alone_and_in_a_batch(pair: tuple[Driver, Driver]) -> None:
    auto, off = pair
    jobs = [(REPEATED[i % 4], rules) for i, rules in enumerate(RULES)]
    jobs += [(REPEATED[1], rules) for rules in RULES[:3]]
    expected = []
    for tokens, rules in jobs:
        ask = off.submit(tokens, 24, sampling=rules, use_cache=False)
        off.finish(ask)
        expected.append(said(off, ask))
    assert off.engine.snapshot().counters.n_drafted_tokens == 0
    before = auto.engine.snapshot().counters
    asks = []
    for tokens, rules in jobs:
        asks.append(auto.submit(tokens, 24, sampling=rules, use_cache=False))
        if len(asks) % 3 == 0:
            auto.until(asks[-1], TokenSampled, 5)
        if len(asks) % 5 == 0:
            gone = auto.submit(REPEATED[1], 200, use_cache=False)
            auto.until(gone, TokenSampled, 12)
            auto.engine.cancel(gone)
    ends = [auto.finish(ask) for ask in asks]
    assert [said(auto, ask) for ask in asks] == expected
    after = auto.engine.snapshot().counters
    drafted = sum(end.timings.n_drafted for end in ends)
    assert 0 < drafted <= after.n_drafted_tokens - before.n_drafted_tokens
    assert after.n_accepted_tokens > before.n_accepted_tokens


def test_forks_turns_and_parked_contexts_go_on_as_without_drafts(
    pair: tuple[Driver, Driver],
) -> None:
    auto, off = pair
    head = REPEATED[2]
    for turn in range(3):
        tail = prompt(9, seed=turn)
        for agent in ("a", "b"):
            history = head + tail if agent == "a" else head[:100] + tail
            answers = [d.answer(history, 18, agent=agent) for d in pair]
            assert answers[0] == answers[1] == off.cold(history, 18)
            if agent == "a":
                head = history + tuple(answers[0])
    for n in range(9):
        auto.answer(prompt(60, seed=50 + n), 2)
    assert auto.answer(head + REPEATED[0], 18, agent="a") == off.cold(head + REPEATED[0], 18)


def test_limits_and_ends_are_where_they_are_without_drafts(pair: tuple[Driver, Driver]) -> None:
    auto, off = pair
    for n in (1, 2, 3, 17):
        assert auto.answer(REPEATED[1], n) == off.answer(REPEATED[1], n)
    free = off.cold(REPEATED[0], 40)
    for at in (9, 25):
        end = frozenset(free[at : at + 1])
        ended = [(d.submit(REPEATED[0], 40, eos=end, use_cache=False), d) for d in pair]
        reasons = [d.finish(ask).reason for ask, d in ended]
        assert reasons[0] == reasons[1]
        assert auto.tokens(ended[0][0]) == off.tokens(ended[1][0])
    long = prompt(75, seed=8) * 6
    answers = [d.cold(long, 400) for d in pair]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 512 - len(long)


SCHEMA = """{
    "type": "object",
    "properties": {
        "first_long_name": {"type": "boolean"},
        "second_long_name": {"enum": ["a rather long constant", "b, which is even longer"]},
        "third_long_name": {"type": "integer", "minimum": 0, "maximum": 99}
    },
    "required": ["first_long_name", "second_long_name", "third_long_name"],
    "additionalProperties": false
}"""


def test_prefill_chunks_are_sized_by_what_a_step_takes_without_drafts() -> None:
    plain = EngineStats()
    wide = EngineStats()
    plain.decoded(0.05, 4)
    wide.decoded(0.04, 0, 0.5)
    wide.decoded(0.06, 9, 0.5)
    assert wide.speed == plain.speed
    assert wide.step_s == pytest.approx(0.1)
    assert wide.counters.decode_s == pytest.approx(0.1)


def by_schema(driver: Driver) -> dict[str, Any]:
    """What a request needs for an answer by the schema."""
    tokenizer = driver.engine.tokenizer
    compiler = GrammarCompiler(tokenizer, n_vocab := tokenizer.vocab_size)
    grammar = LLMatcher.grammar_from_json_schema(SCHEMA, {"whitespace_flexible": False})
    eos = frozenset(tokenizer.eos_token_ids)
    layout = ConstraintLayout(n_vocab, eos)
    return {"eos": eos, "constraint": GrammarConstraint(layout, compiler.compile(grammar, "s"))}


def test_guided_answers_are_the_same_beside_free_ones(pair: tuple[Driver, Driver]) -> None:
    auto, off = pair
    expected = [
        off.cold(tokens, 100, sampling=rules, **by_schema(off))
        for tokens, rules in zip(REPEATED, GUIDED, strict=True)
    ]
    free = off.cold(REPEATED[1], 60)
    beside = auto.submit(REPEATED[1], 60, use_cache=False)
    asks = [
        auto.submit(tokens, 100, sampling=rules, use_cache=False, **by_schema(auto))
        for tokens, rules in zip(REPEATED, GUIDED, strict=True)
    ]
    for ask in (beside, *asks):
        auto.finish(ask)
    assert [auto.tokens(ask) for ask in asks] == expected
    assert auto.tokens(beside) == free


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_schema_writes_itself_in_half_the_passes(tmp_path: Path, is_ahead: bool) -> None:
    preset = preset_of(Path("demo"), slots=SlotSpec(count=4, n_ctx=1024))
    answers = []
    calls = []
    for speculation in Speculation:
        with running(replace(preset, speculation=speculation), tmp_path) as driver:
            driver.engine.loaded.loop.batch.proposer.costs = UNMEASURED
            driver.engine.loaded.loop.batch.is_ahead = is_ahead
            before = driver.engine.snapshot().counters.n_decode_calls
            guided = by_schema(driver)
            asks = [
                driver.submit(tokens, 200, sampling=rules, **guided)
                for tokens, rules in zip(REPEATED, GUIDED, strict=True)
            ]
            reasons = [driver.finish(ask).reason for ask in asks]
            assert reasons == [FinishReason.EOS] * len(asks)
            answers.append([driver.tokens(ask) for ask in asks])
            calls.append(driver.engine.snapshot().counters.n_decode_calls - before)
            for tokens in answers[-1]:
                assert set(json.loads(driver.engine.tokenizer.decode(tokens))) == set(NAMES)
    assert answers[0] == answers[1]
    assert calls[0] <= 0.5 * calls[1]


NAMES = ("first_long_name", "second_long_name", "third_long_name")
GUIDED = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=0.7, seed=4, repetition_penalty=1.2, top_p=0.9),
    SamplingParams(presence_penalty=0.5, top_logprobs=2),
]


@pytest.mark.parametrize(
    ("kind", "rows", "layout"),
    [
        ("tiny", RowMode.RAGGED, PassLayout.RAGGED),
        ("tiny", RowMode.SINGLE, PassLayout.APART),
        ("tiny-hybrid", RowMode.RAGGED, PassLayout.PADDED),
    ],
)
def test_a_draft_pays_for_the_passes_that_its_layout_takes(
    model_of: ModelOf, kind: str, rows: RowMode, layout: PassLayout
) -> None:
    """One of three rows has a draft; a pass of 6 tokens costs as one of 1, wider ones dearly."""
    model = loader.load(ModelSpec(id=str(model_of(kind))), KVSpec()).model
    runner = ModelRunner(model, rows=rows)
    drafts = DraftCoordinator(runner, WidthCosts((1, 6, 7), (1.0, 1.0, 9.0)))
    batch = Batch(runner, drafts)
    batch.is_ahead = False
    tokens = list(prompt(20, seed=3))
    for slot in range(3):
        context = SlotContext(CacheFactory(model, KVSpec()))
        drafter = ScriptedDrafter(tokens, [1, 2, 3, 4], (3,)) if slot == 0 else None
        sampler = Sampler(SamplingParams(), tokens, 0)
        batch.join(BatchRow(slot, context, sampler, tokens[-1], N_TOKENS, drafter))
    assert runner.layout(batch.rows[0].context.caches) is layout
    batch.step()
    n_drafted = {PassLayout.RAGGED: WIDTH, PassLayout.APART: 0, PassLayout.PADDED: 1}[layout]
    assert drafts.n_drafted == n_drafted
    assert batch.n_calls == 1


@pytest.mark.parametrize(
    ("drafted", "is_prefilling", "n_drafted"), [(3, False, 3 * WIDTH), (1, False, 0), (3, True, 5)]
)
def test_wide_steps_delay_neither_rows_without_drafts_nor_a_prefill(
    model_of: ModelOf, drafted: int, is_prefilling: bool, n_drafted: int
) -> None:
    model = loader.load(ModelSpec(id=str(model_of("tiny"))), KVSpec()).model
    runner = ModelRunner(model)
    drafts = DraftCoordinator(runner, WidthCosts((1, 16), (0.01, 0.04)))
    batch = Batch(runner, drafts)
    tokens = list(prompt(20, seed=3))
    for slot in range(3):
        context = SlotContext(CacheFactory(model, KVSpec()))
        drafter = ScriptedDrafter(tokens, [1, 2, 3, 4], (3,)) if slot < drafted else None
        sampler = Sampler(SamplingParams(), tokens, 0)
        batch.join(BatchRow(slot, context, sampler, tokens[-1], N_TOKENS, drafter))
    batch.step(is_prefilling=is_prefilling)
    assert drafts.n_drafted == n_drafted
    assert 0 < drafts.plain_share <= 1
    assert (drafts.plain_share < 1) == (n_drafted > 0)


def test_room_is_checked_before_drafts_outgrow_it(
    model_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preset = preset_of(model_of("tiny"), speculation=Speculation.AUTO)
    tokens = prompt(60, seed=2)
    rules = SamplingParams(temperature=1.0, seed=9)
    with running(preset, tmp_path) as driver:
        answer = driver.cold(tokens, 320, sampling=rules)
        loop = driver.engine.loaded.loop
        loop.batch.proposer.costs = UNMEASURED
        checked = [len(tokens)]
        admit = loop.slot_kv.admit_growth

        def admit_growth(context: SlotContext, n_bytes: int, idle: Any) -> None:
            checked.append(len(context))
            admit(context, n_bytes, idle)

        monkeypatch.setattr(loop.slot_kv, "admit_growth", admit_growth)
        calls = driver.engine.snapshot().counters.n_decode_calls
        again = driver.cold(tokens, 320, sampling=rules, prediction=tuple(answer))
        assert driver.engine.snapshot().counters.n_decode_calls - calls < 45
    assert again == answer
    assert all(
        b - a <= engine_loop.GROWTH for a, b in pairwise([*checked, len(tokens) + len(answer)])
    )


@pytest.mark.parametrize("kind", ["tiny-hybrid", *in_soak("tiny", "tiny-swa")])
def test_rows_with_drafts_are_settled_before_the_next_step_is_scheduled(
    model_of: ModelOf, tmp_path: Path, kind: str
) -> None:
    preset = preset_of(model_of(kind), speculation=Speculation.AUTO)
    with running(preset, tmp_path) as driver:
        batch = driver.engine.loaded.loop.batch
        expected = [driver.cold(p, 60, sampling=RULES[0]) for p in REPEATED[:3]]
        expected += [driver.cold(p, 60, sampling=RULES[1]) for p in REPEATED[:3]]
        batch.is_ahead = True
        batch.proposer.costs = UNMEASURED
        before = driver.engine.snapshot().counters
        asks = [
            driver.submit(p, 60, sampling=rules, use_cache=False)
            for rules in RULES[:2]
            for p in REPEATED[:3]
        ]
        for ask in asks:
            driver.finish(ask)
        assert [driver.tokens(ask) for ask in asks] == expected
        after = driver.engine.snapshot().counters
        assert after.n_accepted_tokens > before.n_accepted_tokens
