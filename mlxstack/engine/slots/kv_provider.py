"""Providers of KV: what may bring more KV of a prompt later, while other slots go on."""

from collections.abc import Callable
from typing import Protocol

from mlxstack.engine.slots.request_state import RequestState
from mlxstack.policy.kv.reuse_plan import ReusePlan

Ready = Callable[[], None]


class KVProvider(Protocol):
    """Brings KV of prompts from somewhere. MLX thread only."""

    def bring(self, request_state: RequestState, plan: ReusePlan, ready: Ready) -> bool:
        """Begin to bring KV of the prompt that is not in memory; False if none may come.

        `ready` ends the wait, with KV or without. It may come again, while the prompt is computed,
        when more KV has come.
        """

    def stop(self, request_id: str) -> None:
        """Bring no more for this request, whose prompt is computed or given up."""
