"""A real service on a free port, in a thread with an event loop of its own."""

import asyncio
import functools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from litestar.handlers import HTTPRouteHandler
from litestar.routes import HTTPRoute
from litestar.utils.signature import ParsedSignature
from mlx_lm.tokenizer_utils import load as load_tokenizer
from msgspec import Struct, structs

from mlxstack.api.dialects.openai_chat.messages import read_message_file
from mlxstack.api.registry import DIALECTS
from mlxstack.api.server import UvicornServer, bind, config, serve
from mlxstack.core.preset import ModelSpec, Preset, ServerSpec, SlotSpec, Speculation
from mlxstack.demo import MODEL_DIR
from mlxstack.service.assembly import assemble
from mlxstack.service.service import Service
from tests import models
from tests.patience import PATIENCE_S
from tests.service.standin import FACTS, StandIn, over

# The demo tokenizer has 1,024 tokens; a model with fewer rows would be asked for missing ones.
TINY = {**models.LLAMA, "vocab_size": 1024}


class Running(Struct, frozen=True):
    """Where it answers, and its inside for those who must look."""

    url: str
    service: Service
    loop: asyncio.AbstractEventLoop


@functools.cache
def parse_handlers() -> tuple[Any, ...]:
    """Signatures of all handlers; each application parses those of its copies that lack them."""
    HTTPRoute.create_options_handler = options_handler  # type: ignore[method-assign]
    return tuple(route.parsed_fn_signature for dialect in DIALECTS for route in dialect.routes)


make_options_handler = HTTPRoute.create_options_handler
signatures_of_options: list[ParsedSignature] = []


def options_handler(route: HTTPRoute, path: str) -> HTTPRouteHandler:
    """Handler of OPTIONS with a signature that is parsed once for all paths."""
    made = make_options_handler(route, path)
    if not signatures_of_options:
        signatures_of_options.append(made.parsed_fn_signature)
    made._parsed_fn_signature = signatures_of_options[0]
    return made


def tiny_preset(folder: Path, **sections: Any) -> Preset:
    """Three slots of a tiny random model, built if it is not there yet; no drafts.

    How many tokens a slot keeps of an answer depends on drafts, and so on the speed of passes.
    """
    if not (folder / "config.json").exists():
        models.write(folder, TINY)
    plain = Preset(
        model=ModelSpec(id=str(folder), alias="tiny"),
        name="tiny",
        slots=SlotSpec(count=3, n_ctx=1024),
        server=ServerSpec(port=0),
        speculation=Speculation.OFF,
    )
    return structs.replace(plain, **sections)


def standing(server: ServerSpec) -> tuple[Service, StandIn]:
    """A service over a stand-in that is not loaded yet."""
    engine = StandIn(load_tokenizer(MODEL_DIR))
    return over(engine, Preset(model=ModelSpec(id="standin"), server=server)), engine


@contextmanager
def answering() -> Iterator[tuple[StandIn, httpx.Client]]:
    """A served stand-in that answers "Fine.", and a client of it."""
    service, engine = standing(ServerSpec(port=0))
    engine.loading.set_result(FACTS)
    engine.script = engine.tokenizer.encode("Fine.", add_special_tokens=False)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        serving(service, listener) as found,
        httpx.Client(base_url=found.url, timeout=PATIENCE_S) as http,
    ):
        yield engine, http


@contextmanager
def unanswered(url: str, body: dict[str, Any]) -> Iterator[None]:
    """A POST request whose client leaves at the end of the block, without its response."""
    parts = urlsplit(url)
    data = json.dumps(body).encode()
    target = f"{parts.path}?{parts.query}" if parts.query else parts.path
    head = f"POST {target} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-length: {len(data)}\r\n"
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        connection.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + data)
        yield


@contextmanager
def busy_engine(live: Running) -> Iterator[None]:
    """Stop the engine's thread between two steps for the time of the block."""
    is_stopped = threading.Event()
    may_go_on = threading.Event()

    def stop() -> None:
        is_stopped.set()
        may_go_on.wait()

    live.service.engine.post(stop)  # type: ignore[attr-defined]
    try:
        is_stopped.wait()
        yield
    finally:
        may_go_on.set()


@contextmanager
def single_steps(live: Running) -> Iterator[Callable[[], None]]:
    """Stop the engine's thread; each call lets it take one step at most, and stops it again."""
    is_stopped = threading.Event()
    may_go_on = threading.Event()
    is_over = threading.Event()

    def stop() -> None:
        is_stopped.set()
        may_go_on.wait()
        may_go_on.clear()
        # A message that is posted by another waits for the next step.
        if not is_over.is_set():
            live.service.engine.post(stop)  # type: ignore[attr-defined]

    def step() -> None:
        is_stopped.clear()
        may_go_on.set()
        is_stopped.wait()

    live.service.engine.post(stop)  # type: ignore[attr-defined]
    try:
        is_stopped.wait()
        yield step
    finally:
        is_over.set()
        may_go_on.set()


@contextmanager
def running(preset: Preset, home: Path, source: Path | None = None) -> Iterator[Running]:
    """Started, loaded, and stopped at the end; `source` as for `assemble`."""
    with bind(preset.server) as listener:
        service = assemble(preset, home, read_message_file, source)
        with serving(service, listener) as found:
            yield found


@contextmanager
def serving(service: Service, listener: Any, *, is_loaded: bool = True) -> Iterator[Running]:
    """Serve on the listener, by default waiting until the model is there."""
    parse_handlers()
    started = threading.Event()
    inside: dict[str, Any] = {}

    async def main() -> int:
        inside["loop"], inside["leaving"] = asyncio.get_running_loop(), asyncio.Event()
        server = UvicornServer(config(service))
        task = asyncio.create_task(serve(service, server, listener, inside["leaving"]))
        while not server.started or (is_loaded and service.health == "loading"):
            if task.done():
                break
            await asyncio.sleep(0.005)
        started.set()
        return await task

    def body() -> None:
        try:
            inside["code"] = asyncio.run(main())
        finally:
            started.set()

    thread = threading.Thread(target=body)
    thread.start()
    try:
        assert started.wait(PATIENCE_S)
        port = listener.getsockname()[1]
        yield Running(f"http://127.0.0.1:{port}", service, inside["loop"])
    finally:
        # A service that ended by itself has no loop any more.
        with suppress(RuntimeError):
            inside["loop"].call_soon_threadsafe(inside["leaving"].set)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
