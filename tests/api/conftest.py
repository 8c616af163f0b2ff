"""One tiny service for all tests of a file that do not need their own."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from mlxstack.api import run_generation
from tests.api.running import Running, running, tiny_preset
from tests.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def complete_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The headers of an answer that is not streamed are sent with it, however long it takes."""
    monkeypatch.setattr(run_generation, "EARLY_S", PATIENCE_S)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny model lives, once per session."""
    return tmp_path_factory.mktemp("model") / "tiny"


# With one service for the session, its state would depend on which files share a worker.
@pytest.fixture(scope="module")
def live(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A running service with three slots of 1,024 tokens."""
    with running(tiny_preset(model_folder), tmp_path_factory.mktemp("home")) as found:
        yield found


@pytest.fixture
def http(live: Running) -> Iterator[httpx.Client]:
    """A plain client; every slot is empty when a test begins."""
    with httpx.Client(base_url=live.url, timeout=PATIENCE_S) as client:
        for slot in range(3):
            client.post(f"/slots/{slot}?action=erase").raise_for_status()
        yield client


@pytest.fixture
def sdk(live: Running, http: httpx.Client) -> Iterator[openai.OpenAI]:
    """OpenAI's own client, which does not retry here."""
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0) as client:
        yield client
