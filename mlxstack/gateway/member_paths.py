"""Paths and methods that a gateway forwards to its members.

A member is asked by the canonical path that was looked up here.
"""

import re
from functools import cache

from mlxstack.api.errors import served_instead
from mlxstack.core.errors import NotFound, WrongMethod

CHANGES = frozenset({"/v1/models/load", "/v1/models/unload"})
"""Changes of models, which would break the reservations of a gateway."""

READ = frozenset({"GET"})
POST = frozenset({"POST"})
BOTH = frozenset({"GET", "POST"})
PROBED = frozenset({"GET", "HEAD"})

METHODS: dict[frozenset[str], str] = {
    POST: """
        /api/chat /api/embed /api/embeddings /api/generate /api/pull /api/show
        /api/v0/chat/completions /api/v0/completions /api/v0/embeddings /apply-template
        /cache/clear /cache/gc /cache/prefixes /cache/warm /chat/completions
        /chat/completions/input_tokens /completion /completions /detokenize /embedding /embeddings
        /heads /infill /kv/match /kv/missing /kv/prefill /page/markdown
        /responses /responses/input_tokens /tokenize /slots/{}
        /v1/agents/{}/fork /v1/agents/{}/generate /v1/agents/{}/move
        /v1/agents/{}/rewind /v1/batch/chat/completions /v1/batch/completions /v1/batch/messages
        /v1/batch/responses /v1/chat/completions /v1/chat/completions/input_tokens
        /v1/completions /v1/embeddings /v1/messages /v1/messages/count_tokens /v1/responses
        /v1/responses/input_tokens
    """,
    READ: """
        /api/ps /api/v0/models /api/v0/models/{path} /api/v1/models /cache /events /kv/peers
        /metrics /models/{path} /page/clients /receipts /receipts/{} /requests /requests/{} /schema
        /schema/{path} /slots /static/{} /usage /v1/agents/{}/history /v1/models/{path}
    """,
    PROBED: "/ /api/tags /api/version /health /models /v1/health /v1/models",
    BOTH: "/props /v1/agents",
    frozenset({"HEAD"}): "/api/hello",
    frozenset({"DELETE"}): "/cache/prefixes/{}",
    frozenset({"PUT"}): "/v1/agents/{}/kv",
    frozenset({"GET", "PUT"}): "/kv/{}/{}",
    frozenset({"GET", "POST", "DELETE"}): "/v1/agents/{}",
}
BY_PATH = {path: methods for methods, paths in METHODS.items() for path in paths.split()}


def require_forwarded(method: str, path: str) -> None:
    """Refuse a path or method of no member. Raises NotFound, WrongMethod."""
    methods = BY_PATH.get(path) or _matching(path)
    if not methods:
        raise NotFound(
            f"File Not Found: there is no {method} {path} behind this gateway; "
            f"{served_instead(path)}"
        )
    if method not in methods:
        allowed = ", ".join(sorted(methods))
        raise WrongMethod(f"File Not Found: {path} takes {allowed}, not {method}", allowed)


def _matching(path: str) -> frozenset[str]:
    if path in CHANGES:
        return frozenset()
    return next((methods for form, methods in _forms() if form.fullmatch(path)), frozenset())


@cache
def _forms() -> tuple[tuple[re.Pattern[str], frozenset[str]], ...]:
    """Paths with variable segments, as regular expressions."""
    return tuple(
        (re.compile(path.replace("{path}", ".+").replace("{}", "[^/]+")), methods)
        for path, methods in BY_PATH.items()
        if "{" in path
    )
