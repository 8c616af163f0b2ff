"""Equal bits: a row's logits alone, in company, as drafts, in chunks and from stored KV."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from mlx import nn
from mlx.utils import tree_map
from msgspec.structs import replace

from mlxstack.core.exact_rows import ExactBits
from mlxstack.core.preset import KVSpec
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.pass_mode import using_mode
from mlxstack.engine.model.runner import ModelRunner, SlotTokens, parts_of
from mlxstack.features.exact import engine
from mlxstack.features.exact.attention import attend_exact
from mlxstack.features.exact.engine import (
    ExactModel,
    ExactPasses,
    MeasuredBits,
    TimeLimit,
    exact_model,
    measure_bits,
    plan_of,
)
from mlxstack.features.exact.policy import HALF_TWELVES, RowRange
from mlxstack.features.exact.row_floors import clear_floors, measured_layers, set_floors
from mlxstack.policy.pass_layout import RowMode
from tests.matrix.builder import build
from tests.matrix.checks import through_bytes
from tests.matrix.configs import VOCAB

DTYPES = {
    "float32": (mx.float32, 0),
    "bfloat16": (mx.bfloat16, 0),
    "float16": (mx.float16, 0),
    "8 bits": (mx.float32, 8),
    "4 bits": (mx.bfloat16, 4),
}
CASES = [
    *(("llama", storage) for storage in DTYPES),
    *(("gemma3_text", storage) for storage in ("bfloat16", "8 bits")),
]
"""Full attention, and windows."""
PROMPTS = [[(7 * i + 13 * row) % VOCAB for i in range(n)] for row, n in enumerate((40, 21, 9, 21))]
ANSWER = 4


def prepared(name: str, storage: str) -> Any:
    """A tiny model with weights in this type or so many bits."""
    dtype, bits = DTYPES[storage]
    model = build(name)
    model.update(tree_map(lambda array: array.astype(dtype), model.parameters()))
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
    mx.eval(model.parameters())
    return model


class ExactRowsOf:
    """Passes of a model with equal bits."""

    def __init__(self, model: Any) -> None:
        layers = measured_layers(model, lambda: True)
        assert layers is not None
        set_floors(layers)
        self.factory = CacheFactory(model, KVSpec())
        self._runner = ModelRunner(model)
        self._runner.mode = ExactPasses()

    def context(self, tokens: Sequence[int], chunk: int) -> SlotContext:
        """Context of a prompt but for its last token, in chunks."""
        context = SlotContext(self.factory)
        self.extend(context, tokens[:-1], chunk)
        return context

    def extend(self, context: SlotContext, tokens: Sequence[int], chunk: int) -> None:
        """Compute more tokens of a prompt."""
        for start in range(0, len(tokens), chunk):
            part = list(tokens[start : start + chunk])
            self._runner.execute(
                [SlotTokens(context.own_caches, mx.array(part), n_prefill=len(tokens))]
            )
            context.extend(part)
            context.evaluate()

    def step(self, rows: Sequence[tuple[SlotContext, Sequence[int]]]) -> list[mx.array]:
        """Logits of the tokens of each row in one pass."""
        plan = [SlotTokens(context.own_caches, mx.array(tokens)) for context, tokens in rows]
        logits = self._runner.execute(plan)
        mx.eval(logits)
        outputs = []
        for context, tokens in rows:
            context.extend(tokens)
            outputs.append(logits[: len(tokens)])
            logits = logits[len(tokens) :]
        return outputs

    def alone(self, prompt: Sequence[int], chunk: int = 64) -> tuple[list[int], mx.array]:
        """Greedy tokens and their logits, cold and alone."""
        return self.answer(self.context(prompt, chunk), prompt[-1])

    def answer(self, context: SlotContext, token: int) -> tuple[list[int], mx.array]:
        """Greedy tokens of a context, and their logits."""
        tokens = []
        logits = []
        for _ in range(ANSWER):
            logits += self.step([(context, [token])])
            token = int(mx.argmax(logits[-1]).item().real)
            tokens.append(token)
        return tokens, mx.concatenate(logits)


@pytest.fixture(scope="module", params=CASES, ids=" ".join)
def exact(request: pytest.FixtureRequest) -> ExactRowsOf:
    return ExactRowsOf(prepared(*request.param))


def test_a_row_beside_others_that_join_and_leave(exact: ExactRowsOf) -> None:
    answers = [exact.alone(prompt) for prompt in PROMPTS]
    contexts = [exact.context(prompt, 64) for prompt in PROMPTS]
    fed = [[prompt[-1], *tokens] for prompt, (tokens, _) in zip(PROMPTS, answers, strict=True)]
    logits: list[list[mx.array]] = [[] for _ in PROMPTS]
    # Row i joins at step i, and leaves when its answer is complete.
    for step in range(ANSWER + len(PROMPTS)):
        rows = [i for i in range(len(PROMPTS)) if 0 <= step - i < ANSWER][::-1]
        outputs = exact.step([(contexts[i], [fed[i][step - i]]) for i in rows] or [])
        for i, output in zip(rows, outputs, strict=True):
            logits[i].append(output)
        if step == ANSWER + len(PROMPTS) - 2:
            break
    for (_, alone), together in zip(answers, logits, strict=True):
        assert mx.array_equal(alone, mx.concatenate(together))


def test_drafts_and_chunks(exact: ExactRowsOf) -> None:
    tokens, alone = exact.alone(PROMPTS[0])
    verified = exact.context(PROMPTS[0], 5)
    beside = exact.context(PROMPTS[1], 7)
    drafted = [PROMPTS[0][-1], *tokens[:-1]]
    together = exact.step([(beside, [1]), (verified, drafted)])[1]
    assert mx.array_equal(alone, together)


def test_a_hit_a_fork_and_stored_kv(exact: ExactRowsOf) -> None:
    """KV of decoded tokens serves a prompt as KV of a chunk does."""
    prompt = PROMPTS[0]
    context = exact.context(prompt, 64)
    tokens, _ = exact.answer(context, prompt[-1])
    history = [*prompt, *tokens[:-1]]
    following = [*history, 3, 5, 8, 13]
    _, cold = exact.alone(following, chunk=11)
    fork = SlotContext(exact.factory)
    fork.fork_from(context, len(history))
    stored = through_bytes_of(context)
    for reused in (fork, stored, context):
        assert len(reused) == len(history)
        exact.extend(reused, following[len(history) : -1], 64)
        _, warm = exact.answer(reused, following[-1])
        assert mx.array_equal(cold, warm)


def through_bytes_of(context: SlotContext) -> SlotContext:
    """A copy of the context through the bytes of KV files."""
    context.checkpoint()
    return through_bytes(context)


def measured_bits(model: Any, setting: ExactBits = ExactBits.ON) -> MeasuredBits:
    plan = plan_of(setting, n_slots=4, rows=RowMode.RAGGED)
    return measure_bits(model, CacheFactory(model, KVSpec()), VOCAB, plan)


def measured_model(model: Any, setting: ExactBits = ExactBits.ON) -> ExactModel:
    return exact_model(model, measured_bits(model, setting))


def test_the_check_at_load_counts_equal_rows_of_each_width() -> None:
    report = measured_model(prepared("llama", "bfloat16")).report
    assert report.is_on
    assert [width.width for width in report.widths] == [2, 3, 4]
    assert all(width.n_equal_on == width.width for width in report.widths)
    assert report.drafts_equal
    assert report.chunks_equal
    assert report.decoded_equal
    assert {layer.kind for layer in report.layers} == {"projection", "head"}
    assert report.decode_cost is not None


class WidthDependent(nn.Linear):  # type: ignore[misc]
    """Imitation of a device whose products have other bits for each number of rows."""

    ceiling = 1

    def __call__(self, x: mx.array) -> mx.array:
        n = x.size // x.shape[-1]
        output: mx.array = super().__call__(x)
        return output * (1 + 0.1 * max(0, n - self.ceiling))


class TwiceSix(nn.Linear):  # type: ignore[misc]
    """Imitation of kernels that compute 12 rows as twice 6 with other bits."""

    def __call__(self, x: mx.array) -> mx.array:
        n = x.size // x.shape[-1]
        output: mx.array = super().__call__(x).reshape(n, -1)
        place = mx.arange(n)[:, None]
        is_rest = place >= n // 12 * 12
        factor = mx.where(is_rest, 1.1 + n % 12, 1.0 + (place % 12 >= 6))
        return (output * factor.astype(output.dtype)).reshape(*x.shape[:-1], -1)


def test_rows_take_the_places_whose_bits_are_equal() -> None:
    model = imitated(TwiceSix)
    rows = {
        layer.rows
        for layer in measured_layers(model, lambda: True) or []
        if isinstance(layer.module, TwiceSix)
    }
    assert rows == {HALF_TWELVES}
    measured = measured_model(model)
    assert measured.report.is_on
    assert measured.report.chunks_equal
    assert all(width.n_equal_on == width.width for width in measured.report.widths)


def test_layers_of_a_later_load_pad_rows_as_measured() -> None:
    bits = measured_bits(imitated(TwiceSix))
    assert bits.is_complete
    kept = msgspec.json.decode(msgspec.json.encode(bits), type=MeasuredBits)
    assert kept == bits
    model = imitated(TwiceSix)
    assert exact_model(model, kept).mode == ExactPasses(bits.report.max_rows)
    rows = [layer.mlp.down_proj._equal_rows for layer in model.model.layers]
    assert set(rows) == {HALF_TWELVES}


@pytest.mark.parametrize("n_steps", [1, 6, 14, 18, 20])
def test_a_limit_of_time_is_noticed_at_any_step(
    n_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StepLimit(TimeLimit):
        """Limit of a number of steps."""

        n_left = n_steps

        def has_time(self) -> bool:
            self.n_left -= 1
            self.is_over = self.n_left < 0
            return not self.is_over

    model = prepared("llama", "bfloat16")
    assert measured_bits(model).is_complete
    monkeypatch.setattr(engine, "TimeLimit", StepLimit)
    assert not measured_bits(model).is_complete


class EqualUpTo12(WidthDependent):
    """Imitation of a device with the same bits up to 12 rows."""

    ceiling = 12


def imitated(kind: type[nn.Linear]) -> Any:
    model = prepared("llama", "bfloat16")
    for layer in model.model.layers:
        layer.mlp.down_proj.__class__ = kind
    return model


@pytest.mark.parametrize("setting", [ExactBits.AUTO, ExactBits.ON])
def test_a_device_without_equal_widths_says_so_and_changes_nothing(setting: ExactBits) -> None:
    measured = measured_model(imitated(WidthDependent), setting)
    assert measured.mode is None
    assert "no two row counts have equal bits in projection" in measured.report.reason


def test_passes_are_never_wider_than_the_largest_equal_width() -> None:
    measured = measured_model(imitated(EqualUpTo12))
    assert measured.mode is not None, measured.report.reason
    assert measured.report.max_rows == 12
    plan = [SlotTokens([], mx.zeros((n,), mx.int32)) for n in (5, 1, 9)]
    passes = parts_of(plan, 12)
    assert [[slot.n_tokens for slot in part] for part in passes] == [[5, 1, 6], [3]]
    chunk = replace(plan[0], tokens=mx.zeros((40,), mx.int32), n_prefill=40)
    assert [[slot.n_tokens for slot in part] for part in parts_of([chunk, plan[1]], 12)] == [
        [40],
        [1],
    ]


def test_layers_are_as_before_where_it_stays_off() -> None:
    model = imitated(EqualUpTo12)
    kinds = [type(module) for _, module in model.named_modules()]
    layers = measured_layers(model, lambda: True)
    assert layers is not None
    set_floors([replace(layer, rows=RowRange(5)) for layer in layers])
    assert kinds != [type(module) for _, module in model.named_modules()]
    clear_floors(layers)
    assert kinds == [type(module) for _, module in model.named_modules()]


def test_off_measures_nothing() -> None:
    measured = measured_model(prepared("llama", "bfloat16"), ExactBits.OFF)
    assert (measured.mode, measured.report.layers) == (None, ())


@pytest.mark.parametrize("n_keys", [7, 300, 600])
def test_attention_is_that_of_mlx(n_keys: int) -> None:
    keys = mx.random.normal((1, 2, n_keys, 16), key=mx.random.key(1))
    values = mx.random.normal((1, 2, n_keys, 16), key=mx.random.key(2))
    queries = mx.random.normal((1, 6, 7, 16), key=mx.random.key(3))
    sinks = mx.random.normal((6,), key=mx.random.key(4))
    for extra in (None, sinks):
        expected = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=0.25, mask="causal", sinks=extra
        )
        out = attend_exact(queries, keys, values, None, 0.25, "causal", extra)
        assert out is not None
        assert mx.allclose(out, expected, rtol=1e-4, atol=1e-5)


def test_layers_pad_their_rows_in_such_passes_alone() -> None:
    model = prepared("llama", "float32")
    layers = measured_layers(model, lambda: True)
    assert layers is not None
    set_floors([replace(layer, rows=RowRange(5)) for layer in layers])
    counts: list[int] = []
    layer = model.model.layers[0].mlp.down_proj
    kind = type(layer).__mro__[1]
    original = kind.__call__

    def counted(self: Any, x: mx.array) -> mx.array:
        counts.append(x.size // x.shape[-1])
        output: mx.array = original(self, x)
        return output

    x = mx.zeros((2, 1, layer.weight.shape[1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "__call__", counted)
        layer(x)
        with using_mode(ExactPasses()):
            assert layer(x).shape[:2] == (2, 1)
    assert counts == [2, 5]


def test_a_layer_with_several_outputs_is_measured_and_padded_as_one() -> None:
    model = prepared("afm7", "float32")
    layers = measured_layers(model, lambda: True)
    assert layers is not None
    (fused, *_) = [layer.module for layer in layers if type(layer.module).__name__ == "FusedLinear"]
    x = mx.random.normal((2, 1, fused.weight.shape[1]), key=mx.random.key(1))
    expected = fused(x)
    set_floors([replace(layer, rows=RowRange(5)) for layer in layers])
    with using_mode(ExactPasses()):
        outputs = fused(x)
    assert [part.shape for part in outputs] == [part.shape for part in expected]
    assert all(mx.allclose(a, b, atol=1e-5) for a, b in zip(outputs, expected, strict=True))
