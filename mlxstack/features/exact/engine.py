"""Equal bits of rows: measured at load, and their passes."""

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.exact_rows import ExactBits, ExactRows, WidthBits
from mlxstack.engine import device
from mlxstack.engine.device_errors import raise_device_error
from mlxstack.engine.model import cache_adapters
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.pass_mode import PassMode
from mlxstack.engine.model.runner import ModelRunner
from mlxstack.features.exact.attention import attend_exact
from mlxstack.features.exact.check import BitCheck, PassBits
from mlxstack.features.exact.policy import Costs, common_ceiling, decide
from mlxstack.features.exact.row_floors import (
    MeasuredLayer,
    ShapeBits,
    clear_floors,
    measured_layers,
    set_floors,
    shapes_of,
)
from mlxstack.policy.pass_layout import RowMode

AUTO_S = 15.0
ON_S = 300.0
"""Seconds after which no further measurement begins, with `auto` and with `on`."""
WIDTHS = (2, 3, 4, 8)
"""Passes of so many rows are compared."""


class ExactPasses(Struct, frozen=True):
    """Mode of passes whose rows have equal bits."""

    max_rows: int = 0

    def attend(
        self,
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> mx.array | None:
        """Attention by blocks of keys on a CPU, else by MLX."""
        if device.has_gpu():
            return None
        return attend_exact(queries, keys, values, cache, scale, mask, sinks)


class ExactModel(Struct, frozen=True):
    """Report on a model, and the mode of its passes."""

    report: ExactRows
    mode: PassMode | None = None


class BitsPlan(Struct, frozen=True):
    """Settings that decide the measurement of a model."""

    setting: ExactBits
    widths: tuple[int, ...]
    """Rows of the passes that are compared."""
    rows: RowMode

    @property
    def name(self) -> str:
        """Name of the measurement among those of a model."""
        widths = " ".join(map(str, self.widths))
        return f"equal bits ({self.setting}) of {widths} rows, {self.rows.value}"


class MeasuredBits(Struct, frozen=True):
    """Bits of the rows of a model, and what follows."""

    report: ExactRows
    shapes: tuple[ShapeBits, ...]
    is_complete: bool
    """Whether neither setting, time nor an error left something out."""


class TimeLimit:
    """Time in which steps of a measurement may begin."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self.is_over = False
        """Whether a step could not begin."""

    def has_time(self) -> bool:
        """Whether another step may begin."""
        self.is_over = self.is_over or time.monotonic() >= self._until
        return not self.is_over


class ExactMeasurement:
    """Measures a model, plain and with equal bits."""

    def __init__(
        self, plain: BitCheck, exact: BitCheck, setting: ExactBits, has_time: Callable[[], bool]
    ) -> None:
        self._plain = plain
        self._exact = exact
        self._setting = setting
        self._has_time = has_time

    def measured(self, report: ExactRows) -> ExactRows:
        """Add costs, bits and the decision to the report."""
        is_auto = self._setting is ExactBits.AUTO
        costs = self._exact.costs(self._plain.runner, self._has_time, stops_early=is_auto)
        report = replace(report, decode_cost=costs.decode, prefill_cost=costs.prefill)
        if is_auto and costs.is_high:
            return _decided(report, self._setting, "", costs)
        plain = self._plain.equal_rows(self._has_time) or {}
        exact = self._exact.equal_rows(self._has_time)
        passes = self._exact.passes(self._has_time)
        report = replace(
            report,
            widths=tuple(
                WidthBits(n, n_equal_on=equal, n_equal_off=plain.get(n))
                for n, equal in (exact or {}).items()
            ),
            drafts_equal=bool(passes and passes.drafts),
            chunks_equal=bool(passes and passes.chunks),
            decoded_equal=bool(passes and passes.decoded),
        )
        return _decided(report, self._setting, _differs(exact, passes), costs)


def plan_of(setting: ExactBits, n_slots: int, rows: RowMode) -> BitsPlan:
    """Measurement for a number of slots."""
    widths = tuple(n for n in WIDTHS if n <= n_slots) or WIDTHS[:1]
    return BitsPlan(setting, widths, rows)


def measure_bits(model: Any, factory: CacheFactory, n_vocab: int, plan: BitsPlan) -> MeasuredBits:
    """Measure the bits of rows, and choose.

    Layers stay as they are.
    """
    setting = plan.setting
    if setting is ExactBits.OFF:
        return MeasuredBits(_decided(ExactRows(), setting, "", Costs()), (), is_complete=False)
    limit = TimeLimit(ON_S if setting is ExactBits.ON else AUTO_S)
    layers = measured_layers(model, limit.has_time)
    if layers is None:
        report = ExactRows(reason="there was no time to measure its layers")
        return MeasuredBits(report, (), is_complete=False)
    shapes = shapes_of(layers)
    max_rows = common_ceiling([layer.rows for layer in layers if layer.rows])
    report = ExactRows(layers=tuple(shape.bits for shape in shapes), max_rows=max_rows)
    why_not = _why_not(layers, factory)
    if why_not:
        report = _decided(report, setting, why_not, Costs())
        return MeasuredBits(report, shapes, is_complete=True)
    plain = ModelRunner(model, rows=plan.rows)
    exact = ModelRunner(model, rows=plan.rows)
    exact.mode = ExactPasses(max_rows)
    measurement = ExactMeasurement(
        BitCheck(plain, factory, n_vocab, plan.widths),
        BitCheck(exact, factory, n_vocab, plan.widths),
        setting,
        limit.has_time,
    )
    is_complete = True
    set_floors(layers)
    try:
        report = measurement.measured(report)
    except Exception as error:
        raise_device_error(error)
        why_not = f"its check failed: {type(error).__name__}: {error}"
        report = _decided(report, setting, why_not, Costs())
        is_complete = False
    finally:
        clear_floors(layers)
    return MeasuredBits(report, shapes, is_complete=is_complete and not limit.is_over)


def exact_model(model: Any, bits: MeasuredBits) -> ExactModel:
    """Model in the mode that was chosen.

    Changes its layers.
    """
    if not bits.report.is_on:
        return ExactModel(bits.report)
    set_floors(measured_layers(model, lambda: True, bits.shapes) or [])
    return ExactModel(bits.report, ExactPasses(bits.report.max_rows))


def _why_not(layers: list[MeasuredLayer], factory: CacheFactory) -> str:
    """Why no width has equal bits; empty if one may have."""
    unequal = next((layer for layer in layers if layer.rows is None), None)
    if unequal is not None:
        return f"no two row counts have equal bits in {unequal.bits.kind} {unequal.bits.shape}"
    ceiling = common_ceiling([layer.rows for layer in layers if layer.rows])
    floor = max((layer.rows.floor for layer in layers if layer.rows), default=1)
    if ceiling and ceiling < floor:
        return f"no row count has equal bits in all layers: {floor} in one, {ceiling} in another"
    single = next((x for x in layers if x.bits.kind == "experts" and x.bits.min_rows > 1), None)
    if single is not None:
        return f"a lone row has other bits in experts {single.bits.shape}"
    leaves = cache_adapters.leaves(factory.make())
    if any(isinstance(leaf, RotatingKVCache) and leaf.keep for leaf in leaves):
        return "its windows keep their first keys"
    return ""


def _differs(equal: dict[int, int] | None, passes: PassBits | None) -> str:
    """Description of bits that differ all the same; empty: none."""
    if equal is None or passes is None:
        return "there was no time to compare its rows"
    unequal = [width for width, n in equal.items() if n < width]
    if unequal:
        return f"rows have other bits than alone in passes of {', '.join(map(str, unequal))}"
    if not passes.drafts:
        return "tokens that are verified together have other bits than single ones"
    return ""


def _decided(report: ExactRows, setting: ExactBits, why_not: str, costs: Costs) -> ExactRows:
    is_on, reason = decide(setting, why_not, costs)
    return replace(report, is_on=is_on, reason=reason)
