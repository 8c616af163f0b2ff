"""A scripted service, and clients of it; the tests of real clients are counted."""

from collections.abc import Iterator

import anthropic
import openai
import pytest

from tests.api.running import Running
from tests.clients import summary
from tests.clients.lines import SCRIPT
from tests.clients.stage import playing


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count a real client's test, once; this process alone knows it, not that of all workers."""
    if "client" in report.keywords and (report.when == "call" or not report.passed):
        summary.note(report.nodeid, report.outcome)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with playing(tmp_path_factory.mktemp("stage"), SCRIPT) as playing_stage:
        yield playing_stage


@pytest.fixture
def gpt(stage: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stage.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(stage: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=stage.url, api_key="any", max_retries=0) as client:
        yield client
