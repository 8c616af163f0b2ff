"""What the engine promises for a model, checked on one: batched, rewound, stored, in 8 bits."""

import itertools
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from random import Random
from typing import Any

import mlx.core as mx
from msgspec.structs import replace

from mlxstack.core.interfaces import TensorBytes
from mlxstack.core.preset import KVSpec
from mlxstack.core.request import SamplingParams
from mlxstack.engine.decode.batch import Batch
from mlxstack.engine.decode.batch_row import BatchRow
from mlxstack.engine.decode.batching_check import BatchingCheck
from mlxstack.engine.decode.row_grouper import NO_GROUPS
from mlxstack.engine.decode.sampler import Sampler
from mlxstack.engine.kv import segments
from mlxstack.engine.kv.segments import Segment
from mlxstack.engine.kv.slot_context import SlotContext, StateCheckpoint
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.pass_mode import PassMode
from mlxstack.engine.model.runner import ModelRunner, SlotTokens
from mlxstack.features.drafts.engine.draft_coordinator import DraftCoordinator
from mlxstack.features.drafts.engine.drafter import Drafter
from mlxstack.features.drafts.policy.ngram_draft_governor import DraftOffer
from mlxstack.features.row_stacks.engine import RowStacker
from mlxstack.features.row_stacks.policy import StackingRules
from mlxstack.policy.pass_layout import RowMode
from tests.matrix.configs import VOCAB, WINDOW

LENGTHS = (5, WINDOW - 3, WINDOW + 15, 2 * WINDOW + 17)
N_STEPS = 12
LEAVING = 9
BITE = 40
CUT = 50
WIDTH = 3
PATTERNS = ((3,), (0, 2), (3, 1, 0), (1, 3))
"""How many tokens of each draft of a row are right."""
RULES = (
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=1, top_p=0.95, repetition_penalty=1.1),
    SamplingParams(presence_penalty=0.4, frequency_penalty=0.2),
    SamplingParams(temperature=0.6, seed=2, top_k=40),
)
"""How each row is sampled; those of even number have a grammar, too."""
GREEDY = (RULES[0], SamplingParams(repetition_penalty=1.1), RULES[2], RULES[0])
"""For 8-bit KV, whose rounding now and then decides a draw."""
PIECES_TOLERANCE = 1e-3
"""Of the largest logit, in float32."""
KV16 = KVSpec()
KV8 = KVSpec(bits=8, group_size=32)

Tokens = list[int]


class Wrong(Exception):
    """A promise that was not kept."""


def prompt(n: int, seed: int) -> Tokens:
    """`n` random tokens."""
    random = Random(seed)
    return [random.randrange(VOCAB) for _ in range(n)]


PROMPTS = [prompt(n, seed=n) for n in LENGTHS]
LONG = PROMPTS[-1]


def prefill(model: Any, context: SlotContext, tokens: Sequence[int]) -> None:
    """Put all but the last token into the context in bites, with a checkpoint at CUT."""
    start = len(context)
    end = len(tokens) - 1
    stops = sorted({start, end, *(s for s in (BITE, CUT) if start < s < end)})
    for a, b in pairwise(stops):
        model(mx.array([tokens[a:b]]), cache=context.caches)
        context.extend(tokens[a:b])
        context.evaluate()
        if b == CUT:
            context.checkpoint()


def decode(
    model: Any,
    contexts: Sequence[SlotContext],
    prompts: Sequence[Tokens],
    rows: RowMode,
    n_tokens: int = N_STEPS,
    stacker: RowStacker | None = None,
) -> list[Tokens]:
    """Greedy answers of `n_tokens`; row i joins i steps after the first one."""
    batch = Batch(ModelRunner(model, rows=rows), grouper=stacker or NO_GROUPS)
    answers: list[Tokens] = [[] for _ in contexts]
    for step in range(n_tokens + len(contexts)):
        if step < len(contexts):
            chooser = Sampler(SamplingParams(), prompts[step], 0)
            last = prompts[step][-1]
            batch.join(BatchRow(step, contexts[step], chooser, last, request=str(step)))
        for sampled in batch.step():
            slot = int(sampled.request)
            answers[slot].append(sampled.token)
            if len(answers[slot]) == n_tokens:
                batch.leave(slot)
    batch.sync()
    return answers


