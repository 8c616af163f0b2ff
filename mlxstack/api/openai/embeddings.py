"""Embeddings, which a chat model does not give."""

from typing import Any

from litestar import post

from mlxstack.core.errors import Unsupported


@post(["/v1/embeddings", "/embeddings"], status_code=200)
async def embeddings() -> None:
    """Refuses in the words that clients of llama-server know."""
    raise Unsupported(
        "This server does not support embeddings; start an embedding preset beside it"
    )


ROUTES: list[Any] = [embeddings]
