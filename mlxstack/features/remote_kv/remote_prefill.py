"""Remote prefill: KV of a prompt from a peer, beside other slots."""

from collections.abc import Callable
from functools import partial

from mlxstack.core.interfaces import CallSoon
from mlxstack.engine.slots.kv_provider import Ready
from mlxstack.engine.slots.request_state import RequestState
from mlxstack.features.remote_kv.policy import MIN_TOKENS
from mlxstack.features.remote_kv.values import RemoteKV, RemotePrompt
from mlxstack.policy.kv.reuse_plan import ReusePlan


class RemotePrefill:
    """Brings KV of prompts from `remote`, asked once for each.

    MLX thread only, by `post`. A token has `token_bytes` of KV; prefill of n tokens from a
    position takes `expected_s`, beside `n_decoding` rows.
    """

    def __init__(
        self,
        remote: RemoteKV,
        post: CallSoon,
        token_bytes: int,
        expected_s: Callable[[int, int], float],
        n_decoding: Callable[[], int],
    ) -> None:
        self._remote = remote
        self._post = post
        self._token_bytes = token_bytes
        self._expected_s = expected_s
        self._n_decoding = n_decoding
        self._cancels: dict[str, Callable[[], object] | None] = {}
        """Ends of the pending fetches, by request; None where no peer is asked."""

    def bring(self, request_state: RequestState, plan: ReusePlan, ready: Ready) -> bool:
        """Ask a peer once for what the plan lacks; False otherwise."""
        request = request_state.request
        if request.id in self._cancels:
            return False
        self._cancels[request.id] = None
        # The last token is computed here, for its logits.
        tokens = request.tokens[:-1]
        n_left = len(tokens) - plan.position
        # A peer gets token ids only, and cannot compute those of an image.
        is_own = request.is_for_peer or not request.use_cache or bool(request.images)
        is_own = is_own or request.drops_kv
        if is_own or n_left < MIN_TOKENS:
            return False
        prompt = RemotePrompt(
            tokens=tokens,
            salt=request.salt,
            checkpoint_positions=request.checkpoint_positions,
            n_here=plan.position,
            local_s=self._expected_s(plan.position, n_left),
            n_decoding=self._n_decoding(),
            token_bytes=self._token_bytes,
        )
        wake = partial(self._post, ready)
        self._cancels[request.id] = self._remote.fetch(prompt, wake, wake)
        return self._cancels[request.id] is not None

    def stop(self, request_id: str) -> None:
        """Cancel the pending fetch of a request, if any."""
        cancel = self._cancels.pop(request_id, None)
        if cancel is not None:
            cancel()
