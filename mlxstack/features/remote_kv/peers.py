"""Peers: services for KV transfer, remote prefill and moves of agents."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import httpx
import msgspec
from msgspec import Struct
from msgspec.structs import replace
from prometheus_client import Metric

from mlxstack.core.errors import BadRequest, Damaged, SetupError, StackError
from mlxstack.core.interfaces import Manifest
from mlxstack.core.model_info import ModelFacts
from mlxstack.core.preset import PeerSpec, Preset
from mlxstack.features.remote_kv import store as kv_transfer
from mlxstack.features.remote_kv.metrics import peer_metrics
from mlxstack.features.remote_kv.policy import (
    PrefillFacts,
    PrefillPlan,
    PrefillSource,
    choose,
    patience_s,
)
from mlxstack.features.remote_kv.store import IncomingKVFile
from mlxstack.features.remote_kv.values import (
    KVMatch,
    KVOffer,
    KVQuery,
    MissingKV,
    MovedAgent,
    PeerView,
    RemotePrompt,
)
from mlxstack.host.macos import local_network_hint
from mlxstack.service.parts.agent_store import in_thread
from mlxstack.service.parts.service_feature import ServiceFeature
from mlxstack.store.kv_store import DiskKVStore

if TYPE_CHECKING:
    from mlxstack.engine.chat_engine import ChatEngine

log = logging.getLogger("mlxstack.peers")

KEY_VARIABLE = "MLX_STACK_PEER_KEY"
CONNECT_S = 2.0
MATCH_S = 2.0
FILE_S = 30.0
"""Seconds of silence until a transfer is resumed, `TRIES - 1` times."""
TRIES = 3
RACE_S = 600.0
MAX_FETCHES = 2
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
HEADER_BYTES = 1 << 20
ANSWER_BYTES = 1 << 24
"""Bound on an answer in JSON."""
STATE_BYTES = 1 << 30
"""Bound on what checkpoints add to the KV of a prompt."""
MEASURABLE = 1 << 20
"""Minimum bytes of a transfer that measures the link."""

T = TypeVar("T")


class ErrorReason(Struct, frozen=True):
    """The reason in an error of another service."""

    message: str


class ErrorAnswer(Struct, frozen=True):
    """Body of an error of another service."""

    error: ErrorReason


class Peer:
    """Peer: its calls, measured link speed and failures.

    Belongs to the event loop.
    """

    def __init__(self, url: str, key: str | None) -> None:
        # A small body could unpack to a large one.
        headers = {"accept-encoding": "identity"}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        timeout = httpx.Timeout(FILE_S, connect=CONNECT_S)
        # Without TLS no certificates are needed; to read them takes longer than a request.
        is_plain = url.lower().startswith("http:")
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=timeout,
            trust_env=False,
            verify=False if is_plain else httpx.create_ssl_context(),
        )
        self._until = 0.0
        self.view = PeerView(url)

    @property
    def is_ready(self) -> bool:
        """False for a while after a failure."""
        return time.monotonic() >= self._until

    def note(self, **totals: float) -> None:
        """Add to the totals of these names."""
        self.view = replace(
            self.view, **{name: getattr(self.view, name) + n for name, n in totals.items()}
        )

    def fail(self, reason: str) -> None:
        """Pause the peer, twice as long after each failure in a row."""
        pause_s = FIRST_PAUSE_S
        if self.view.trouble:
            pause_s = min(MAX_PAUSE_S, 2 * self.view.pause_s)
        self._until = time.monotonic() + pause_s
        self.note(n_failures=1)
        self.view = replace(self.view, trouble=reason, pause_s=pause_s)
        log.warning("peer %s failed; backing off for %g s: %s", self.view.url, pause_s, reason)

    def succeed(self, n_bytes: int = 0, seconds: float = 0.0) -> None:
        """Forget failures, and measure the link by the bytes that came."""
        speed = self.view.link_bytes_per_s
        if n_bytes >= MEASURABLE and seconds > 0:
            measured = n_bytes / seconds
            speed = 0.5 * ((speed or measured) + measured)
        self.view = replace(self.view, trouble="", pause_s=0.0, link_bytes_per_s=speed)

    async def close(self) -> None:
        """End all connections."""
        await self._http.aclose()

    async def call(self, method: str, path: str, body: object, kind: type[T], limit_s: float) -> T:
        """A call with JSON. Raises StackError."""
        content = msgspec.json.encode(body)
        headers = {"content-type": "application/json"}
        try:
            async with (
                asyncio.timeout(limit_s),
                self._http.stream(
                    method, path, content=content, headers=headers, timeout=limit_s
                ) as answer,
            ):
                return msgspec.json.decode(await _content(answer), type=kind)
        except (httpx.HTTPError, TimeoutError, msgspec.MsgspecError) as error:
            raise _broken(self.view.url, error) from error

    async def download(self, store: DiskKVStore, name: tuple[str, str], limit: int) -> int:
        """Download a file of at most `limit` bytes, verified; its bytes.

        A broken transfer goes on where it ended. Raises StackError.
        """
        with await in_thread(IncomingKVFile, store, *name, limit) as incoming:
            etag = ""
            for n_left in reversed(range(TRIES)):
                try:
                    etag = await self._receive(incoming, "/kv/{}/{}".format(*name), etag)
                    break
                except httpx.TransportError as error:
                    if not n_left:
                        raise _broken(self.view.url, error) from error
            await in_thread(incoming.finish)
            return incoming.n_bytes

    async def _receive(self, incoming: IncomingKVFile, path: str, etag: str) -> str:
        """Receive the rest of a file; its ETag."""
        n_bytes = incoming.n_bytes
        headers = {"range": f"bytes={n_bytes}-", "if-range": etag} if n_bytes else {}
        async with self._http.stream("GET", path, headers=headers) as answer:
            if not answer.is_success:
                await _content(answer)
            if n_bytes and answer.status_code != httpx.codes.PARTIAL_CONTENT:
                incoming.restart()
            part = bytearray()
            try:
                async for data in answer.aiter_raw():
                    part += data
                    if len(part) >= kv_transfer.PART:
                        await in_thread(incoming.write, part)
                        part = bytearray()
            finally:
                incoming.write(part)
            return str(answer.headers.get("etag", ""))

    async def upload(self, store: DiskKVStore, identity: str, key: str) -> int:
        """Send a file of the store; its bytes. Raises StackError."""
        about = await asyncio.to_thread(kv_transfer.info, store, identity, key)

        async def parts() -> AsyncIterator[bytes]:
            for start in range(0, about.n_bytes, kv_transfer.PART):
                yield await asyncio.to_thread(kv_transfer.read_part, store, identity, key, start)

        headers = {"content-length": str(about.n_bytes)}
        try:
            path = f"/kv/{identity}/{key}"
            async with self._http.stream("PUT", path, content=parts(), headers=headers) as answer:
                await _content(answer)
        except httpx.HTTPError as error:
            raise _broken(self.view.url, error) from error
        return about.n_bytes


class Peers(ServiceFeature):
    """Peers of this service, whose KV files are in `store`.

    `fetch` is thread-safe, all else belongs to the event loop. KV files go to and come from
    `store`.
    """

    def __init__(self, specs: tuple[str | PeerSpec, ...], store: DiskKVStore) -> None:
        self.store = store
        self._peers = [Peer(*_address(spec, os.environ)) for spec in specs]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._n_fetches = 0

    async def after_load(self, preset: Preset, engine: "ChatEngine", facts: ModelFacts) -> None:
        """Fetch KV of the loaded model from now on."""
        self._loop = asyncio.get_running_loop()
        self._engine = engine
        self._identity = facts.identity.key()

    async def close(self) -> None:
        """Fetch nothing more."""
        self._loop = None
        for peer in self._peers:
            await peer.close()

    def views(self) -> tuple[PeerView, ...]:
        """State of all peers."""
        return tuple(peer.view for peer in self._peers)

    def metrics(self) -> Iterable[Metric]:
        return peer_metrics(self.views())

    def troubles(self) -> Sequence[str]:
        return [f"{peer.url}: {peer.trouble}" for peer in self.views() if peer.trouble]

    def at(self, url: str) -> Peer:
        """The peer at this URL. Raises BadRequest for an unknown one.

        A client chooses no address to call.
        """
        for peer in self._peers:
            if peer.view.url == url.rstrip("/"):
                return peer
        urls = ", ".join(peer.view.url for peer in self._peers) or "none"
        raise BadRequest(
            f"{url} is no peer of this service (it has {urls}); add it to server.peers of the "
            "preset",
            "to",
        )

    def fetch(
        self, prompt: RemotePrompt, compute_here: Callable[[], None], done: Callable[[], None]
    ) -> Callable[[], object] | None:
        """Fetch KV of a prompt; see `features.remote_kv.values.RemoteKV`."""
        is_any = any(peer.is_ready for peer in self._peers)
        if self._loop is None or not is_any or self._n_fetches >= MAX_FETCHES:
            return None
        fetching = self._fetch(prompt, compute_here, done)
        return asyncio.run_coroutine_threadsafe(fetching, self._loop).cancel

    async def _fetch(
        self, prompt: RemotePrompt, compute_here: Callable[[], None], done: Callable[[], None]
    ) -> None:
        self._n_fetches += 1
        try:
            await self._from_best(prompt, compute_here)
        except Exception:
            log.exception("KV of a peer could not be fetched")
        finally:
            self._n_fetches -= 1
            done()

    async def _from_best(self, prompt: RemotePrompt, compute_here: Callable[[], None]) -> None:
        """Ask all peers, fetch from the best; nothing for local prefill."""
        ready = [peer for peer in self._peers if peer.is_ready]
        plans = await asyncio.gather(*(self._plan(peer, prompt) for peer in ready))
        options = [
            (plan.is_race, plan.expected_s, index)
            for index, plan in enumerate(plans)
            if plan.source is not PrefillSource.LOCAL
        ]
        if not options:
            return
        index = min(options)[-1]
        plan = plans[index]
        peer = ready[index]
        if plan.is_race:
            compute_here()
        limit_s = RACE_S if plan.is_race else patience_s(plan, prompt.local_s)
        try:
            async with asyncio.timeout(limit_s):
                await self._bring(peer, plan, prompt, limit_s)
        except TimeoutError:
            peer.fail(f"it took longer than {limit_s:.1f} s")
        except StackError as error:
            peer.fail(error.message)
        except Exception as error:
            peer.fail(f"KV could not be fetched: {error!r}")
            raise

    async def _plan(self, peer: Peer, prompt: RemotePrompt) -> PrefillPlan:
        """Prefill plan for a peer, an empty one if it fails."""
        query = KVQuery(self._identity, prompt.tokens, prompt.salt)
        try:
            match = await peer.call("POST", "/kv/match", query, KVMatch, MATCH_S)
        except StackError as error:
            peer.fail(error.message)
            return PrefillPlan()
        peer.succeed()
        return choose(
            PrefillFacts(
                n_prompt=len(prompt.tokens) + 1,
                n_here=prompt.n_here,
                n_there=match.n_tokens,
                local_s=prompt.local_s,
                n_decoding=prompt.n_decoding,
                token_bytes=prompt.token_bytes,
                link_bps=peer.view.link_bytes_per_s,
                remote_tps=match.prefill_tps,
                is_remote_idle=match.is_idle,
            )
        )

    async def _bring(
        self, peer: Peer, plan: PrefillPlan, prompt: RemotePrompt, limit_s: float
    ) -> None:
        """Bring the files into the index, after the peer's prefill if planned."""
        is_remote = plan.source is PrefillSource.REMOTE
        query = KVQuery(
            self._identity, prompt.tokens, prompt.salt, prompt.checkpoint_positions, is_remote
        )
        offer = await peer.call("POST", "/kv/prefill", query, KVOffer, limit_s)
        peer.note(n_prefills=int(is_remote))
        if offer.n_tokens <= prompt.n_here:
            return
        n_files = len(offer.segments) + len(offer.checkpoints)
        n_most = STATE_BYTES + 2 * prompt.token_bytes * len(prompt.tokens)
        is_fit = offer.n_tokens <= len(prompt.tokens) and n_files <= offer.n_tokens + 1
        if not (is_fit and 0 <= offer.n_bytes <= n_most):
            raise Damaged(
                f"it offers {n_files} files of {offer.n_bytes} bytes for {offer.n_tokens} tokens"
            )
        await asyncio.wrap_future(self._engine.reserve_disk(offer.n_bytes))
        n_left = offer.n_bytes
        began = time.monotonic()
        n_bytes = 0
        for key in (*offer.segments, *offer.checkpoints):
            if not await asyncio.to_thread(self.store.has, self._identity, key):
                n_file = await peer.download(
                    self.store, (self._identity, key), n_left + HEADER_BYTES
                )
                n_left = max(0, n_left - n_file)
                n_bytes = n_bytes + n_file
        seconds = time.monotonic() - began
        manifest = Manifest(
            identity=self._identity,
            tokens=prompt.tokens[: offer.n_tokens],
            segments=offer.segments,
            checkpoints=offer.checkpoints,
            n_bytes=offer.n_bytes,
            salt=prompt.salt,
        )
        await asyncio.wrap_future(self._engine.import_kv(manifest))
        peer.succeed(n_bytes, seconds)
        peer.note(n_fetched_tokens=offer.n_tokens - prompt.n_here, n_fetched_bytes=n_bytes)

    async def push(self, peer: Peer, agent: str, moved: MovedAgent) -> tuple[int, int]:
        """Send an agent and its missing KV; bytes sent, tokens there.

        Raises StackError.
        """
        n_sent = 0
        if (manifest := moved.manifest) is not None:
            needed = MissingKV(manifest.identity, (*manifest.segments, *manifest.checkpoints))
            missing = await peer.call("POST", "/kv/missing", needed, MissingKV, FILE_S)
            # Only files of this agent, and each once, whatever the peer wants.
            for key in sorted({*needed.keys} & {*missing.keys}, key=needed.keys.index):
                n_sent += await peer.upload(self.store, manifest.identity, key)
        path = f"/v1/agents/{agent}/kv"
        adopted = await peer.call("PUT", path, moved, KVOffer, FILE_S)
        return n_sent, adopted.n_tokens


