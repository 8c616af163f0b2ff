"""A second service computes prompts for the first one, hands KV over, and takes agents."""

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from msgspec import structs
from typer.testing import CliRunner

from mlxstack.cli.main import app
from mlxstack.config import presets
from mlxstack.core.errors import SetupError, StackError
from mlxstack.core.preset import (
    ApiKey,
    ModelSpec,
    PeerSpec,
    PrefillSpec,
    Preset,
    SamplingSpec,
    ServerSpec,
    SlotSpec,
)
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.features.remote_kv import peers
from mlxstack.features.remote_kv import policy as remote_prefill
from mlxstack.features.remote_kv.service import peers_of
from mlxstack.features.remote_kv.values import PeerView
from mlxstack.host.home import Home
from tests.api.running import Running, running, single_steps, tiny_preset
from tests.api.test_concurrent_streams import step_until
from tests.api.test_serve import process, wait_for
from tests.endurance.tally import read_counters
from tests.patience import PATIENCE_S, wait_until
from tests.ports import unused_port
from tests.repetition import in_soak

pytestmark = [pytest.mark.mlx, pytest.mark.net]

N_CTX = 8192
KEYS = ("plain", ApiKey("team", salt="team's"), ApiKey("ann", agents=("ann",)))
HEADERS = {"authorization": "Bearer plain"}


def prompt(seed: int, n_tokens: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(20, 1000) for _ in range(n_tokens)]


def until(condition: Callable[[], Any]) -> Any:
    return wait_until(condition)


class Pair:
    """A service here, and a helper in a process of its own, which asks for a key."""

    def __init__(self, here: Running, helper: str, worker: Any) -> None:
        self.here = here
        self.helper = helper
        self.worker = worker
        self.http = httpx.Client(base_url=here.url, timeout=PATIENCE_S)
        self.there = httpx.Client(base_url=helper, timeout=PATIENCE_S, headers=HEADERS)

    def view(self) -> PeerView:
        return peers_of(self.here.service).views()[0]

    def ask(self, tokens: list[int], http: httpx.Client | None = None, **more: Any) -> Any:
        body = {"prompt": tokens, "n_predict": 8, "temperature": 0, "return_tokens": True, **more}
        return (http or self.http).post("/completion", json=body).raise_for_status().json()

    def cold(self, tokens: list[int]) -> list[int]:
        return list(self.ask(tokens, cache_prompt=False)["tokens"])

    def n_computed(self) -> int:
        """Prompt tokens that were computed here."""
        return self.here.service.snapshot().counters.n_prompt_tokens

    def n_computed_there(self) -> int:
        """Prompt tokens that were computed by the helper."""
        return read_counters(self.helper, HEADERS).n_prompt

    def measure(self) -> None:
        """Let both sides measure their speeds; the link counts as a fast one."""
        self.ask(prompt(900, 300), self.there)
        self.ask(prompt(901, 300))
        self.trust()

    def trust(self) -> None:
        """Take the peer for one that has just sent 1 GiB in a second."""
        peers_of(self.here.service)._peers[0].succeed(1 << 30, 1.0)


@contextmanager
def pair_of(folder: Path, root: Path, **sections: Any) -> Iterator[Pair]:
    """A helper, and a service with `sections` that has it as its peer."""
    port = unused_port()
    plain = tiny_preset(folder, slots=SlotSpec(count=5, n_ctx=N_CTX))
    theirs = structs.replace(plain, server=ServerSpec(port=port, api_keys=KEYS, drain_s=1))
    url = f"http://127.0.0.1:{port}"
    ours = structs.replace(plain, server=ServerSpec(port=0, peers=(url,)), **sections)
    (root / "there").mkdir(parents=True)
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv(peers.KEY_VARIABLE, "plain")
        worker = stack.enter_context(process(theirs, root / "there"))
        here = stack.enter_context(running(ours, root / "here"))
        wait_for(url)
        found = Pair(here, url, worker)
        stack.callback(found.http.close)
        stack.callback(found.there.close)
        yield found


