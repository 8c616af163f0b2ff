"""Nobody goes while a thread still works for him."""

import asyncio
import threading

import pytest

from mlxstack.service.parts.agent_store import in_thread
from tests.patience import PATIENCE_S


async def test_a_result_and_an_error_come_through() -> None:
    assert await in_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await in_thread(divmod, 7, 0)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancelled_caller_waits_for_the_end(fails: bool) -> None:
    begun = threading.Event()
    may_end = threading.Event()
    is_over = threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait(PATIENCE_S)
        is_over.set()
        if fails:
            raise OSError("no disk")

    caller = asyncio.create_task(in_thread(work))
    await asyncio.to_thread(begun.wait, PATIENCE_S)
    for _ in range(3):
        caller.cancel()
        await asyncio.sleep(0.01)
        assert not caller.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert is_over.is_set()