class Alternating:
    """A grammar of even and odd tokens by turns, as its own state: where an answer stands."""

    is_ruled = True

    def __init__(self) -> None:
        self._at = 0

    def mask(self) -> bytes | None:
        return bytes([0xAA if self._at % 2 else 0x55]) * -(-VOCAB // 8)

    def advance(self, token: int) -> None:
        assert token % 2 == self._at % 2
        self._at += 1

    def forced_tokens(self) -> tuple[int, ...]:
        return ()

    def close_thought(self) -> bool:
        return False

    def position(self) -> int:
        return self._at

    def rewind(self, position: object) -> None:
        assert isinstance(position, int)
        self._at = position


def sampler_of(row: int, rules: Sequence[SamplingParams]) -> Sampler:
    """The sampler of one row by its own rules."""
    return Sampler(rules[row], PROMPTS[row], 0, None if row % 2 else Alternating())


def cold(
    model: Any, cache_factory: CacheFactory, tokens: Tokens, n_tokens: int = N_STEPS
) -> Tokens:
    """The answer of a fresh context."""
    context = SlotContext(cache_factory)
    prefill(model, context, tokens)
    return decode(model, [context], [tokens], rows=RowMode.ALONE, n_tokens=n_tokens)[0]


def check_batch(
    model: Any, cache_factory: CacheFactory, rows: RowMode, stacker: RowStacker | None = None
) -> None:
    """Rows of different length, past every window, get together what they get alone."""
    alone = [cold(model, cache_factory, tokens) for tokens in PROMPTS]
    contexts = [SlotContext(cache_factory) for _ in PROMPTS]
    for context, tokens in zip(contexts, PROMPTS, strict=True):
        prefill(model, context, tokens)
    together = decode(model, contexts, PROMPTS, rows, stacker=stacker)
    if len({tuple(answer) for answer in alone}) == 1:
        raise Wrong("all answers are the same: the model does not look at its prompt")
    for n, own, batched in zip(LENGTHS, alone, together, strict=True):
        if own != batched:
            raise Wrong(f"the row of {n} tokens answers {batched}, alone {own}")


def check_exact(model: Any, cache_factory: CacheFactory, rows: RowMode, mode: PassMode) -> None:
    """With equal bits, logits of rows beside others are those of the rows alone."""
    runner = ModelRunner(model, rows=rows)
    runner.mode = mode

    def contexts() -> list[SlotContext]:
        rows = [SlotContext(cache_factory) for _ in PROMPTS]
        for context, tokens in zip(rows, PROMPTS, strict=True):
            prefill(model, context, tokens)
        return rows

    def logits(rows: Sequence[SlotContext], step: int) -> mx.array:
        tokens = mx.array([step + 1])
        return runner.execute([SlotTokens(context.own_caches, tokens) for context in rows])

    single = contexts()
    batched = contexts()
    for step in range(N_STEPS):
        alone = mx.concatenate([logits([context], step) for context in single])
        together = logits(batched[::-1], step)[::-1]
        if not mx.array_equal(alone, together):
            raise Wrong(f"a row has other bits beside others at step {step}")


def check_stacks(model: Any, cache_factory: CacheFactory) -> None:
    """As `check_batch`, with rows that are stacked two steps after each change of the batch."""
    rules = StackingRules(least_steps=1, repaid_bytes=1 << 60, most_padding=10**6)
    n_asked: list[int] = []
    check_batch(
        model, cache_factory, RowMode.RAGGED, RowStacker(lambda n: not n_asked.append(n), rules)
    )
    if not n_asked:
        raise Wrong("no rows were stacked")


class ScriptedDrafter(Drafter):
    """Drafts `WIDTH` tokens of a known answer, of which as many are right as `pattern` says.

    The pattern begins anew at its end.
    """

    def __init__(self, tokens: Tokens, answer: Tokens, pattern: Sequence[int]) -> None:
        super().__init__(tokens, frozenset())
        self._answer = answer
        self._pattern = itertools.cycle(pattern)
        self._n_known = 0
        self._tokens: tuple[int, ...] = ()

    def expected(self, is_ruled: bool) -> DraftOffer:
        return DraftOffer(WIDTH, 1.0)

    def propose(self, forced: Sequence[int], most: int) -> DraftOffer:
        coming = self._answer[self._n_known : self._n_known + min(most, WIDTH)]
        n_right = next(self._pattern) if coming else 0
        wrong = [(token + 1) % VOCAB for token in coming[n_right:]]
        self._tokens = (*coming[:n_right], *wrong)
        return DraftOffer(len(self._tokens), 1.0)

    def take(self, n_tokens: int) -> tuple[int, ...]:
        return self._tokens[:n_tokens]

    def settle(self, tokens: Sequence[int], n_drafted: int = 0) -> None:
        self._n_known += len(tokens)
        super().settle(tokens, n_drafted)


def check_drafts(
    model: Any,
    cache_factory: CacheFactory,
    check: BatchingCheck,
    rules: Sequence[SamplingParams] = RULES,
) -> None:
    """With drafts, right and wrong, rows get what they get alone, and go on so without them.

    Row i joins i steps after the first one and is sampled by rules of its own; another row leaves
    between. Rounding decides a draw now and then, so that a difference has to show with other
    seeds too.
    """
    try:
        _check_drafts(model, cache_factory, check, rules)
    except Wrong:
        others = [replace(rule, seed=rule.seed and rule.seed + 100) for rule in rules]
        _check_drafts(model, cache_factory, check, others)


def _check_drafts(
    model: Any, cache_factory: CacheFactory, check: BatchingCheck, rules: Sequence[SamplingParams]
) -> None:
    n_tokens = 2 * N_STEPS
    runner = ModelRunner(model, rows=check.rows)
    alone = [_sampled(Batch(runner), cache_factory, {row: None}, rules)[row] for row in ROWS]
    batch = Batch(runner, DraftCoordinator(runner))
    drafters = {row: ScriptedDrafter(PROMPTS[row], alone[row], PATTERNS[row]) for row in ROWS}
    answers = _sampled(batch, cache_factory, drafters, rules)
    for n, row in zip(LENGTHS, ROWS, strict=True):
        if alone[row] != answers[row]:
            raise Wrong(f"with drafts the row of {n} answers {answers[row]}, else {alone[row]}")
    if batch.n_calls >= n_tokens * (1 if check.rows is RowMode.RAGGED else len(PROMPTS)):
        raise Wrong(f"drafts saved no forward pass: {batch.n_calls}")


ROWS = range(len(PROMPTS))


def _sampled(
    batch: Batch,
    cache_factory: CacheFactory,
    drafters: Mapping[int, Drafter | None],
    rules: Sequence[SamplingParams],
) -> dict[int, Tokens]:
    """Answers of these rows, the first N_STEPS of 2 * N_STEPS tokens with their drafters."""
    model = batch.runner.model
    answers: dict[int, Tokens] = {row: [] for row in drafters}
    coming = []
    for slot, drafter in drafters.items():
        context = SlotContext(cache_factory)
        prefill(model, context, PROMPTS[slot])
        last = PROMPTS[slot][-1]
        sampler = sampler_of(slot, rules)
        n_tokens = 2 * N_STEPS
        row = BatchRow(slot, context, sampler, last, n_tokens, drafter, request=str(slot))
        coming.append(row)
    if len(coming) > 1:
        leaving = SlotContext(cache_factory)
        prefill(model, leaving, PROMPTS[1])
        drafter = ScriptedDrafter(PROMPTS[1], PROMPTS[2], (0, 1))
        sampler = sampler_of(1, rules)
        last = PROMPTS[1][-1]
        batch.join(BatchRow(LEAVING, leaving, sampler, last, 99, drafter, request=str(LEAVING)))
    while coming or batch.in_flight or any(row.n_left for row in batch.rows):
        if coming:
            batch.join(coming.pop(0))
        else:
            batch.leave(LEAVING)
        for sampled in batch.step():
            answers.setdefault(int(sampled.request), []).append(sampled.token)
        for row in batch.rows:
            if len(answers[row.slot]) >= N_STEPS:
                row.proposal_source = None
    return answers


def check_rewind(model: Any, cache_factory: CacheFactory) -> str:
    """Back to where a new prompt diverges, or to the checkpoint before; then as if cold."""
    context = SlotContext(cache_factory)
    prefill(model, context, LONG)
    decode(model, [context], [LONG], rows=RowMode.ALONE)
    changed = LONG[: CUT + 3] + prompt(20, seed=99)
    position = context.rewind(CUT + 3)
    if position not in (0, CUT, CUT + 3):
        raise Wrong(f"rewound to {position}")
    prefill(model, context, changed)
    warm = decode(model, [context], [changed], rows=RowMode.ALONE)[0]
    if warm != cold(model, cache_factory, changed):
        raise Wrong(f"after a rewind to {position} it answers otherwise than cold")
    return {0: "no", CUT: "to checkpoints"}.get(position, "anywhere")


def check_fork(model: Any, cache_factory: CacheFactory) -> str:
    """A copy goes on with other tokens as if cold, and its source as if it had none."""
    source = SlotContext(cache_factory)
    prefill(model, source, LONG)
    if not source.is_storable:
        return "no"
    changed = LONG[: CUT + 3] + prompt(20, seed=98)
    copy = source.new_empty()
    position = copy.fork_from(source, CUT + 3)
    if position not in (CUT, CUT + 3):
        raise Wrong(f"forked at {position}")
    prefill(model, copy, changed)
    if decode(model, [copy], [changed], RowMode.ALONE)[0] != cold(model, cache_factory, changed):
        raise Wrong("a fork answers otherwise than cold")
    if decode(model, [source], [LONG], RowMode.ALONE)[0] != cold(model, cache_factory, LONG):
        raise Wrong("after a fork the source answers otherwise than cold")
    copy.fork_from(source, len(source))
    _check_next_turn(model, cache_factory, copy, "a fork")
    return "yes"


def check_pieces(model: Any, cache_factory: CacheFactory) -> None:
    """A prompt in pieces gets the logits of mlx-vlm's own call, all of it at once."""
    whole = model.language_model(mx.array([LONG]), cache=model.make_cache()).logits[0, -1]
    context = SlotContext(cache_factory)
    prefill(model, context, LONG)
    pieces = model(mx.array([LONG[-1:]]), cache=context.caches)[0, -1]
    distance = (mx.abs(whole - pieces).max() / mx.abs(whole).max()).item()
    if not distance < PIECES_TOLERANCE:
        raise Wrong(f"in pieces a prompt has other logits than at once, by {distance:.3g}")


def check_stored(model: Any, cache_factory: CacheFactory) -> str:
    """Through bytes into a fresh context: it goes on as if uninterrupted, and rewinds as cold."""
    context = SlotContext(cache_factory)
    prefill(model, context, LONG)
    if not context.is_storable:
        return "no"
    context.checkpoint()
    fresh = through_bytes(context)
    if decode(model, [fresh], [LONG], RowMode.ALONE) != decode(
        model, [context], [LONG], RowMode.ALONE
    ):
        raise Wrong("restored it answers otherwise than uninterrupted")
    position = fresh.rewind(CUT)
    if position != CUT:
        raise Wrong(f"the restored context can be rewound to {position} only")
    prefill(model, fresh, LONG)
    if decode(model, [fresh], [LONG], RowMode.ALONE)[0] != cold(model, cache_factory, LONG):
        raise Wrong("restored and rewound it answers otherwise than cold")
    context.checkpoint()
    _check_next_turn(model, cache_factory, through_bytes(context), "a restored copy")
    return "yes"


def _check_next_turn(
    model: Any, cache_factory: CacheFactory, context: SlotContext, which: str
) -> None:
    """A copy of a context that ends with an answer goes on as if cold."""
    history = [*context.tokens, *prompt(20, seed=97)]
    expected = cold(model, cache_factory, history)
    prefill(model, context, history)
    if decode(model, [context], [history], RowMode.ALONE)[0] != expected:
        raise Wrong(f"after an answer {which} answers otherwise than cold")


def through_bytes(context: SlotContext, cut: int = CUT) -> SlotContext:
    """A copy made of nothing but tokens, bytes and JSON, in two segments."""
    n_tokens = len(context)
    parts = [segments.pack(context, a, b) for a, b in ((0, cut), (cut, n_tokens))]
    unpacked = [Segment(p.start, p.end, tuple(_thawed(p)), tuple(_layout(p))) for p in parts]
    marks = [segments.checkpoint(c.position, _thawed(c), _layout(c)) for c in context.checkpoints]
    fresh = context.new_empty(n_tokens)
    fresh.load(context, segments.whole(fresh, unpacked, n_tokens), marks)
    return fresh


def _thawed(part: Segment | StateCheckpoint) -> list[mx.array]:
    planes = list(segments.to_planes(segments.arrays_of(part)))
    return [segments.from_plane(TensorBytes(p.dtype, p.shape, bytes(p.data))) for p in planes]


def _layout(part: Segment | StateCheckpoint) -> list[Any]:
    layout: list[Any] = json.loads(json.dumps(segments.layout_of(part)))
    return layout
