"""How big a bite of which prompt is prefilled next, so that nobody falls silent for long."""

from collections.abc import Sequence

from msgspec import Struct

from mlxstack.policy.desk import Seat

FINEST = 16
"""Bites shorter than a block end on multiples of this, in tokens."""


class Pace(Struct, frozen=True):
    """The bounds of a bite.

    `max_stall_s` is the longest silence of a decoding agent; `patience_s` the longest bite when
    nobody decodes, so that arrivals and cancellations are heard; `max_bite` and `block` are
    tokens; `credit` is how many tokens of head start a second of waiting is worth, in units of
    the prefill speed.
    """

    max_stall_s: float = 0.25
    patience_s: float = 1.0
    max_bite: int = 2048
    block: int = 128
    credit: float = 0.5


class Speed(Struct, frozen=True):
    """Measured: prefill tokens per second, and seconds of one decode step. 0: not known yet."""

    prefill_tps: float = 0.0
    decode_s: float = 0.0


def observe_prefill(speed: Speed, n_tokens: int, seconds: float) -> Speed:
    """The speed after a bite; the newest bites weigh most, because cost grows with position."""
    if n_tokens < FINEST or seconds <= 0:
        return speed
    measured = n_tokens / seconds
    old = speed.prefill_tps
    return Speed(measured if old == 0 else 0.5 * old + 0.5 * measured, speed.decode_s)


def observe_decode(speed: Speed, seconds: float) -> Speed:
    """The speed after a decode step."""
    old = speed.decode_s
    return Speed(speed.prefill_tps, seconds if old == 0 else 0.8 * old + 0.2 * seconds)


def next_to_prefill(seats: Sequence[Seat], now: float, speed: Speed, pace: Pace) -> Seat:
    """Shortest remaining prompt first; waiting earns a head start, so long ones get there too."""
    per_second = pace.credit * max(speed.prefill_tps, 1.0)

    def rank(seat: Seat) -> tuple[float, int]:
        waited = now - seat.ticket.arrived if seat.ticket else 0.0
        return seat.n_left - per_second * waited, seat.id

    return min(seats, key=rank)


def bite(seat: Seat, n_decoding: int, speed: Speed, pace: Pace) -> int:
    """Tokens to prefill now for this seat, ending on a block boundary whenever that is near.

    With someone decoding, bite plus decode step stay inside `max_stall_s` at measured speed.
    """
    budget = _budget(n_decoding, speed, pace)
    if seat.n_left <= budget:
        return seat.n_left
    end = seat.position + budget
    aligned = end - end % pace.block
    if aligned <= seat.position:
        aligned = end - end % FINEST
    return aligned - seat.position if aligned > seat.position else budget


def _budget(n_decoding: int, speed: Speed, pace: Pace) -> int:
    if speed.prefill_tps == 0:
        return pace.block
    seconds = pace.max_stall_s - speed.decode_s if n_decoding else pace.patience_s
    return max(FINEST, min(pace.max_bite, int(speed.prefill_tps * seconds)))
