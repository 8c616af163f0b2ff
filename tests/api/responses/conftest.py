"""A service that says exactly what a test wants, token by token."""

import socket
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest
from msgspec import Struct

from mlxstack.core.preset import ServerSpec
from tests.api.running import Running, serving, standing
from tests.patience import PATIENCE_S
from tests.service.standin import FACTS, StandIn


class Scripted(Struct):
    """`say` decides the text of every following answer."""

    http: httpx.Client
    sdk: openai.OpenAI
    engine: StandIn
    live: Running
    say: Callable[[str], None]

    def prompt(self) -> str:
        """The last prompt as the engine got it."""
        text: str = self.engine.tokenizer.decode(list(self.engine.asked[-1].tokens))
        return text


@pytest.fixture(scope="module")
def stage() -> Iterator[Scripted]:
    service, engine = standing(ServerSpec(port=0))
    engine.loading.set_result(FACTS)

    def say(text: str) -> None:
        engine.script = engine.tokenizer.encode(text, add_special_tokens=False)

    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        serving(service, listener) as live,
        httpx.Client(base_url=live.url, timeout=PATIENCE_S) as http,
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=0) as sdk,
    ):
        yield Scripted(http, sdk, engine, live, say)


@pytest.fixture
def scripted(stage: Scripted) -> Scripted:
    """Says "Hello." until told otherwise."""
    stage.say("Hello.")
    return stage
