"""Patterns of tokenizers that give up on a text.

Oniguruma has a limit of steps. Beyond it, the Rust library panics, and its error is no `Exception`,
so that it would end a thread.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from mlxstack.core.errors import BadRequest

PANIC = "PanicException"
"""Name of the errors of Rust's panics; each library has a class of its own."""


def is_panic(error: BaseException) -> bool:
    """Whether an error is a panic of a Rust library."""
    return type(error).__name__ == PANIC


@contextmanager
def refusing_panics() -> Iterator[None]:
    """Raise BadRequest where a tokenizer panics on a text."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise BadRequest(
            f"the tokenizer of this model gives up on a text of this request: {error}; a pattern "
            "of its tokenizer.json takes too many steps for it: change the text, or the model"
        ) from None
