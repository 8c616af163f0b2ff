"""Response headers that tell what the caches did for a request."""

from mlxstack.core.engine_events import CacheMiss
from mlxstack.core.request import Request
from mlxstack.service.response_parts import GenerationStarted, ResponsePart

PREFIX = "x-mlx-stack-"

EXPOSED = tuple(
    PREFIX + name
    for name in (
        "cache-hit",
        "cache-prefix-tokens",
        "cache-new-tokens",
        "ttft-saved-ms",
        "cache-miss-reason",
        "slot",
        "agent",
    )
)


def cache_headers(request: Request, first: ResponsePart, saved_s: float) -> dict[str, str]:
    """From the first part of a reply; a part other than Started knows no cache numbers yet."""
    agent = {PREFIX + "agent": request.display_name} if request.display_name else {}
    if not isinstance(first, GenerationStarted):
        return agent
    miss = {PREFIX + "cache-miss-reason": _line(_reason(first.miss))} if first.miss else {}
    return {
        PREFIX + "cache-hit": "true" if first.n_cached else "false",
        PREFIX + "cache-prefix-tokens": str(first.n_cached),
        PREFIX + "cache-new-tokens": str(first.n_prompt - first.n_cached),
        PREFIX + "ttft-saved-ms": str(round(saved_s * 1000)) if first.n_cached else "0",
        PREFIX + "slot": str(first.slot),
        **miss,
        **agent,
    }


def _reason(miss: CacheMiss) -> str:
    return miss.reason if miss.at is None else f"{miss.reason} at token {miss.at}"


def _line(text: str) -> str:
    """Header values are one line of Latin-1."""
    return " ".join(text.split()).encode("latin-1", "replace").decode("latin-1")
