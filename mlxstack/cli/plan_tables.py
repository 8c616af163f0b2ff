"""Tables of `plan`, `spec` and derived settings."""

from collections.abc import Sequence

from msgspec import Struct

from mlxstack.cli.output import facts, say, table
from mlxstack.cli.units import size
from mlxstack.core.formatting import tokens
from mlxstack.core.preset import ServiceKind
from mlxstack.host.hardware import MemoryBudget
from mlxstack.planner.candidate import Candidate
from mlxstack.planner.derived_preset import DerivedPreset
from mlxstack.planner.estimate import DISK_TOKENS, SCREENSHOT, Forecast, KindRow, Spec, spec_of
from mlxstack.planner.ranking import RESERVE, AdviceRow
from mlxstack.policy.memory.capacity import PLAIN_BITS

ADVICE_HEADS = ("", "PRESET", "NEEDS", "WEIGHTS", "KV BITS", "AGENTS", "WHY")
ADVICE_DROPPED_FIRST = ("WEIGHTS", "KV BITS", "NEEDS")
"""Columns that a narrow terminal does without, the first one first."""


class PlanRow(Struct, frozen=True):
    """Table row of a model, at 16-bit KV: `kv_bytes` by context."""

    preset: str
    geometry: str
    growth_bytes: int
    window_bytes: int
    kv_bytes: dict[int, int]


def show_spec(spec: Spec) -> None:
    """The geometry of one model."""
    say(f"{spec.model} ({spec.architecture}, {spec.n_layers} layers)")
    say(f"from {_source(spec)}")
    headings = ("KIND", "LAYERS", "NUMBERS", "HEADS x DIM", "WINDOW", "PER TOKEN", "CONSTANT")
    table(headings, [_kind(kind) for kind in spec.kinds], ("NUMBERS",))
    say(f"growth   {size(spec.growth_bytes)} a token")
    say(f"windows  {size(spec.window_bytes)}")
    say(f"KV at 4k {size(spec.kv_bytes_4k)}")
    say(f"weights  {size(spec.weights_bytes)}, {spec.weights_from}")


def show_forecast(forecast: Forecast) -> None:
    """Show the sum; of a model with slots also contexts by precision, and slots by context."""
    spec = forecast.spec
    memory = forecast.memory
    keeps_kv = forecast.kind is not ServiceKind.EMBEDDING
    title = f"{forecast.preset}: {spec.model}"
    if forecast.preset in spec.model:
        title = spec.model
    context = ""
    if spec.n_trained:
        context = f", up to {tokens(spec.n_trained)} tokens"
    lines = [
        ("model", f"{title} ({spec.architecture}{context})"),
        ("config", _source(spec)),
        ("memory", f"{memory.owner}: {size(memory.usable)} for models of {size(memory.total)}"),
        ("weights", _weights(forecast)),
        ("KV", _growth(forecast)),
        ("workspace", size(forecast.workspace_bytes)),
    ]
    if spec.n_screenshot or spec.why_no_images:
        lines.append(("images", _images(spec)))
    if keeps_kv:
        lines += [
            ("KV budget", f"{size(forecast.kv_budget_bytes)} (prefix_cache.memory_budget_pct)"),
            (
                "disk",
                f"{size(forecast.disk_bytes_50k)} for a saved agent of {DISK_TOKENS:,} tokens",
            ),
        ]
    lines.append(("wanted", _fit_text(forecast)))
    facts(lines)
    if keeps_kv:
        say("")
        _show_contexts(forecast)
        say("")
        _show_matrix(forecast)
    if keeps_kv and any(_is_beyond(spec, row.n_ctx) for row in forecast.contexts):
        say(f"\n* longer than the {tokens(spec.n_trained)} tokens of the model's training")
    if memory.half_bytes > 2:
        say("\nMLX computes on a CPU here, in float32; --memory plans for a Mac")


def table_rows(candidates: Sequence[Candidate], contexts: Sequence[int]) -> list[PlanRow]:
    """KV of every model, at 16 bit, for these contexts."""
    rows = []
    for candidate in candidates:
        spec = spec_of(candidate)
        geometry = candidate.geometry()
        kv_bytes = {n: geometry.n_bytes(n) for n in contexts}
        growth = spec.growth_bytes
        window = spec.window_bytes
        rows.append(PlanRow(candidate.preset.name, _geometry(spec), growth, window, kv_bytes))
    return rows


def show_table(rows: Sequence[PlanRow]) -> None:
    contexts = list(rows[0].kv_bytes) if rows else []
    headings = ["PRESET", "GEOMETRY", "PER TOKEN", "WINDOWS"]
    headings += [f"KV AT {tokens(n)}" for n in contexts]
    cells = []
    for row in rows:
        sizes = (row.growth_bytes, row.window_bytes, *row.kv_bytes.values())
        cells.append((row.preset, row.geometry, *map(size, sizes)))
    table(headings, cells)


def _weights(forecast: Forecast) -> str:
    stored = forecast.spec.weights_bytes
    held = forecast.here.weights_bytes
    wider = ""
    if held != stored:
        wider = f"; {size(held)} in memory"
    head = ""
    if forecast.spec.head_bytes:
        head = f"; {size(forecast.spec.head_bytes)} of them an MTP head"
    return f"{size(stored)}, {forecast.spec.weights_from}{wider}{head}"


def _growth(forecast: Forecast) -> str:
    stored = forecast.spec.growth_bytes
    held = forecast.here.growth_bytes
    wider = ""
    if held != stored:
        wider = f", {size(held)} in memory"
    return f"{size(stored)} a token{wider}; windows {size(forecast.spec.window_bytes)}"