def _address(spec: str | PeerSpec, environment: Mapping[str, str]) -> tuple[str, str | None]:
    """URL and API key of a peer.

    The key is from its file, or from MLX_STACK_PEER_KEY. Raises SetupError.
    """
    if isinstance(spec, str):
        spec = PeerSpec(spec)
    if spec.key_file is None:
        return spec.url.rstrip("/"), environment.get(KEY_VARIABLE)
    try:
        return spec.url.rstrip("/"), Path(spec.key_file).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"the key file of the peer {spec.url} cannot be read: {error}") from error


async def _content(answer: httpx.Response) -> bytes:
    """Body of an answer.

    Raises StackError for an error or too many bytes.
    """
    content = bytearray()
    async for part in answer.aiter_raw():
        content += part
        if len(content) > ANSWER_BYTES:
            raise StackError(f"{answer.url.host} sends more than {ANSWER_BYTES >> 20} MiB of JSON")
    if answer.is_success:
        return bytes(content)
    try:
        reason = msgspec.json.decode(content, type=ErrorAnswer).error.message
    except msgspec.MsgspecError:
        reason = "no reason given"
    raise StackError(f"{answer.url.host} answers {answer.status_code}: {reason[:500]}")


def _broken(url: str, error: Exception) -> StackError:
    reason = str(error) or type(error).__name__
    return StackError(f"no answer from {url} ({reason}){local_network_hint(error)}")
