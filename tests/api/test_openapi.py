"""The description of the doors names what they take and give."""

import socket

import httpx
import pytest

from mlxstack.core.preset import ServerSpec
from tests.api.running import serving, standing
from tests.service.standin import FACTS


@pytest.mark.net
def test_the_schema_describes_bodies_and_answers() -> None:
    service, engine = standing(ServerSpec(port=0))
    engine.loading.set_result(FACTS)
    with socket.create_server(("127.0.0.1", 0)) as listener, serving(service, listener) as found:
        schema = httpx.get(found.url + "/schema/openapi.json").raise_for_status().json()
    chat = schema["paths"]["/v1/chat/completions"]["post"]
    sent = chat["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    given = chat["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
    shapes = schema["components"]["schemas"]
    assert "messages" in shapes[sent.rpartition("/")[2]]["properties"]
    assert "choices" in shapes[given.rpartition("/")[2]]["properties"]


@pytest.mark.net
def test_no_page_of_the_schema_loads_a_script() -> None:
    service, engine = standing(ServerSpec(port=0))
    engine.loading.set_result(FACTS)
    with socket.create_server(("127.0.0.1", 0)) as listener, serving(service, listener) as found:
        for page in ("", "/redoc", "/swagger", "/elements", "/rapidoc", "/scalar", "/openapi.yaml"):
            answer = httpx.get(f"{found.url}/schema{page}")
            assert "<script" not in answer.text, page
        assert answer.status_code == 200
        assert "/v1/chat/completions:" in answer.text
