"""Heads of clients: kept, bounded, and computed before the first message."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from mlxstack.core.conversation import Conversation, Message, Role
from mlxstack.core.preset import (
    Anticipation,
    ModelSpec,
    PrefixCacheSpec,
    Preset,
    ServerSpec,
    SlotSpec,
)
from mlxstack.core.status import HeadView
from mlxstack.features.heads import policy
from mlxstack.features.heads.policy import (
    MAX_BYTES,
    MAX_HEAD_BYTES,
    MAX_HEADS,
    Head,
    HeadKey,
    OtherWork,
    last_head,
    may_compute,
    surplus,
)
from mlxstack.features.heads.service import ClientHeads, head_messages
from mlxstack.features.heads.store import HeadStore
from mlxstack.policy.scheduling.chunked_prefill import PrefillPolicy, ThroughputModel
from mlxstack.policy.scheduling.scheduler import next_prefill_chunk
from mlxstack.policy.scheduling.scheduler_state import SchedulerState, Slot, SlotState
from tests.api.anthropic import shapes
from tests.api.requests import prompt_of
from tests.api.running import Running, running
from tests.clients import stage
from tests.patience import PATIENCE_S, wait_until
from tests.policy.scheduler_states import ticket

names = st.sampled_from(("claude", "codex", "1", "2", "/a", "/b", ""))
keys = st.builds(HeadKey, names, names, names, st.sampled_from(("", "s")))
TALK = Conversation((Message(Role.SYSTEM, "You are an agent."),))
lists = st.lists(
    st.builds(
        Head, keys, st.just(TALK), used_at=st.floats(0, 1e9), n_bytes=st.integers(0, MAX_HEAD_BYTES)
    ),
    max_size=2 * MAX_HEADS,
)
TURNS = PrefixCacheSpec()


@given(lists, keys)
def test_the_last_head_is_of_the_same_client_and_salt(kept: list[Head], wanted: HeadKey) -> None:
    head = last_head(kept, wanted)
    own = [h for h in kept if (h.key.client, h.key.salt) == (wanted.client, wanted.salt)]
    assert (head is None) == (not own)
    if head is not None and wanted.folder:
        assert head in own
        in_folder = [h for h in own if h.key.folder == wanted.folder]
        assert not in_folder or head in in_folder


@given(lists)
def test_heads_are_bounded_and_the_last_used_stay(kept: list[Head]) -> None:
    gone = surplus(kept)
    left = [head for head in kept if head not in gone]
    assert len(left) <= MAX_HEADS
    assert sum(head.n_bytes for head in left) <= MAX_BYTES
    if gone and left:
        assert min(h.used_at for h in left) >= max(h.used_at for h in gone)


@given(st.integers(0, 3), st.integers(0, 3), st.booleans())
def test_a_head_is_computed_while_nothing_else_is_done(
    n_active: int, n_waiting: int, is_calm: bool
) -> None:
    may = may_compute(OtherWork(n_active, n_waiting, is_calm))
    assert may == (n_active == n_waiting == 0 and is_calm)


def test_a_chunk_that_nobody_waits_for_keeps_the_bound_on_stalls() -> None:
    speed = ThroughputModel(prefill_tps=1000.0, n_largest=2048)
    sizes = []
    for is_background in (False, True):
        task = structs.replace(ticket("a", 4000), is_background=is_background)
        slot = Slot(0, SlotState.PREFILLING, task, n_prompt=4000)
        _, chunk = next_prefill_chunk(SchedulerState((slot,)), speed, PrefillPolicy())
        assert chunk is not None
        sizes.append(chunk.n_tokens)
    assert sizes[1] <= 250 < sizes[0]


def test_files_of_heads_are_private_and_damaged_ones_are_passed_over(tmp_path: Path) -> None:
    store = HeadStore(tmp_path / "heads")
    store.save(Head(HeadKey("claude"), TALK, 1.0))
    store.save(Head(HeadKey("codex"), Conversation((Message(Role.SYSTEM, "x" * (2 << 20)),)), 2.0))
    (file,) = (tmp_path / "heads").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    (tmp_path / "heads" / "broken.head").write_bytes(b"\xc1")
    again = HeadStore(tmp_path / "heads")
    again.load()
    assert list(again.by_key) == [HeadKey("claude")]


def test_the_oldest_file_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "MAX_HEADS", 2)
    store = HeadStore(tmp_path)
    for i in range(3):
        store.save(Head(HeadKey("claude", str(i)), TALK, float(i)))
    assert {key.version for key in store.by_key} == {"1", "2"}
    assert len(list(tmp_path.iterdir())) == 2


SYSTEM = Message(Role.SYSTEM, "You are an agent.")
CONTEXT = "<environment_context>\n/x\n</environment_context>"
SKILLS = "<system-reminder>\na\n</system-reminder>\n\n<system-reminder>\nb\n</system-reminder>\n\n"


@pytest.mark.parametrize(
    ("turns", "head"),
    [
        (("look",), ()),
        ((f"{SKILLS}look",), (SKILLS,)),
        ((CONTEXT, "look"), (CONTEXT,)),
        ((CONTEXT, f"{SKILLS}look", "again"), (CONTEXT, SKILLS)),
        (("look <system-reminder>a</system-reminder>",), ()),
        (("",), ()),
    ],
    ids=["a word", "Claude Code", "Codex", "both", "behind a word", "nothing"],
)
def test_a_head_ends_where_a_person_begins(turns: tuple[str, ...], head: tuple[str, ...]) -> None:
    users = [Message(Role.USER, text) for text in turns]
    answered = Message(Role.ASSISTANT, "")
    found = head_messages((SYSTEM, *users, answered, Message(Role.USER, CONTEXT)))
    assert found == (SYSTEM, *(Message(Role.USER, text) for text in head))


@contextmanager
def serving(folder: Path, spec: PrefixCacheSpec = TURNS) -> Iterator[tuple[Running, httpx.Client]]:
    """A service of a scripted model, which ends its answers; again, with the same home."""
    scripted = folder / "model"
    if not scripted.exists():
        stage.model(scripted, [{"when": ".", "say": "Yes."}])
    preset = Preset(
        model=ModelSpec(id=str(scripted), alias="local-model", trust_remote_code=True),
        slots=SlotSpec(count=2, n_ctx=16384),
        prefix_cache=spec,
        server=ServerSpec(port=0),
    )
    with (
        running(preset, folder / "home") as live,
        httpx.Client(base_url=live.url, timeout=PATIENCE_S) as http,
    ):
        yield live, http


def message(text: str) -> dict[str, Any]:
    """First message of a session whose head is long, and ends behind the first question."""
    body = shapes.opening(text)
    body["system"][-1]["text"] += prompt_of(1500, 3)
    body["messages"][1]["content"][0]["text"] += prompt_of(500, 5)
    return body


def send(http: httpx.Client, text: str, session: str) -> tuple[int, int]:
    """Tokens of the prompt, and those that were computed for it."""
    headers = {"x-claude-code-session-id": session, "user-agent": "claude-cli/2.1.3 (external)"}
    body = {**message(text), "stream": False, "max_tokens": 16}
    answer = http.post("/v1/messages", json=body, headers=headers)
    answer.raise_for_status()
    usage = answer.json()["usage"]
    n_cached = usage["cache_read_input_tokens"]
    n_new = usage["input_tokens"] + usage.get("cache_creation_input_tokens", 0)
    return n_new + n_cached, n_new


def views(live: Running) -> tuple[HeadView, ...]:
    feature = live.service.feature(ClientHeads)
    assert feature is not None
    return feature.views


def ready(live: Running) -> HeadView:
    return wait_until(lambda: next((v for v in views(live) if v.state == "ready"), None))  # type: ignore[return-value]


@pytest.mark.mlx
@pytest.mark.net
@pytest.mark.parametrize("is_on_disk", [True, False])
def test_the_first_message_after_a_restart_finds_the_head(tmp_path: Path, is_on_disk: bool) -> None:
    """With its KV on disk, and without, as after an update that changes the KV's identity."""
    with serving(tmp_path) as (live, http):
        n_prompt, n_cold = send(http, "hello, how are you?", "one")
        assert n_cold > 0.9 * n_prompt
        feature = live.service.feature(ClientHeads)
        assert feature is not None
        wait_until(lambda: feature._store.by_key)
    if not is_on_disk:
        shutil.rmtree(tmp_path / "home" / "kv")
    with serving(tmp_path) as (live, http):
        if is_on_disk:
            http.post("/heads", json={"client": "claude", "folder": "/x"}).raise_for_status()
        else:
            http.get("/v1/models", headers={"user-agent": "claude-code/2.1.3"})
        head = ready(live)
        assert (head.n_cached > 0) == is_on_disk
        assert head.version == "2.1.3"
        _, n_new = send(http, "something else", "two")
        assert n_new <= 0.05 * n_prompt
        assert not http.post("/heads", json={"client": "aider"}).json()["is_known"]


@pytest.mark.mlx
@pytest.mark.net
def test_heads_are_off_by_a_key(tmp_path: Path) -> None:
    off = structs.replace(TURNS, anticipate=Anticipation.OFF)
    with serving(tmp_path, off) as (_, http):
        send(http, "hello, how are you?", "one")
        assert not http.post("/heads", json={"client": "claude"}).json()["is_known"]
    assert not (tmp_path / "home" / "heads").exists()
