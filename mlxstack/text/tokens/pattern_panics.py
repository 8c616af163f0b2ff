"""Patterns of tokenizers that give up on a text.

Oniguruma has a limit of steps. Beyond it, the Rust library panics, and its error is no `Exception`,
so that it would end a thread.
"""

from mlxstack.core.errors import BadRequest

PANIC = "PanicException"
"""Name of the errors of Rust's panics; each library has a class of its own."""


def is_panic(error: BaseException) -> bool:
    """Whether an error is a panic of a Rust library."""
    return type(error).__name__ == PANIC


def refuse_panic(error: BaseException) -> None:
    """Raise BadRequest for a panic of a tokenizer, nothing for other errors."""
    if not is_panic(error):
        return
    raise BadRequest(
        f"the tokenizer of this model gives up on a text of this request: {error}; a pattern of "
        "its tokenizer.json takes too many steps for it: change the text, or the model"
    ) from None
