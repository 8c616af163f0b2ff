"""Futures that end as others do."""

from concurrent.futures import Future
from typing import Any


def copy_outcome(one: "Future[Any]", other: "Future[Any]") -> None:
    """`other` ends as `one` does."""

    def settle(done: "Future[Any]") -> None:
        error = done.exception()
        if error is not None:
            other.set_exception(error)
        else:
            other.set_result(done.result())

    one.add_done_callback(settle)
