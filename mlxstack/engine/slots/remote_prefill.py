"""Remote prefill: KV of a prompt from a peer, beside other slots."""

from collections.abc import Callable
from functools import partial

from mlxstack.core.interfaces import CallSoon
from mlxstack.core.kv_transfer import RemoteKV, RemotePrompt
from mlxstack.core.request import Request
from mlxstack.policy.remote_prefill import MIN_TOKENS

Ready = Callable[[], None]


class RemotePrefill:
    """Fetches KV of prompts through `remote`. MLX thread only, by `post`."""

    def __init__(self, remote: RemoteKV, post: CallSoon) -> None:
        self._remote = remote
        self._post = post
        self._cancels: dict[str, Callable[[], object]] = {}

    def begin(
        self,
        request: Request,
        n_here: int,
        local_s: float,
        n_decoding: int,
        token_bytes: int,
        ready: Ready,
    ) -> bool:
        """Ask a peer; False if none is asked. `ready` ends the wait.

        It is called again when fetched KV is here while the prompt is computed.
        """
        # The last token is computed here, for its logits.
        tokens = request.tokens[:-1]
        # A peer gets token ids only, and cannot compute those of an image.
        is_own = request.is_for_peer or not request.use_cache or bool(request.images)
        if is_own or len(tokens) - n_here < MIN_TOKENS:
            return False
        prompt = RemotePrompt(
            tokens=tokens,
            salt=request.salt,
            checkpoint_positions=request.checkpoint_positions,
            n_here=n_here,
            local_s=local_s,
            n_decoding=n_decoding,
            token_bytes=token_bytes,
        )
        wake = partial(self._post, ready)
        cancel = self._remote.fetch(prompt, wake, wake)
        if cancel is not None:
            self._cancels[request.id] = cancel
        return cancel is not None

    def end(self, request_id: str) -> None:
        """Cancel the pending fetch of a request, if any."""
        cancel = self._cancels.pop(request_id, None)
        if cancel is not None:
            cancel()