def _is_beyond(spec: Spec, n_ctx: int) -> bool:
    return 0 < spec.n_trained < n_ctx


def _length(spec: Spec, n_ctx: int) -> str:
    return f"{tokens(n_ctx)}{'*' if _is_beyond(spec, n_ctx) else ''}"


def _images(spec: Spec) -> str:
    if spec.why_no_images:
        return f"none: {spec.why_no_images}"
    width, height = SCREENSHOT
    n_bytes = size(spec.n_screenshot * spec.growth_bytes)
    return (
        f"{size(spec.tower_bytes)} of the weights are the tower; a screenshot of {width} x "
        f"{height} is {spec.n_screenshot:,} tokens, {n_bytes} of KV"
    )


def _source(spec: Spec) -> str:
    return f"{spec.config}{' (an excerpt; not downloaded)' if spec.is_excerpt else ''}"


def _kind(row: KindRow) -> tuple[object, ...]:
    dims = f"{row.k_dim}/{row.v_dim}"
    if row.k_dim == row.v_dim:
        dims = f"{row.k_dim}"
    return (
        row.kind,
        len(row.layers),
        _numbers(row.layers),
        f"{row.heads} x {dims}" if row.heads else "-",
        row.window or "-",
        size(row.token_bytes * len(row.layers)) if not row.state_bytes else "-",
        size(row.state_bytes),
    )


def _numbers(layers: Sequence[int]) -> str:
    text = ", ".join(map(str, layers[:12]))
    if len(layers) > 12:
        return f"{text}, ..."
    return text


def _geometry(spec: Spec) -> str:
    parts = []
    for kind in spec.kinds:
        window = ""
        if kind.window:
            window = f", W {kind.window}"
        dims = ""
        if kind.heads:
            dims = f" ({kind.heads} x {kind.k_dim}{window})"
        parts.append(f"{len(kind.layers)} {kind.kind}{dims}")
    return " + ".join(parts)


def _fit_text(forecast: Forecast) -> str:
    fit = forecast.wanted
    memory = forecast.memory
    if forecast.kind is ServiceKind.EMBEDDING:
        asked = f"texts of up to {tokens(fit.n_ctx)} tokens: {size(fit.n_bytes)}"
        most = f"{fit.max_ctx} tokens"
    else:
        bits = fit.bits
        if fit.bits == PLAIN_BITS:
            bits = forecast.here.bits
        slots = f"{fit.n_slots} slots x {tokens(fit.n_ctx)} at {bits}-bit KV"
        asked = f"{slots}: {size(fit.n_bytes)}"
        most = f"{fit.max_agents} such slots, or {fit.max_ctx} tokens in each of {fit.n_slots}"
    if fit.fits:
        return f"{asked}: fits; up to {most}"
    helps = ""
    if fit.nearest:
        helps = "; what would fit: " + ", or ".join(fit.nearest)
    if fit.n_bytes <= memory.usable:
        return f"{asked}: does not fit: {fit.over_budget}{helps}"
    return f"{asked}: does not fit into {size(memory.usable)}{helps}"


def _show_contexts(forecast: Forecast) -> None:
    plain = forecast.here.bits
    headings = ["CONTEXT"]
    for precision in forecast.contexts[0].precisions:
        headings += [
            f"KV {plain if precision.bits == PLAIN_BITS else precision.bits} BIT",
            "AGENTS",
        ]
    rows = []
    for row in forecast.contexts:
        cells: list[object] = [_length(forecast.spec, row.n_ctx)]
        for precision in row.precisions:
            cells += [size(precision.kv_bytes), precision.n_agents]
        rows.append([*cells, size(row.disk_bytes)])
    table([*headings, "DISK PER AGENT"], rows)


def _show_matrix(forecast: Forecast) -> None:
    contexts = [row.n_ctx for row in forecast.contexts]
    fit_of = {(fit.n_slots, fit.n_ctx): fit for fit in forecast.matrix}
    rows = []
    for n_slots in dict.fromkeys(fit.n_slots for fit in forecast.matrix):
        cells = [fit_of[n_slots, n_ctx] for n_ctx in contexts]
        rows.append((n_slots, *(size(fit.n_bytes) if fit.fits else "no" for fit in cells)))
    table(("SLOTS", *(f"x {_length(forecast.spec, n)}" for n in contexts)), rows)


def show_ranking(
    rows: Sequence[AdviceRow], memory: MemoryBudget, n_agents: int, n_ctx: int, shows_all: bool
) -> None:
    """The ranking, then the line that starts the best one."""
    say(
        f"{n_agents} agents x {tokens(n_ctx)} tokens on {memory.owner} "
        f"({size(memory.usable)} for models of {size(memory.total)}; {RESERVE} % of it kept free)"
    )
    fitting = [row for row in rows if row.command]
    listed = rows if shows_all else fitting
    cells = []
    for n, row in enumerate(listed, 1):
        sizes = (size(row.n_bytes), size(row.weights_bytes))
        cells.append((n, row.preset, *sizes, row.kv_bits, row.max_agents, row.why))
    if cells:
        table(ADVICE_HEADS, cells, ADVICE_DROPPED_FIRST)
    if not fitting:
        say("no preset fits; try fewer --agents or a shorter --ctx")
    if n_hidden := len(rows) - len(listed):
        say(f"{n_hidden} more do not fit: `--all` shows them")
    if fitting:
        say(f"\n{fitting[0].command}")


def show_reasons(derived: DerivedPreset) -> None:
    """The table of what was chosen, and why."""
    rows = [(reason.setting, reason.value, reason.why) for reason in derived.reasons]
    table(("SETTING", "VALUE", "WHY"), rows)
