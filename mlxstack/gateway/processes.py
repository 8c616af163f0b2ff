"""Processes of a gateway's members: start, unload, stop."""

import asyncio
import logging
import subprocess
import time
from contextlib import suppress
from typing import Any

import httpx
import msgspec
from msgspec import structs

from mlxstack.core.errors import Broken, Busy
from mlxstack.core.preset import Preset
from mlxstack.gateway.spec import GatewayMember, internal_key, own_preset
from mlxstack.host import log_lines, services
from mlxstack.host.process import free_port, refusal
from mlxstack.host.services import Phase, owner, read_state, write_json

log = logging.getLogger("mlxstack.gateway")

HOST = "127.0.0.1"
LOOK_S = 0.1
CALL_S = 5.0
STOP_S = 2.0
OK = 200
MAX_ANSWER_BYTES = 16 << 20
"""Bytes of an answer that the gateway reads itself."""
PASSING = frozenset({409, 503})
"""Answers of a member that loads its model, or that a late request keeps from unloading."""


class MemberProcess:
    """Process of a member.

    It outlives the gateway; another gateway finds it again.
    """

    def __init__(self, member: GatewayMember, secret: str) -> None:
        self._member = member
        self._spec = member.service
        # No connection is kept: a member may have started again since the last call.
        self._client = httpx.AsyncClient(
            headers={"authorization": f"Bearer {internal_key(secret, None)}"},
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
            verify=False,
        )
        self._secret = secret
        self._preset = self._read_preset()
        self._supervisor: subprocess.Popen[bytes] | None = None
        self.url = self._spec.url
        self.adopt()

    @property
    def is_running(self) -> bool:
        """Whether its supervisor is alive."""
        return owner(self._spec.home, self._spec.name) is not None

    @property
    def stranger(self) -> str:
        """Address of another service that has the member's name, else ""."""
        state = owner(self._spec.home, self._spec.name)
        if state is None or self._read_preset() is not None:
            return ""
        return state.spec.url

    @property
    def worker_pid(self) -> int | None:
        """Process id of its worker; None without one."""
        state = owner(self._spec.home, self._spec.name)
        if state is not None and state.worker is not None:
            return state.worker.pid
        return None

    def adopt(self) -> None:
        """Take over the address of a process that runs already."""
        state = owner(self._spec.home, self._spec.name)
        if state is not None:
            self._spec = state.spec
            self.url = state.spec.url

    async def ensure(self) -> str:
        """Wait until the member answers, started if needed; its status.

        Raises Broken, and Busy where another service has its name.
        """
        if url := self.stranger:
            name = self._spec.name
            raise Busy(
                f"`{name}` runs at {url} by itself, beside this gateway; `mlx-stack down {name}` "
                "stops it, and the next request starts the gateway's own"
            )
        if not self.is_running:
            await asyncio.to_thread(self._start)
        try:
            return await services.until_answered(
                self._spec, self._ask, self._why_ended, self._member.startup_timeout_s
            )
        except Broken:
            await asyncio.to_thread(self._reap)
            raise

    async def _ask(self) -> str | None:
        """Status, or None without one; started again where its supervisor was killed."""
        if status := await self.status():
            return status
        own = self._supervisor
        has_no_end = own is None or (own.poll() or 0) < 0
        if has_no_end and not self.is_running and not self._why_ended():
            await asyncio.to_thread(self._start)
        return None

    def _why_ended(self) -> str:
        """Last error of a process that is not restarted any more."""
        spec = self._spec
        own = self._supervisor
        # A supervisor that has just started has not written its state yet.
        state = read_state(spec.home, spec.name) if own is None else services.state_of(spec, own)
        if state is None or state.phase not in {Phase.CRASHED, Phase.STOPPED}:
            return ""
        messages = [log_lines.read(line).message for line in state.last_log_lines]
        errors = [message for message in messages if "error" in message.lower()]
        errors = errors or [state.exit_summary or "it was stopped"]
        reason = services.last_error(state) or errors[-1]
        return f"`{spec.name}` did not start: {reason}; see its log {spec.home.log_file(spec.name)}"

    async def status(self) -> str:
        """Status while it serves or loads; "" without an answer."""
        with suppress(httpx.HTTPError):
            answer = await self.call("GET", "/health")
            if answer.status_code == OK:
                return str(object_of(answer).get("status") or "ok")
        return ""

    async def unload(self) -> None:
        """Unload its model with KV on disk, or stop it.

        A worker that ended meanwhile is started by its supervisor with its model, and asked again.
        """
        deadline = time.monotonic() + self._member.startup_timeout_s
        reason = "it does not answer"
        while self.is_running and (left_s := deadline - time.monotonic()) > 0:
            with suppress(httpx.TransportError):
                answer = await self.call("POST", "/v1/models/unload", left_s)
                if answer.status_code == OK:
                    return
                reason = answer.text
                if answer.status_code not in PASSING:
                    break
            await asyncio.sleep(LOOK_S)
        log.warning("%s is stopped, it did not unload: %s", self._spec.name, reason)
        await self.stop()

    async def stop(self) -> None:
        """Stop it; its requests and its KV get their time."""
        state = owner(self._spec.home, self._spec.name)
        if state is not None and not self.stranger:
            patience_s = self._spec.policy.grace_s + STOP_S
            await asyncio.to_thread(services.stop, self._spec.home, state, patience_s)
            await asyncio.to_thread(self._reap)

    async def call(
        self, method: str, path: str, timeout_s: float = CALL_S, key: str | None = None
    ) -> httpx.Response:
        """Call it with a key that it accepts, by default the gateway's own.

        Raises httpx.HTTPError without an answer of at most `MAX_ANSWER_BYTES`.
        """
        headers = None
        if key is not None:
            headers = {"authorization": f"Bearer {key}"}
        content = bytearray()
        async with self._client.stream(
            method, self.url + path, timeout=timeout_s, headers=headers
        ) as answer:
            async for part in answer.aiter_bytes():
                content += part
                if len(content) > MAX_ANSWER_BYTES:
                    raise httpx.RemoteProtocolError(
                        f"{path} of {self._spec.name} has more than {MAX_ANSWER_BYTES} bytes"
                    )
        return httpx.Response(answer.status_code, content=bytes(content))

    def _reap(self) -> None:
        """Take the exit code of a supervisor that has ended."""
        if self._supervisor is not None and not self.is_running:
            with suppress(subprocess.TimeoutExpired):
                self._supervisor.wait(STOP_S)

    def _start(self) -> None:
        """Start the supervisor, on another port where this one was taken meanwhile."""
        home = self._spec.home
        name = self._spec.name
        try:
            with services.starting(home, name, waits=True) as state:
                self.adopt()
                if state is not None:
                    return
                self._place()
                self._reap()
                self._supervisor = services.start(self._spec)
        except OSError as error:
            raise Broken(f"{name} cannot be started: {error}") from error
        deadline = time.monotonic() + CALL_S
        while not self.is_running and time.monotonic() < deadline:
            time.sleep(LOOK_S / 4)

    def _read_preset(self) -> Preset | None:
        """Preset of the member; None where another service has overwritten it."""
        return own_preset(self._spec.home, self._spec.name, self._secret)

    def _place(self) -> None:
        port = int(self._spec.url.rpartition(":")[2])
        file = self._spec.home.preset_file(self._spec.name)
        preset = self._preset = self._read_preset() or self._preset
        if preset is None:
            raise Broken(f"{file} cannot be read; start the gateway again")
        if refusal(HOST, port) is not None:
            port = free_port(HOST)
        server = structs.replace(preset.server, host=HOST, port=port)
        write_json(file, structs.replace(preset, server=server))
        self.url = f"http://{HOST}:{port}"
        self._spec = structs.replace(self._spec, url=self.url)


def object_of(answer: httpx.Response) -> dict[str, Any]:
    """JSON object of an answer; empty where it has none."""
    try:
        return msgspec.json.decode(answer.content, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {}
