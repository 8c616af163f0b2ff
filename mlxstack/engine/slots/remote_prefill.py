"""Remote prefill: KV of a prompt from a peer, beside other slots."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from mlxstack.core.kv_transfer import RemoteKV, RemotePrompt
from mlxstack.core.ports import CallSoon, Manifest
from mlxstack.core.request import Request
from mlxstack.engine.slots.kv_transfer import KVExchange
from mlxstack.policy.remote_prefill import LEAST_TOKENS

log = logging.getLogger(__name__)

Ready = Callable[[], None]


class RemotePrefill:
    """Fetches KV of prompts through `remote`. MLX thread only, by `post`."""

    def __init__(self, remote: RemoteKV, exchange: KVExchange, post: CallSoon) -> None:
        self._remote = remote
        self._exchange = exchange
        self._post = post
        self._cancels: dict[str, Callable[[], None]] = {}

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
        is_own = request.is_for_peer or not request.use_cache
        if is_own or len(tokens) - n_here < LEAST_TOKENS:
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
        cancel = self._remote.fetch(
            prompt,
            lambda: self._post(ready),
            lambda manifest: self._post(partial(self._adopt, manifest, ready)),
        )
        if cancel is not None:
            self._cancels[request.id] = cancel
        return cancel is not None

    def end(self, request_id: str) -> None:
        """Cancel the pending fetch of a request, if any."""
        cancel = self._cancels.pop(request_id, None)
        if cancel is not None:
            cancel()

    def _adopt(self, manifest: Manifest | None, ready: Ready) -> None:
        """Index what came, if anything, then call `ready`."""
        if manifest is None:
            ready()
            return

        def settle(done: "Future[int]") -> None:
            if (error := done.exception()) is not None:
                log.warning("KV of another service is not used: %s", error)
            ready()

        adopting: Future[int] = Future()
        adopting.add_done_callback(settle)
        self._exchange.adopt(manifest, adopting)
