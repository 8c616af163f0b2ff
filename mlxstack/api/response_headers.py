"""Headers of an answer: reused KV, unenforced schemas, omitted tools, repetitions."""

from typing import TYPE_CHECKING

from mlxstack.core.engine_events import CacheMiss, RequestTimings, SlotAssigned
from mlxstack.core.prompt_tokens import n_computed
from mlxstack.core.request import TurnKind
from mlxstack.core.response_parts import ResponsePart

if TYPE_CHECKING:
    from mlxstack.service.calls.generation import Generation

PREFIX = "x-mlx-stack-"
AGENT = PREFIX + "agent"
CACHE_HEADERS = tuple(
    PREFIX + name
    for name in (
        "cache-hit",
        "cache-prefix-tokens",
        "cache-new-tokens",
        "ttft-saved-ms",
        "cache-miss-reason",
        "cache-lost-tokens",
        "cache-lost-ms",
        "begun-early",
        "replayed",
        "images",
        "slot",
        "agent",
        "turn",
        "cache",
        "loose-schemas",
        "omitted-tools",
        "loops",
        "repeated-call",
    )
)

MAX_CHARS = 1000
"""Characters of a list of names."""


def answer_headers(
    generation: "Generation", first: ResponsePart | None, work: RequestTimings | None = None
) -> dict[str, str]:
    """Cache headers, repetitions, and lists of what was left out."""
    headers = cache_headers(generation, first, work)
    if work is not None and work.loops:
        headers[PREFIX + "loops"] = "; ".join(map(str, work.loops))[:MAX_CHARS]
    if generation.request.repeated_call:
        headers[PREFIX + "repeated-call"] = _line(str(generation.request.repeated_call))[:MAX_CHARS]
    for name, left_out in (
        ("loose-schemas", generation.loose_schemas),
        ("omitted-tools", generation.options.omitted_tools),
    ):
        if left_out:
            headers[PREFIX + name] = _line(", ".join(left_out))[:MAX_CHARS]
    return headers


def cache_headers(
    generation: "Generation", first: ResponsePart | None, work: RequestTimings | None = None
) -> dict[str, str]:
    """Cache headers of a response whose first part is SlotAssigned.

    While its `work` is under way they give the expected seconds.
    """
    headers = {}
    request = generation.request
    if request.display_name:
        headers[AGENT] = request.display_name
    if request.caller.turn_kind is not TurnKind.PERSON:
        headers[PREFIX + "turn"] = (
            f"{request.caller.turn_kind}, priority {request.priority.name.lower()}"
        )
    if request.drops_kv:
        headers[PREFIX + "cache"] = "drop"
    if isinstance(first, SlotAssigned):
        expected = RequestTimings(prefill_s=first.expected_s, saved_s=first.saved_s)
        values = _of_reuse(generation, first, work or expected)
        headers |= {PREFIX + name: value for name, value in values.items()}
    return headers


def _of_reuse(
    generation: "Generation", first: SlotAssigned, work: RequestTimings
) -> dict[str, str]:
    images = generation.request.images
    n_replayed = generation.prompt.n_replayed
    early = first.early
    values = {
        "cache-hit": "false",
        "cache-prefix-tokens": str(first.n_cached),
        "cache-new-tokens": str(first.n_prompt - first.n_cached),
        "ttft-saved-ms": "0",
        "slot": str(first.slot),
    }
    if first.n_cached:
        values["cache-hit"] = "true"
        values["ttft-saved-ms"] = str(round(work.saved_s * 1000))
    if early:
        values["begun-early"] = f"{early.n_begun} tokens, used {early.n_used}"
    if n_replayed:
        values["replayed"] = str(n_replayed)
    if images:
        values["images"] = f"{len(images)}, computed {n_computed(images, first.n_cached)}"
    if first.miss is not None:
        values |= _of_miss(first.miss, first, work)
    return values


def _of_miss(miss: CacheMiss, first: SlotAssigned, work: RequestTimings) -> dict[str, str]:
    reason = miss.reason
    if miss.at is not None:
        reason += f" at token {miss.at}"
    lost_s = work.prefill_s * miss.n_lost / max(1, first.n_prompt - first.n_cached)
    return {
        "cache-miss-reason": _line(reason),
        "cache-lost-tokens": str(miss.n_lost),
        "cache-lost-ms": str(round(lost_s * 1000)),
    }


def _line(text: str) -> str:
    """Header values are one line of Latin-1."""
    return " ".join(text.split()).encode("latin-1", "replace").decode("latin-1")
