"""`up --any-model`: every model on the disk by its name, at one address, within the memory."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from mlxstack.demo import MODEL_DIR
from mlxstack.models.chat_capabilities import capabilities
from tests.gateway.any_model_site import AnySite, Talker, any_site, n_loads, n_reserved
from tests.gateway.real_members import cards, n_workers, until
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.slow]

MEMORY = "1G"
KEYS: list[object] = ["sesame", {"key": "llamas", "models": ["tiny/llama-*"]}]
HELLO = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnySite]:
    with any_site(tmp_path_factory.mktemp("any"), MEMORY, KEYS) as any_of:
        yield any_of


def asked(site: AnySite, key: str, **more: object) -> httpx.Response:
    return httpx.post(
        site.url + "/v1/chat/completions",
        json={**HELLO, **more},
        headers={"authorization": f"Bearer {key}"},
        timeout=PATIENCE_S,
    )


def test_all_models_are_listed_with_their_abilities_and_none_is_started(site: AnySite) -> None:
    listed = cards(site.url)
    assert set(listed) == set(site.word_of) and len(listed) == 12
    for card in listed.values():
        assert card["status"] == {"value": "unloaded"}
        assert card["features"] == ["completion", "tools", "thinking"]
        assert card["max_input_tokens"] == card["max_tokens"] and card["fits"]
        assert card["context_length"] == card["max_model_len"] == card["max_tokens"]
        assert isinstance(card["created"], int) and card["display_name"] and card["created_at"]
    assert n_workers(site.home) == 0


def test_a_name_that_is_not_on_disk_is_a_404_with_the_nearest_and_the_command(
    site: AnySite,
) -> None:
    refused = asked(site, "sesame", model="tiny/lama-0")
    assert refused.status_code == 404
    assert "'tiny/llama-0'" in refused.text and "mlx-stack pull tiny/lama-0" in refused.text
    unlike = asked(site, "sesame", model="zzz")
    assert (
        unlike.status_code == 404 and "tiny/hybrid-3" in unlike.text and "pull" not in unlike.text
    )
    assert n_workers(site.home) == 0


def test_a_key_opens_only_the_models_that_it_names(site: AnySite) -> None:
    for body in ({"model": "tiny/sinks-5"}, {"model": "sinks-5"}, {}):
        refused = asked(site, "llamas", **body)
        assert refused.status_code == 403 and "only for tiny/llama-*" in refused.text
    key = {"authorization": "Bearer llamas"}
    load = httpx.post(
        site.url + "/v1/models/load",
        json={"model": "tiny/sinks-5"},
        headers=key,
        timeout=PATIENCE_S,
    )
    assert load.status_code == 403
    assert n_workers(site.home) == 0
    assert asked(site, "llamas", model="llama-0").status_code == 200


def test_a_key_for_some_models_has_no_agents_of_others(site: AnySite) -> None:
    def call(key: str, method: str, path: str, body: object = None) -> httpx.Response:
        head = {"authorization": f"Bearer {key}"}
        return httpx.request(method, site.url + path, json=body, headers=head, timeout=PATIENCE_S)

    assert asked(site, "sesame", model="tiny/sinks-5", agent="secret").status_code == 200
    assert asked(site, "llamas", model="llama-0", agent="mine").status_code == 200
    turn_body = {"append": HELLO["messages"], "max_tokens": 2}
    for query, body in (("?model=llama-0", {}), ("", {"model": "llama-0"})):
        agent = "/v1/agents/secret"
        for method, path, content in (
            ("GET", agent, None),
            ("GET", agent + "/history", None),
            ("POST", agent + "/generate", {**turn_body, **body}),
            ("POST", agent + "/fork", {"id": "stolen", **body}),
            ("POST", agent + "/rewind", {"n_messages": 0, **body}),
            ("DELETE", agent, None),
            ("POST", "/v1/chat/completions", {**HELLO, **body, "agent": "secret"}),
            ("POST", "/v1/chat/completions", {**HELLO, **body, "session_id": "secret"}),
        ):
            refused = call("llamas", method, path + query, content)
            assert refused.status_code == 403, (method, path, refused.text)
    for query in ("", "?model=llama-0", "?model=tiny/llama-0"):
        listed = call("llamas", "GET", "/v1/agents" + query).json()["data"]
        own = {card["id"] for card in listed}
        assert "mine" in own and "secret" not in own
    assert call("llamas", "GET", "/v1/agents?model=sinks-5").json()["data"] == []
    assert call("llamas", "GET", "/v1/agents?model=nowhere").status_code == 404
    of_whole_key = {card["id"] for card in call("sesame", "GET", "/v1/agents").json()["data"]}
    assert {"mine", "secret"} <= of_whole_key
    assert call("llamas", "POST", "/v1/agents/mine/generate", turn_body).status_code == 200
    assert call("llamas", "GET", "/v1/agents/mine/history").status_code == 200
    assert call("sesame", "GET", "/v1/agents/secret/history").status_code == 200


def test_three_clients_switch_between_twelve_models(site: AnySite) -> None:
    """Each answer is of the model it names, memory holds, and a return finds its KV on disk."""
    highest = [0]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            highest[0] = max(highest[0], n_reserved(site))

    def talk(number: int) -> int:
        talker = Talker(site, f"client {number}")
        own = list(site.word_of)[number::3]
        for model in (*own, own[0]):
            talker.visit(model)
        return talker.n_visits

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(3) as pool:
            visits = list(pool.map(talk, range(3)))
    finally:
        done.set()
        watcher.join()
    assert sum(visits) == 15
    assert 0 < highest[0] <= site.spec.budget
    loads = n_loads(site)
    returned = {name.partition("/")[2] for name in list(site.word_of)[:3]}
    assert min(loads.values()) >= 1 and all(loads[name] >= 2 for name in returned), loads
    n_held = sum(card["status"] != {"value": "unloaded"} for card in cards(site.url).values())
    assert n_held < 12
    until(lambda: n_workers(site.home) <= n_held, "the process of an unloaded model stays")


def test_abilities_are_read_from_the_template_alone() -> None:
    assert capabilities(MODEL_DIR) == ("completion", "tools", "thinking", "vision")
    assert capabilities(MODEL_DIR / "missing") == ()
