"""Providers of KV, which may bring more of a prompt later."""

from collections.abc import Callable
from typing import Protocol

from mlxstack.engine.slots.request_state import RequestState
from mlxstack.policy.kv.reuse_plan import ReusePlan

Ready = Callable[[], None]


class KVProvider(Protocol):
    """Brings KV of prompts from somewhere. MLX thread only."""

    def bring(self, request_state: RequestState, plan: ReusePlan, ready: Ready) -> bool:
        """Begin to bring missing KV of the prompt; False if none comes.

        `ready` ends the wait, with KV or without. It may come again, while the prompt is computed,
        when more KV has come.
        """

    def stop(self, request_id: str) -> None:
        """Bring no more for this request: its prompt is over."""
