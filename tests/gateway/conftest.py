"""A gateway over real members that the tests of a file share."""

from collections.abc import Iterator

import httpx
import pytest

from tests.gateway.real_members import Site, serving, write_presets
from tests.patience import PATIENCE_S


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Three members that all fit; keys: one of all agents, one of `bob` only."""
    folder = tmp_path_factory.mktemp("site")
    keys = ["sesame", {"key": "bobs", "agents": ["bob"], "salt": "b"}]
    server = {"port": 0, "api_keys": keys, "max_body_bytes": 50_000}
    with serving(folder, write_presets(folder, server)) as serving_site:
        yield serving_site


@pytest.fixture(scope="module")
def http(site: Site) -> Iterator[httpx.Client]:
    headers = {"authorization": "Bearer sesame"}
    with httpx.Client(base_url=site.url, headers=headers, timeout=PATIENCE_S) as client:
        yield client