@pytest.fixture(scope="module")
def pair(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair_of(model_folder, tmp_path_factory.mktemp("pair")) as found:
        found.measure()
        yield found


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer whose speed is known is always waited for; when it pays is the policy's test."""
    monkeypatch.setattr(remote_prefill, "CLEARLY", float("inf"))
    monkeypatch.setattr(remote_prefill, "MIN_PATIENCE_S", PATIENCE_S)


@contextmanager
def decoding(pair: Pair, n: int) -> Iterator[None]:
    """As many requests decode here meanwhile."""
    leave = threading.Event()

    def stream(seed: int) -> None:
        body = {
            "prompt": prompt(seed, 40), "n_predict": 4000, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        with pair.http.stream("POST", "/completion", json=body) as answer:
            for _ in answer.iter_lines():
                if leave.is_set():
                    return

    with ThreadPoolExecutor(n) as pool:
        for seed in range(n):
            pool.submit(stream, 500 + seed)
        states = pair.here.service.engine
        until(lambda: sum(s.n_decoded > 0 and s.state == "running"
                          for s in states.snapshot().slots) == n)  # fmt: skip
        try:
            yield
        finally:
            leave.set()


@pytest.mark.usefixtures("eager")
def test_a_cold_prompt_is_computed_by_the_helper_while_others_decode(pair: Pair) -> None:
    n_tokens = 1500
    tokens = prompt(1, n_tokens)
    before = pair.view()
    engine = pair.here.service.engine
    with decoding(pair, 3):
        first = engine.snapshot().counters
        with ThreadPoolExecutor(1) as pool:
            asking: Future[Any] = pool.submit(pair.ask, tokens)
            until(lambda: any(s.n_prompt == n_tokens and s.state == "prefilling" and not s.n_done
                              for s in engine.snapshot().slots))  # fmt: skip
            waiting = engine.snapshot().counters
            answer = asking.result()
        last = engine.snapshot().counters
        assert last.n_model_calls == first.n_model_calls, "a chunk was computed here"
        assert last.n_prompt_tokens == first.n_prompt_tokens + 1
        assert last.n_decode_calls > waiting.n_decode_calls, "nobody decoded meanwhile"
    assert answer["tokens_evaluated"] == n_tokens
    assert answer["tokens"] == pair.cold(tokens)
    after = pair.view()
    assert after.n_prefills == before.n_prefills + 1
    assert after.n_fetched_tokens == before.n_fetched_tokens + n_tokens - 1


@pytest.mark.usefixtures("eager")
def test_cached_kv_is_fetched_and_not_computed_again(pair: Pair) -> None:
    tokens = prompt(2, 900)
    before = pair.view()
    pair.ask(tokens, pair.there)
    n_before = pair.n_computed()
    n_before_there = pair.n_computed_there()
    answer = pair.ask([*tokens, *prompt(3, 20)])
    # Its answer there ends inside a block, which is not found; either side computes the rest.
    n_computed = pair.n_computed() - n_before + pair.n_computed_there() - n_before_there
    assert 20 <= n_computed <= 22 + 128
    after = pair.view()
    assert after.link_bytes_per_s != before.link_bytes_per_s, "the link was not measured"
    assert answer["tokens"] == pair.cold([*tokens, *prompt(3, 20)])


@pytest.mark.usefixtures("eager")
def test_fetched_kv_survives_a_restart_as_our_own(
    pair: Pair, model_folder: Path, tmp_path: Path
) -> None:
    tokens = prompt(4, 800)
    preset = pair.here.service.preset
    with running(preset, tmp_path) as first:
        peers_of(first.service)._peers[0].succeed(1 << 30, 1.0)
        with httpx.Client(base_url=first.url, timeout=PATIENCE_S) as http:
            pair.ask(prompt(5, 300), http)
            pair.ask(tokens, http)
    alone = structs.replace(preset, server=ServerSpec(port=0))
    with (
        running(alone, tmp_path) as second,
        httpx.Client(base_url=second.url, timeout=PATIENCE_S) as http,
    ):
        answer = pair.ask(tokens, http)
        assert answer["timings"]["cache_n"] == 799
        assert answer["tokens"] == pair.cold(tokens)


def test_a_race_is_won_by_kv_that_arrives_first(pair: Pair, tmp_path: Path) -> None:
    """Speeds that are not known yet: the prompt is computed here too, in small chunks.

    The engine takes few of its many steps until the KV has arrived.
    """
    slow = structs.replace(pair.here.service.preset, prefill=PrefillSpec(chunk_size=16))
    tokens = prompt(6, 2000)
    pair.ask(tokens, pair.there)
    with (
        running(slow, tmp_path) as here,
        httpx.Client(base_url=here.url, timeout=PATIENCE_S) as http,
    ):
        with ThreadPoolExecutor(1) as pool:
            with single_steps(here) as step:
                asking: Future[Any] = pool.submit(pair.ask, tokens, http)
                step_until(
                    here, step, lambda _: peers_of(here.service).views()[0].n_fetched_tokens > 0
                )
            answer = asking.result()
        counters = here.service.snapshot().counters
        assert 1 < counters.n_prompt_tokens < 2000, "it was not computed here, or to the end"
        assert counters.n_prompt_tokens + counters.n_cached_tokens == 2000
        assert answer["timings"]["cache_n"] == counters.n_cached_tokens
    assert answer["tokens"] == pair.cold(tokens)


def test_a_peer_that_does_not_answer_is_given_up(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "MATCH_S", 0.2)
    n_failures = pair.view().n_failures
    tokens = prompt(9, 600)
    os.kill(pair.worker.pid, signal.SIGSTOP)
    try:
        answer = pair.ask(tokens)
    finally:
        os.kill(pair.worker.pid, signal.SIGCONT)
    assert pair.view().n_failures == n_failures + 1
    assert answer["tokens"] == pair.cold(tokens)
    peers_of(pair.here.service)._peers[0].succeed()
    peers_of(pair.here.service)._peers[0]._until = 0.0


@pytest.mark.usefixtures("eager")
def test_kv_of_a_salt_stays_its_own_on_both_sides(pair: Pair) -> None:
    tokens = prompt(10, 700)
    pair.ask(tokens, cache_salt="mine")
    identity = pair.here.service.facts.identity.key()

    def n_there(salt: str) -> int:
        query = {"identity": identity, "tokens": tokens, "salt": salt}
        return int(pair.there.post("/kv/match", json=query).json()["n_tokens"])

    assert n_there('["","mine"]') >= 699
    assert n_there("") == n_there('["","other"]') == 0
    n_before = pair.n_computed()
    pair.ask(tokens, cache_salt="mine")
    assert pair.n_computed() == n_before
    # The other tenant's prompt is computed, by whomever, and not taken from here.
    n_prefills = pair.view().n_prefills
    pair.ask(tokens, cache_salt="other")
    assert pair.view().n_prefills == n_prefills + 1


@pytest.mark.usefixtures("eager")
def test_a_prompt_is_not_passed_on_to_a_third_service(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = pair.here.service.facts.identity.key()
    n_prefills = pair.view().n_prefills
    query = {"identity": identity, "tokens": prompt(11, 700), "is_computed": True}
    found = pair.http.post("/kv/prefill", json=query).raise_for_status().json()
    assert found["n_tokens"] == 700 and found["segments"]
    assert pair.view().n_prefills == n_prefills


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("kind", ["tiny-hybrid", *in_soak("tiny-swa")])
def test_layers_that_cannot_be_cut_come_from_the_helper_too(
    kind: str, model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    preset = tiny_preset(model_of(kind), slots=SlotSpec(count=2, n_ctx=4096))
    with running(preset, tmp_path / "there") as there:
        server = ServerSpec(port=0, peers=(there.url,))
        with running(structs.replace(preset, server=server), tmp_path / "here") as here:
            pair = Pair(here, there.url, None)
            pair.ask(prompt(12, 300), pair.there)
            pair.ask(prompt(13, 300))
            peers_of(here.service)._peers[0].succeed(1 << 30, 1.0)
            tokens = prompt(14, 800)
            n_before = pair.n_computed()
            answer = pair.ask(tokens)
            assert pair.n_computed() == n_before + 1
            assert answer["tokens"] == pair.cold(tokens)
            pair.http.close()
            pair.there.close()


class Proxy:
    """A real server between a service and its peer, which spoils files as it is told."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.n_cuts = 0
        self.is_altering = False
        self.ranges: list[str] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                self.answer(httpx.post(proxy.target + self.path, content=body, headers={
                    **HEADERS, "content-type": "application/json",
                }, timeout=PATIENCE_S))  # fmt: skip

            def do_GET(self) -> None:
                sent = {n: self.headers[n] for n in ("range", "if-range") if n in self.headers}
                proxy.ranges += [sent["range"]] if "range" in sent else []
                self.answer(httpx.get(proxy.target + self.path, headers={**HEADERS, **sent}))

            def answer(self, found: httpx.Response) -> None:
                data = found.content
                self.send_response(found.status_code)
                self.send_header("content-length", str(len(data)))
                for name in ("etag", "content-range"):
                    if name in found.headers:
                        self.send_header(name, found.headers[name])
                self.end_headers()
                if self.command == "GET" and proxy.is_altering:
                    data = data[:-1] + bytes([data[-1] ^ 1])
                if self.command == "GET" and proxy.n_cuts:
                    proxy.n_cuts -= 1
                    self.wfile.write(data[: len(data) // 2])
                    self.close_connection = True
                    return
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def serving(self) -> Iterator["Proxy"]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()


@pytest.mark.usefixtures("eager")
def test_a_broken_transfer_goes_on_and_an_altered_file_is_not_used(
    pair: Pair, model_folder: Path, tmp_path: Path
) -> None:
    plain = tiny_preset(model_folder, slots=SlotSpec(count=2, n_ctx=N_CTX))
    with Proxy(pair.helper).serving() as proxy:
        preset = structs.replace(plain, server=ServerSpec(port=0, peers=(proxy.url,)))
        with (
            running(preset, tmp_path) as here,
            httpx.Client(base_url=here.url, timeout=PATIENCE_S) as http,
        ):
            pair.ask(prompt(20, 300), http)
            peer = peers_of(here.service)._peers[0]
            peer.succeed(1 << 30, 1.0)
            proxy.n_cuts = 2
            proxy.ranges[:] = []
            tokens = prompt(21, 1100)
            cut = pair.ask(tokens, http)
            assert cut["timings"]["cache_n"] == 1099 and not proxy.n_cuts
            assert len(proxy.ranges) == 2 and "bytes=0-" not in proxy.ranges
            assert cut["tokens"] == pair.cold(tokens)

            proxy.is_altering, tokens = True, prompt(22, 700)
            altered = pair.ask(tokens, http)
            assert altered["timings"]["cache_n"] == 0
            assert altered["tokens"] == pair.cold(tokens)
            assert "checksum" in peer.view.trouble
            assert not list((tmp_path / "kv").rglob("..tmp-*"))


def test_the_paths_for_peers_want_a_key_of_all_tenants_and_agents(pair: Pair) -> None:
    identity = pair.here.service.facts.identity.key()
    query = {"identity": identity, "tokens": [1, 2, 3]}
    for key, status in (("", 401), ("wrong", 401), ("team", 403), ("ann", 403), ("plain", 200)):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        found = httpx.post(pair.helper + "/kv/match", json=query, headers=headers)
        assert found.status_code == status, (key, found.text)
    name = f"/kv/{identity}/{'ab' * 32}"
    for method, path, body in (
        ("GET", name, None),
        ("PUT", name, b"x"),
        ("POST", "/kv/prefill", None),
        ("POST", "/kv/missing", None),
        ("PUT", "/v1/agents/ann/kv", None),
        ("POST", "/v1/agents/ann/move", None),
    ):
        for key in ("team", "ann"):
            if (key, path) == ("team", "/v1/agents/ann/move"):
                continue
            found = httpx.request(
                method, pair.helper + path, content=body or b"{}", headers={"x-api-key": key}
            )
            assert found.status_code in (400, 403), (method, path, key, found.text)
            assert body is None or found.status_code == 403
    rebound = pair.there.post("/kv/match", json=query, headers={"host": "evil.example"})
    assert rebound.status_code == 403


def test_bad_requests_of_a_peer_are_refused_in_words(pair: Pair) -> None:
    identity = pair.here.service.facts.identity.key()
    other = pair.there.post("/kv/match", json={"identity": "ab" * 16, "tokens": [1]})
    assert other.status_code == 409 and "same preset" in other.json()["error"]["message"]
    for query in (
        {"identity": identity, "tokens": []},
        {"identity": identity, "tokens": [5000]},
        {"identity": identity, "tokens": [1] * N_CTX},
    ):
        assert pair.there.post("/kv/prefill", json=query).status_code == 400
    for key in ("..", "a%2Fb", "ab" * 32):
        assert pair.there.get(f"/kv/{identity}/{key}").status_code in (400, 404)
    whole = pair.there.put(f"/kv/{identity}/{'ab' * 32}", content=b"no KV file")
    assert whole.status_code == 400 and "KV file" in whole.json()["error"]["message"]
    foreign = pair.there.put(f"/kv/{'ab' * 16}/{'ab' * 32}", content=b"no KV file")
    assert foreign.status_code == 409
    asked = {"identity": identity, "keys": ["ab" * 32, "../x"]}
    assert pair.there.post("/kv/missing", json=asked).json()["keys"] == asked["keys"]


def test_a_file_is_served_from_any_byte(pair: Pair) -> None:
    identity = pair.here.service.facts.identity.key()
    tokens = prompt(23, 600)
    query = {"identity": identity, "tokens": tokens, "is_computed": True}
    offer = pair.there.post("/kv/prefill", json=query).json()
    path = f"/kv/{identity}/{offer['segments'][0]}"
    whole = pair.there.get(path)
    part = pair.there.get(path, headers={"range": "bytes=100-", "if-range": whole.headers["etag"]})
    assert (whole.status_code, part.status_code) == (200, 206)
    assert part.content == whole.content[100:]
    assert (
        part.headers["content-range"] == f"bytes 100-{len(whole.content) - 1}/{len(whole.content)}"
    )
    other = pair.there.get(path, headers={"range": "bytes=100-", "if-range": '"old"'})
    assert (other.status_code, other.content) == (200, whole.content)
    assert pair.there.get(path, headers={"range": "bytes=999999999-"}).status_code == 400


def move(pair: Pair, *args: str) -> Any:
    return CliRunner().invoke(app, ["agents", "move", *args, "--url", pair.here.url])


def turn(http: httpx.Client, agent: str, text: str, **more: Any) -> Any:
    body = {
        "append": [{"role": "user", "content": text}],
        "max_tokens": 8,
        "temperature": 0,
        **more,
    }
    return http.post(f"/v1/agents/{agent}/generate", json=body).raise_for_status().json()


def test_an_agent_moves_with_its_kv(tmp_path: Path) -> None:
    """Under the demo model: what it says has the same tokens when it is read again.

    Its KV is as much the agent's own there as here: also after a restart of the peer.
    """
    story = "Every stone in the harbor has a name and a number. " * 30
    plain = Preset(
        model=ModelSpec(id="demo"),
        slots=SlotSpec(count=2, n_ctx=2048),
        sampling=SamplingSpec(temperature=0, thinking=False),
        server=ServerSpec(port=0),
    )
    with ExitStack() as stack:
        there = stack.enter_context(running(plain, tmp_path / "there"))
        ours = structs.replace(plain, server=ServerSpec(port=0, peers=(there.url,)))
        here = stack.enter_context(running(ours, tmp_path / "here"))
        http = stack.enter_context(httpx.Client(base_url=here.url, timeout=PATIENCE_S))
        for agent in ("bob", "twin"):
            turn(http, agent, story)
            turn(http, agent, "Which one is blue?")
        said = http.get("/v1/agents/bob/history").json()["messages"]
        args = ["agents", "move", "bob", "--to", there.url, "--url", here.url]
        moved = CliRunner().invoke(app, args)
        assert moved.exit_code == 0, moved.output
        told = re.search(
            r"bob is at .* KV of (\d+) tokens; ([\d.]+) [KM]iB were sent", moved.stdout
        )
        assert told is not None and int(told[1]) > 300 and float(told[2]) > 0
        assert http.get("/v1/agents/bob").status_code == 404
        same = turn(http, "twin", "And why?", cache_prompt=False)
    with (
        running(plain, tmp_path / "there") as there,
        httpx.Client(base_url=there.url, timeout=PATIENCE_S) as http,
    ):
        assert http.get("/v1/agents/bob/history").json()["messages"] == said
        answer = turn(http, "bob", "And why?")
    n_cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert n_cached >= 0.99 * int(told[1])
    assert answer["choices"][0]["message"] == same["choices"][0]["message"]


def test_an_agent_is_moved_once_and_only_to_a_peer(pair: Pair) -> None:
    turn(pair.http, "eve", "Remember the word apple. " * 20)
    other = move(pair, "eve", "--to", "http://127.0.0.1:1")
    assert other.exit_code and "server.peers" in str(other.exception)
    kept = move(pair, "eve", "--to", pair.helper + "/", "--keep")
    assert kept.exit_code == 0, kept.output
    assert pair.http.get("/v1/agents/eve").status_code == 200
    turn(pair.there, "eve", "And now?")
    again = move(pair, "eve", "--to", pair.helper)
    assert again.exit_code and "already" in str(again.exception)
    assert pair.http.get("/v1/agents/eve").status_code == 200
    assert move(pair, "nobody", "--to", pair.helper).exit_code
    pair.there.delete("/v1/agents/eve")
    back = move(pair, "eve", "--to", pair.helper)
    assert back.exit_code == 0 and "; 0 B were sent" in back.output


def test_the_presets_of_the_page_are_valid(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "two-macs.md").read_text(encoding="utf-8")
    helper, desk = re.findall(r"^```yaml\n(extends:.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "helper.yaml").write_text(helper.replace("sha256:…", "sha256:" + "ab" * 32))
    (tmp_path / "desk.yaml").write_text(desk)
    home = Home(tmp_path)
    theirs = presets.load(str(tmp_path / "helper.yaml"), home).preset
    ours = presets.load(str(tmp_path / "desk.yaml"), home).preset
    peer = ours.server.peers[0]
    assert isinstance(peer, PeerSpec) and peer.url.endswith(f":{theirs.server.port}")
    assert theirs.model == ours.model
    assert f"agents move bob --to {peer.url}" in page


@pytest.mark.parametrize("url", ["mac-studio.local:7119", "ftp://mac", "http://a b", "http://me@x"])
def test_a_peer_is_the_url_of_a_service(url: str, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(f"extends: demo\nserver: {{peers: ['{url}']}}\n")
    with pytest.raises(SetupError, match="must be the URL of a service"):
        presets.load(str(tmp_path / "bad.yaml"), Home(tmp_path))


def test_the_key_of_a_peer_comes_from_its_file(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("plain\n")
    spec = PeerSpec(pair.helper, key_file=str(tmp_path / "key"))
    assert peers._address(spec, {}) == (pair.helper, "plain")
    assert peers._address(pair.helper, {peers.KEY_VARIABLE: "other"}) == (pair.helper, "other")
    with pytest.raises(SetupError, match="cannot be read"):
        peers._address(structs.replace(spec, key_file=str(tmp_path / "none")), {})


def test_files_that_are_not_of_the_tokens_or_the_model_are_not_used(pair: Pair) -> None:
    """A peer that says what is not so: the index here takes nothing of it."""
    tokens = prompt(30, 700)
    other = prompt(31, 700)
    identity = pair.here.service.facts.identity.key()
    engine = pair.here.service.generator
    pair.ask(tokens, cache_prompt=True)
    manifest = engine.export_kv(PromptTokens(tuple(tokens)), "").result(PATIENCE_S)
    assert manifest.tokens == tuple(tokens) and len(manifest.segments) >= 2
    lies = (
        structs.replace(manifest, tokens=tuple(other)),
        structs.replace(manifest, salt="mine"),
        structs.replace(manifest, identity="ab" * 16),
        structs.replace(manifest, segments=manifest.segments[1:]),
        structs.replace(manifest, segments=manifest.segments[:1]),
        structs.replace(manifest, checkpoints=manifest.segments[:1]),
        structs.replace(manifest, segments=("cd" * 32,)),
    )
    for lie in lies:
        error = engine.import_kv(lie).exception(PATIENCE_S)
        assert isinstance(error, StackError), lie
    assert engine.import_kv(manifest).result(PATIENCE_S) == 700
    store = peers_of(pair.here.service).store
    for axis in (2, 3):  # Other tokens than the file says, then other dims than the model has.
        file = store.read(identity, manifest.segments[0])
        shape = list(file.tensors[0].shape)
        shape[axis], shape[1] = shape[axis] // 2, shape[1] * 2
        plane = structs.replace(file.tensors[0], shape=tuple(shape))
        lie = structs.replace(file, key=f"{axis:064x}", tensors=(plane, *file.tensors[1:]))
        store.write(lie)
        wrong = structs.replace(manifest, segments=(lie.key, *manifest.segments[1:]))
        assert isinstance(engine.import_kv(wrong).exception(PATIENCE_S), StackError)
    assert pair.ask(other)["tokens"] == pair.cold(other)


@pytest.mark.usefixtures("eager")
def test_a_prompt_is_computed_here_when_the_helper_dies_meanwhile(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test here: it kills the helper."""
    monkeypatch.setattr(peers, "FIRST_PAUSE_S", 600.0)
    pair.trust()
    tokens = prompt(7, 2000)
    before = pair.view()
    n_before = pair.n_computed()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(pair.ask, tokens)
        until(lambda: any(slot["is_processing"] for slot in pair.there.get("/slots").json()))
        assert pair.n_computed() == n_before, "it was computed here too"
        pair.worker.kill()
        answer = asking.result()
    assert pair.n_computed() - n_before == 2000
    assert answer["tokens"] == pair.cold(tokens)
    view = pair.view()
    assert view.n_failures == before.n_failures + 1
    assert "no answer" in view.trouble and view.pause_s == 600.0
    metrics = pair.http.get("/metrics").text
    assert f'mlxstack_peer_up{{peer="{pair.helper}"}} 0.0' in metrics
    props = pair.http.get("/props").json()
    assert props["peer_troubles"] == [f"{view.url}: {view.trouble}"]
    # Left alone now: the next prompt does not wait for it.
    assert pair.ask(prompt(8, 600))["tokens"] == pair.cold(prompt(8, 600))
    assert pair.view() == view
