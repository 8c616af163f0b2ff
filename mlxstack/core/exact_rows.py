"""Measured bits of rows: alone, beside others, and in chunks."""

from enum import StrEnum

from msgspec import Struct


class ExactBits(StrEnum):
    """Use of equal bits: where they cost little, always, or never."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class LayerBits(Struct, frozen=True):
    """Row counts at which a kind of layer has equal bits."""

    kind: str
    """`projection`, `head`, `router` or `experts`."""
    shape: str
    """Inputs, outputs and storage."""
    min_rows: int
    """Rows from which on the bits are equal; 0: at no two row counts."""
    max_rows: int
    """Rows up to which they are; 0: any number."""


class WidthBits(Struct, frozen=True):
    """Rows of a decode step with the bits of rows alone."""

    width: int
    """Rows of the step."""
    n_equal_on: int | None = None
    """With equal bits on; None: not counted."""
    n_equal_off: int | None = None


class ExactRows(Struct, frozen=True):
    """Equal bits of the rows of a model on this device."""

    is_on: bool = False
    reason: str = "not measured"
    """Why it is on or off."""
    max_rows: int = 0
    """Widest pass of decoded rows; 0: any."""
    widths: tuple[WidthBits, ...] = ()
    layers: tuple[LayerBits, ...] = ()
    drafts_equal: bool = False
    """Whether tokens that are verified in one pass have the bits of single ones."""
    chunks_equal: bool = False
    """Whether a prompt has the same bits in any chunks."""
    decoded_equal: bool = False
    """Whether decoded tokens have the bits of tokens in a chunk."""
    decode_cost: float | None = None
    """Share by which it prolongs decode steps, the worst of the measured widths."""
    prefill_cost: float | None = None
    """Share by which it prolongs a prefill chunk."""


def described(exact: ExactRows) -> str:
    """State, reason, layers and equal rows in a line."""
    parts = [f"{'on' if exact.is_on else 'off'}: {exact.reason}"]
    for layer in exact.layers:
        rows = f"from {layer.min_rows} rows on"
        if layer.max_rows:
            rows = f"from {layer.min_rows} to {layer.max_rows} rows"
        if not layer.min_rows:
            rows = "at no two row counts"
        if layer.min_rows != 1 or layer.max_rows:
            parts.append(f"{layer.kind} {layer.shape}: {rows}")
    for width in exact.widths:
        counts = f"{width.n_equal_on} of {width.width} rows equal"
        parts.append(f"{counts}, {width.n_equal_off} without")
    if exact.is_on:
        parts.append(f"chunks of prompts {'equal' if exact.chunks_equal else 'not equal'}")
        parts.append(f"decoded tokens {'equal' if exact.decoded_equal else 'not equal'} to chunks")
    return "; ".join(parts)
