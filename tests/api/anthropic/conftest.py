"""Anthropic's own client, pointed at the services of these tests."""

from collections.abc import Iterator

import anthropic
import httpx
import pytest

from tests.api.conftest import http, live, model_folder
from tests.api.running import Running

__all__ = ["http", "live", "model_folder"]


@pytest.fixture
def claude(live: Running, http: httpx.Client) -> Iterator[anthropic.Anthropic]:
    """A client of the tiny service; it does not retry, and every slot is empty at first."""
    with anthropic.Anthropic(base_url=live.url, api_key="any", max_retries=0) as client:
        yield client
