"""Gateway's ASGI application: checks requests, and forwards them to members."""

from functools import cache, partial
from typing import Any, cast

import msgspec
from litestar.datastructures import Headers
from litestar.types import HTTPScope
from msgspec import Struct

from mlxstack.api import guards
from mlxstack.api.asgi import App, Message, Receive, Scope, Send
from mlxstack.api.disconnect import ClientDisconnected
from mlxstack.api.host_rules import host_rules
from mlxstack.api.request_body import BodyBudget, RequestBody, decode_body
from mlxstack.api.swap_middleware import READING, RelayedResponse, pass_gate
from mlxstack.core.errors import Broken, Busy, Forbidden, Loading, StackError
from mlxstack.core.preset import ApiKey
from mlxstack.gateway.agent_members import AgentMembers
from mlxstack.gateway.listing import is_own, own_app
from mlxstack.gateway.member_paths import CHANGES, require_forwarded
from mlxstack.gateway.members import MemberGate, Members
from mlxstack.gateway.routing import AGENTS, MemberRouter, model_in_query
from mlxstack.gateway.spec import GatewaySpec, internal_key
from mlxstack.gateway.upstream import MemberLost

AGENT_HEADER = b"x-mlx-stack-agent"
MAX_WAITING = 256
MAX_SENT = 2
"""Times that a request is sent whose member ended before it answered."""

READS = frozenset({"GET", "HEAD"})
UNAVAILABLE = 503


class AgentFields(Struct):
    """Fields of a body that name an agent."""

    agent: Any = None
    session_id: Any = None


class Gateway:
    """One address for all members: an ASGI application."""

    def __init__(self, spec: GatewaySpec, members: Members) -> None:
        self._spec = spec
        self._members = members
        self._agents = AgentMembers(spec)
        self._own = cast(App, own_app(spec, members, self._agents))
        self._check_host = host_rules(spec.server)
        self._check_key = guards.key_check(spec.server)
        self._waiting: set[RelayedResponse] = set()
        server = spec.server
        self._budget = BodyBudget(max(server.max_bodies_bytes, server.max_body_bytes))
        self._router = MemberRouter(spec, members, self._agents)
        self._internal_key = cache(partial(internal_key, spec.secret))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        path = scope["path"]
        is_for_all = model_in_query(scope) is None or path == AGENTS.rstrip("/")
        if path in CHANGES or (is_own(scope["method"], path) and is_for_all):
            await self._own(scope, receive, send)
            return
        response = RelayedResponse(scope, send)
        body = RequestBody(scope, receive, self._spec.server.max_body_bytes, self._budget)
        try:
            headers = Headers.from_scope(cast(HTTPScope, scope))
            peer = None
            if scope["client"]:
                peer = scope["client"][0]
            self._check_host(headers, peer)
            holder = self._check_key(headers, path)
            key = self._internal_key(holder)
            require_forwarded(scope["method"], path)
            data = await body.read()
            member = self._router.choose(scope, data)
            guards.check_model(holder, member.spec.all_names)
            if holder is not None and holder.models:
                self._check_agents(holder, path, data)
            app = self._forwarding(member, data, key)
            if scope["method"] in READS or path in READING:
                await _read(member, app, scope, body.receive, response)
            else:
                await self._serve(member, app, scope, body, response)
        except StackError as error:
            if not response.is_begun:
                await response.fail(error)
        except ClientDisconnected:
            pass
        finally:
            body.close()

    async def _serve(
        self,
        member: MemberGate,
        app: App,
        scope: Scope,
        body: RequestBody,
        response: RelayedResponse,
    ) -> None:
        """Forward a request to its loaded member, once more if lost.

        Raises Broken when it ended twice, or may have changed the history of an agent, and Busy.
        """
        for n_sent in range(1, MAX_SENT + 1):
            try:
                if not member.is_open:
                    if len(self._waiting) >= MAX_WAITING:
                        raise Busy(f"{MAX_WAITING} requests wait for models, no more are queued")
                    await pass_gate(member, app, scope, body, response, self._waiting)
                    return
                await member.enter()
                try:
                    await app(scope, body.receive, response.send)
                finally:
                    member.leave()
                return
            except MemberLost as error:
                member.lose()
                problem = Broken(f"{member.spec.name} ended during the request: {error}")
                if response.is_begun:
                    await response.fail(problem)
                    return
                is_safe = not (error.is_sent and scope["path"].startswith(AGENTS))
                if n_sent == MAX_SENT or not is_safe:
                    raise problem from error

    def _forwarding(self, member: MemberGate, body: bytes, key: str) -> App:
        """The member as an application, which raises MemberLost, also while it loads."""

        async def forward(scope: Scope, receive: Receive, send: Send) -> None:
            async def noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    if message["status"] == UNAVAILABLE and not await member.process.status():
                        raise MemberLost("it does not serve its model", is_sent=False)
                    if scope["method"] not in READS:
                        await self._note_agent(message, member)
                await send(message)

            await member.upstream.forward(scope, body, key, receive, noted)

        return forward

    def _check_agents(self, holder: ApiKey, path: str, body: bytes) -> None:
        """Refuse agents of models that a key does not name. Raises Forbidden."""
        for agent in _agents_of(path, body):
            if self._agents.is_new(agent):
                continue
            member = self._members.by_name.get(self._agents.find(agent) or "")
            names: tuple[str, ...] = ()
            if member is not None:
                names = member.spec.all_names
            if not guards.is_for(holder, names):
                raise Forbidden(
                    f"agent {agent!r} was served by another model, and this API key is only for "
                    f"{', '.join(holder.models)} (server.api_keys of the preset)"
                )

    async def _note_agent(self, message: Message, member: MemberGate) -> None:
        for header, value in message["headers"]:
            if header == AGENT_HEADER:
                await self._agents.note(value.decode("latin-1"), member.spec.name)


async def _read(
    member: MemberGate, app: App, scope: Scope, receive: Receive, response: RelayedResponse
) -> None:
    """Pass a reading request on, which wakes no member. Raises Loading."""
    if not member.is_running:
        raise Loading(f"{member.spec.name} does not run; the first request for it starts it")
    try:
        await app(scope, receive, response.send)
    except MemberLost as error:
        if not response.is_begun:
            raise Loading(f"{member.spec.name} does not answer: {error}") from error


def _agents_of(path: str, body: bytes) -> set[str]:
    """Agents that a request names, in its path and its body."""
    named = {path.removeprefix(AGENTS).partition("/")[0]} if path.startswith(AGENTS) else set()
    try:
        fields = decode_body(body, AgentFields)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return named
    return named | {name for name in (fields.agent, fields.session_id) if isinstance(name, str)}
