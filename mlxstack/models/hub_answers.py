"""Refuses answers of a hub with paths for names.

The hub's client takes ETags and commits as parts of paths, without a look at them.
"""

import re
import reprlib
from typing import Any

import msgspec
from huggingface_hub import set_client_factory
from huggingface_hub.utils._http import default_client_factory
from msgspec import Struct

from mlxstack.core.errors import SetupError

HEADERS = ("etag", "x-linked-etag", "x-repo-commit")
NAME = re.compile(r'(W/)?"?[\w:+=-][\w.:+=-]*"?')
MODELS = "/api/models/"


class CommitOfModel(Struct, frozen=True):
    """The commit in the hub's answer about a model."""

    sha: str | None = None


def install() -> None:
    """Check every answer that the hub's client gets in this process."""
    set_client_factory(_client)


def _client() -> Any:
    client = default_client_factory()
    hooks = client.event_hooks
    client.event_hooks = {**hooks, "response": [*hooks.get("response", ()), check_answer]}
    return client


def check_answer(answer: Any) -> None:
    """Raise SetupError for a name that is no plain file name."""
    names = []
    # Only the questions for the facts of a file name it; the bytes may come from anywhere.
    if answer.request.method == "HEAD":
        names = [answer.headers[name] for name in HEADERS if name in answer.headers]
    elif MODELS in answer.request.url.path and answer.is_success:
        try:
            names = [msgspec.json.decode(answer.read(), type=CommitOfModel).sha or "none"]
        except (msgspec.MsgspecError, RecursionError):
            return
    for name in names:
        if not NAME.fullmatch(name):
            raise SetupError(
                f"the hub at {answer.request.url.host} names a file or commit "
                f"{reprlib.repr(name)}, which is no file name; nothing of it was written"
            )
