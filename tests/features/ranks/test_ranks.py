"""One model on two ranks, in two processes on a ring: every answer is that of one rank.

A process joins one ring only, so all tests of this file share the second process.
"""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import mlx.core as mx
import pytest
from llguidance import LLMatcher
from mlx.utils import tree_flatten
from msgspec.structs import replace

from mlxstack.core.commands import EraseSlot, RestoreSlot, SaveSlot
from mlxstack.core.engine_events import KVSource, RequestFailed, RequestFinished, TokenSampled
from mlxstack.core.errors import Broken, SetupError
from mlxstack.core.interfaces import KVFile, TensorBytes
from mlxstack.core.preset import KVSpec, ModelSpec, PrefixCacheSpec, Preset, Speculation
from mlxstack.core.request import SamplingParams
from mlxstack.engine.decode import remembered_checks
from mlxstack.engine.decode.batching_check import self_check
from mlxstack.engine.device_memory import MemoryPlan
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.loading import loader
from mlxstack.engine.model import compiled_experts
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.runner import ModelRunner
from mlxstack.features.formats.grammar.constraint import ConstraintLayout, GrammarConstraint
from mlxstack.features.ranks import wire
from mlxstack.features.ranks.disk import RankDisk
from mlxstack.features.ranks.follower import Replica
from mlxstack.features.ranks.group import RankGroup, least_memory, rank_of
from mlxstack.features.ranks.passes import digest_of
from mlxstack.features.ranks.sharding import divide
from mlxstack.host.home import Home
from mlxstack.store.kv_store import DiskKVStore
from mlxstack.text.grammar.compiler import GrammarCompiler
from tests import ring
from tests.engine.gated_disk import Gate
from tests.engine.harness import WAIT_S, Driver, draft_freely, preset_of, prompt, running
from tests.mac.test_compiled_experts import Clock, faster
from tests.models import HYBRID, LLAMA, SINKS, SLIDING, write
from tests.patience import PATIENCE_S, wait_until
from tests.repetition import all_in_soak, in_soak

pytestmark = pytest.mark.mlx

LAYERS = {"num_hidden_layers": 2}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 64,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA | LAYERS,
    "qwen3_moe": LLAMA | LAYERS | EXPERTS | {"model_type": "qwen3_moe"},
    "gpt_oss": SINKS | LAYERS | {"layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": HYBRID | LAYERS | {"model_type": "qwen3_5", "full_attention_interval": 2},
    },
    "qwen3_next": HYBRID | {"num_hidden_layers": 5, "full_attention_interval": 2},
}
"""A dense model, one with experts, one with windows and sinks, a hybrid, and a pipeline.

The stages of the pipeline are unequal, and end with different kinds of layers.
"""
DIVIDED = {"qwen3_5", "qwen3_next"}
"""By tensors, and as a pipeline; the others are divided as the first of them."""

THREE_HEADS = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3}

Play = Callable[[Driver], Any]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    """Two ranks on this machine; the second one has a home of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_STACK_HOME", str(tmp_path_factory.mktemp("rank-1")))
        # Its passes are collectives: no rank may remember the verdict.
        patch.setattr(remembered_checks, "self_check", self_check)
        patch.setattr(mx.distributed, "init", ring.join)
        group = RankGroup(("127.0.0.1", "127.0.0.1"))
        yield group
        group.close()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Preset:
    return preset_of(write(tmp_path_factory.mktemp("models") / "one", CONFIGS["llama"]))


@pytest.mark.parametrize("name", ["qwen3_next", *in_soak("llama")])
def test_a_restart_finds_the_kv_on_the_disks_of_both(
    name: str, group: RankGroup, tmp_path: Path
) -> None:
    preset = preset_of(write(tmp_path / "model", CONFIGS[name]))
    tokens = prompt(260, 14)
    with running(preset, tmp_path, ranks=group) as driver:
        before = driver.answer(tokens, 6, agent="bob")
        driver.catch_up()
    with running(preset, tmp_path, ranks=group) as driver:
        ask = driver.submit(tokens, 6, agent="bob")
        driver.finish(ask)
        assert driver.tokens(ask) == before
        assert driver.seated(ask).source is KVSource.DISK
        assert driver.seated(ask).n_cached >= 256


def test_overlapping_reads_of_a_file_are_loaded_on_both_ranks(
    group: RankGroup, tmp_path: Path
) -> None:
    preset = preset_of(write(tmp_path / "model", CONFIGS["qwen3_next"]))
    gate = Gate()
    tokens = prompt(300, 17)
    busy = Event()
    with running(preset, tmp_path, ranks=group) as driver:
        before = driver.answer(tokens, 4, slot=0)
        driver.engine.run_slot_command(SaveSlot(0, "a.bin")).result(timeout=WAIT_S)
        driver.catch_up()
    with running(preset, tmp_path, disk=gate, ranks=group) as driver:
        reader = driver.engine.loaded.disk_tier._reader
        gate.is_open.clear()
        gone = driver.submit(tokens, 4, slot=0)
        wait_until(lambda: driver.engine.snapshot().slots[0].is_reading)
        driver.engine.cancel(gone)
        driver.finish(gone)
        ask = driver.submit(tokens, 4, slot=0)
        wait_until(lambda: driver.engine.snapshot().slots[0].is_reading)
        # Both reads are over before the engine takes in the first.
        driver.engine.post(lambda: busy.wait(WAIT_S))
        gate.is_open.set()
        reader.submit(str).result(timeout=WAIT_S)
        busy.set()
        driver.finish(ask)
        assert driver.seated(ask).source is KVSource.DISK
        assert driver.tokens(ask) == before
        restored = driver.engine.run_slot_command(RestoreSlot(1, "a.bin")).result(timeout=WAIT_S)
        assert restored.n_restored >= 300
        follow_up = tokens + tuple(before) + prompt(5, 18)
        assert driver.answer(follow_up, 4, slot=1) == driver.cold(follow_up, 4, slot=2)
    assert not group.lost


def test_blocks_of_experts_are_not_compiled(
    group: RankGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_experts, "has_gpu", lambda: True)
    clock = Clock(monkeypatch, "qwen3_moe", faster)
    preset = preset_of(write(tmp_path / "model", CONFIGS["qwen3_moe"]))
    with running(preset, tmp_path, ranks=group) as driver:
        clock.calls.clear()
        driver.answer(prompt(9), 4)
    assert clock.calls[1, 1]


def test_a_rank_holds_a_file_for_every_read(llama: Preset, tmp_path: Path) -> None:
    """Reads of one key overlap, and each is taken once; none is held longer."""
    key = "cd" * 16
    identity = "ab" * 16
    file = KVFile(key, "checkpoint", identity, 0, 4, (TensorBytes("F32", (2,), bytes(8)),))
    with connected() as (here, there):
        disk = RankDisk(Home(tmp_path), llama, identity, wire.Channel(here))
        DiskKVStore(tmp_path / "kv").write(file)
        for number in range(2):
            disk.do(wire.Task(number, wire.ReadKV(key)))
            assert wire.Channel(there).receive() == wire.TaskOutcome(number)
        Replica(None, None, disk).apply(wire.Record(1, (wire.Discard(key),)))  # type: ignore[arg-type]
        disk.take(key)
        with pytest.raises(Broken, match="was not read"):
            disk.take(key)
        disk.close()


def test_quantized_kv_and_a_small_cache(llama: Preset, group: RankGroup, tmp_path: Path) -> None:
    kv = KVSpec(bits=8, group_size=32, quantized_start=64)
    spec = PrefixCacheSpec(max_entries=2)
    small = replace(llama, kv=kv, prefix_cache=spec)
    prompts = [prompt(n, n) for n in (50, 140, 200, 150)]

    def answers(ranks: RankGroup | None, home: Path) -> list[list[int]]:
        with running(small, home, ranks=ranks) as driver:
            first = [driver.answer(tokens, 20) for tokens in prompts]
            return first + [driver.answer(tokens, 20) for tokens in prompts]

    assert answers(group, tmp_path / "b") == answers(None, tmp_path / "a")


def test_a_decode_step_sends_few_bytes(llama: Preset, group: RankGroup, tmp_path: Path) -> None:
    with running(llama, tmp_path, ranks=group) as driver:
        first = driver.submit(prompt(20, 15), 60)
        driver.until(first, TokenSampled, 3)
        n_bytes = group.n_bytes
        n_records = group.n_records
        driver.finish(first)
        n_bytes = group.n_bytes - n_bytes
        n_records = group.n_records - n_records
        assert n_records >= 50
        assert n_bytes <= 64 * n_records


def test_a_draft_model_runs_on_the_first_rank_alone(
    llama: Preset, group: RankGroup, tmp_path: Path
) -> None:
    model = replace(llama.model, draft=llama.model.id)
    preset = replace(llama, model=model, speculation=Speculation.AUTO)
    with running(llama, tmp_path / "alone") as driver:
        expected = [driver.answer(prompt(40, n), 30) for n in range(3)]
    with running(preset, tmp_path / "together", ranks=group) as driver:
        draft_freely(driver)
        asks = [driver.submit(prompt(40, n), 30) for n in range(3)]
        for ask in asks:
            driver.finish(ask)
        assert [driver.tokens(ask) for ask in asks] == expected
        assert driver.engine.snapshot().counters.n_model_accepted_tokens > 30


class TwoRanks:
    """The first of two ranks, for the division of weights alone."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (SLIDING | LAYERS, "no `shard`"),
        (LLAMA | LAYERS | THREE_HEADS, "cannot be divided .* 3 heads"),
        (HYBRID, "cannot be divided .* a layer of every kind"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(
    tmp_path: Path, config: dict[str, Any], why: str
) -> None:
    folder = write(tmp_path / "model", config)
    with pytest.raises(SetupError, match=why):
        loader.load(ModelSpec(id=str(folder)), KVSpec(), divide=partial(divide, TwoRanks(), "x"))


def test_a_stage_holds_its_own_layers_only(tmp_path: Path) -> None:
    spec = ModelSpec(id=str(write(tmp_path / "model", CONFIGS["qwen3_next"])))
    whole = loader.load(spec, KVSpec())
    stage = loader.load(spec, KVSpec(), divide=partial(divide, TwoRanks(), spec.id))
    kinds = [type(one) for one in CacheFactory(whole.model, KVSpec()).make()]
    assert [type(one) for one in CacheFactory(stage.model, KVSpec()).make()] == kinds[2:]
    others = [layer.parameters() for layer in whole.model.layers[:2]]
    n_other = sum(array.size for _, array in tree_flatten(others))
    assert stage.facts.n_params == whole.facts.n_params - n_other
    assert stage.facts.identity == whole.facts.identity


def test_the_rank_with_the_least_room_bounds_the_kv_of_all() -> None:
    plan = MemoryPlan(kv_budget=1000, max_cached_bytes=1, array_limit=500)
    assert least_memory(plan, 10, wire.RankMemory(2000, 900, 10)) == plan
    fewer = least_memory(plan, 10, wire.RankMemory(800, 400, 5))
    assert (fewer.kv_budget, fewer.array_limit) == (800, 400)
    # As many tokens as the other rank has room for.
    assert least_memory(plan, 10, wire.RankMemory(1200, 900, 20)).kv_budget == 600


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as here,
        server.accept()[0] as there,
    ):
        yield here, there


def test_a_rank_that_stands_elsewhere_carries_out_nothing(llama: Preset, tmp_path: Path) -> None:
    model = loader.load(llama.model, llama.kv).model
    cache_factory = CacheFactory(model, llama.kv)
    with connected() as (here, _):
        disk = RankDisk(Home(tmp_path), llama, "ab" * 16, wire.Channel(here))
        replica = Replica(ModelRunner(model), cache_factory, disk)
        start = digest_of([SlotContext(cache_factory)])
        replica.apply(wire.Record(1, (wire.NewContext(0), wire.Pass(start, ((0, (5, 6)),)))))
        with pytest.raises(Broken, match="diverged from rank 0 at record 2, with 2 tokens"):
            replica.apply(wire.Record(2, (wire.Pass(start, ((0, (7,)),)),)))
        with pytest.raises(Broken, match="record 9 came instead of 3"):
            replica.apply(wire.Record(9, ()))
        disk.close()


def test_a_stranger_does_not_get_into_the_group() -> None:
    hello = wire.Hello("wrong", "0", 1)
    assert rank_of(hello, ["right"]) is None
    assert rank_of(wire.Hello("right", "0", 1), ["other", "right"]) == 1
    with connected() as (here, there):
        wire.Channel(there).send(wire.Hello("x" * 5000, "0", 1))
        with pytest.raises(OSError, match="at most 1024"):
            wire.Channel(here).receive(1024)


def test_a_task_fails_when_the_group_is_closed() -> None:
    group = RankGroup(("127.0.0.1", "127.0.0.1"))
    task = group.ask(wire.FlushKV())
    group.close()
    with pytest.raises(Broken, match="the group was closed"):
        task.result(timeout=WAIT_S)


@pytest.fixture(
    scope="module",
    params=[one for name in CONFIGS for one in ([name] if name in DIVIDED else in_soak(name))],
)
def preset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Preset:
    folder = write(tmp_path_factory.mktemp("models") / request.param, CONFIGS[request.param])
    return preset_of(folder)


@pytest.fixture(scope="module")
def compare(
    preset: Preset, group: RankGroup, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Play], Any]]:
    """Plays a scene on one rank and on two, which draft; the outcome, which must be the same."""
    # Once a rank is lost, the first one waits for it for ever, and with it all of MLX.
    assert not group.lost
    homes = [tmp_path_factory.mktemp(name) for name in ("alone", "together")]
    drafting = replace(preset, speculation=Speculation.AUTO)
    with running(preset, homes[0]) as alone, running(drafting, homes[1], ranks=group) as together:
        draft_freely(together)

        def play(scene: Play) -> Any:
            expected = scene(alone)
            found = scene(together)
            assert found == expected
            return found

        yield play


@pytest.mark.parametrize(
    "preset", all_in_soak(CONFIGS, "gpt_oss", *sorted(DIVIDED)), indirect=True, scope="module"
)
def test_rows_that_join_and_leave_a_batch_are_as_on_one_rank(
    compare: Callable[[Play], Any],
) -> None:
    def scene(driver: Driver) -> list[list[int]]:
        first = driver.submit(prompt(70, 1), 12)
        driver.until(first, TokenSampled, 2)
        asks = [
            first,
            driver.submit(prompt(9, 2), 4, sampling=SamplingParams(temperature=1.0, seed=5)),
            driver.submit(
                prompt(150, 3), 8, sampling=SamplingParams(repetition_penalty=1.3, top_logprobs=2)
            ),
        ]
        for ask in asks:
            driver.finish(ask)
        return [driver.tokens(ask) for ask in asks]

    answers = compare(scene)
    assert [len(answer) for answer in answers] == [12, 4, 8]


def test_hits_forks_and_parked_prompts_are_as_on_one_rank(compare: Callable[[Play], Any]) -> None:
    first = prompt(300, 4)
    others = [prompt(280, seed) for seed in (5, 6, 7)]

    def scene(driver: Driver) -> list[tuple[KVSource, int, list[int]]]:
        answer = tuple(driver.answer(first, 5, slot=0))
        follow_up = first + answer + prompt(20, 8)
        turns = [(follow_up, 0), (follow_up + prompt(30, 9), 1)]
        turns += [(other, slot) for slot, other in enumerate(others)]
        turns += [(follow_up + prompt(10, 10), 2)]
        seen = []
        for tokens, slot in turns:
            ask = driver.submit(tokens, 5, slot=slot)
            driver.finish(ask)
            seated = driver.seated(ask)
            seen.append((seated.source, seated.n_cached, driver.tokens(ask)))
            assert driver.tokens(ask) == driver.cold(tokens, 5, slot=slot)
        return seen

    sources = [source for source, _, _ in compare(scene)]
    assert {KVSource.SLOT, KVSource.PARKED} <= set(sources)


def test_a_saved_slot_goes_on_in_another_one(compare: Callable[[Play], Any]) -> None:
    first = prompt(200, 11)

    def scene(driver: Driver) -> list[Any]:
        def do(command: Any) -> Any:
            return driver.engine.run_slot_command(command).result(timeout=PATIENCE_S)

        answer = tuple(driver.answer(first, 4, slot=0))
        saved = do(SaveSlot(0, "a.bin"))
        do(EraseSlot(0))
        restored = do(RestoreSlot(2, "a.bin"))
        follow_up = first + answer + prompt(5, 12)
        ask = driver.submit(follow_up, 4, slot=2)
        driver.finish(ask)
        assert driver.tokens(ask) == driver.cold(follow_up, 4, slot=1)
        return [saved.n_saved, restored.n_restored, driver.seated(ask).n_cached, driver.tokens(ask)]

    n_saved, n_restored, n_cached, _ = compare(scene)
    assert n_saved == n_restored
    assert n_cached >= 200


def test_drafts_are_accepted_and_rolled_back_on_both(compare: Callable[[Play], Any]) -> None:
    few = tuple((token, 60.0) for token in (7, 8, 9))
    rules = [
        SamplingParams(logit_bias=few),
        SamplingParams(temperature=0.8, seed=1, logit_bias=few),
        SamplingParams(temperature=0.4, seed=2, repetition_penalty=1.05, logit_bias=few),
    ]
    counts = []

    def scene(driver: Driver) -> list[list[int]]:
        jobs = [(prompt(n, n) * 3, each) for n, each in zip((5, 17, 40), rules, strict=True)]
        asks = [driver.submit(tokens, 24, sampling=each) for tokens, each in jobs]
        for ask in asks:
            driver.finish(ask)
        answers = [driver.tokens(ask) for ask in asks]
        for (tokens, each), answer in zip(jobs, tuple(answers), strict=True):
            follow_up = (*tokens, *answer, 1)
            answers.append(driver.answer(follow_up, 8, sampling=each))
            assert answers[-1] == driver.cold(follow_up, 8, sampling=each)
        now = driver.engine.snapshot().counters
        counts.append((now.n_drafted_tokens, now.n_accepted_tokens))
        return answers

    compare(scene)
    alone, (n_drafted, n_accepted) = counts
    assert alone == (0, 0)
    assert 0 < n_accepted < n_drafted


def test_a_grammar_rules_the_answer(compare: Callable[[Play], Any]) -> None:
    schema = '{"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}'
    grammar = LLMatcher.grammar_from_json_schema(schema, {"whitespace_flexible": False})

    def scene(driver: Driver) -> str:
        tokenizer = driver.engine.tokenizer
        rules = GrammarCompiler(tokenizer, n_vocab := tokenizer.vocab_size).compile(
            grammar, "schema"
        )
        eos = frozenset(tokenizer.eos_token_ids)
        constraint = GrammarConstraint(ConstraintLayout(n_vocab, eos), rules)
        tokens = driver.answer(prompt(30, 13), 60, eos=eos, constraint=constraint)
        return str(tokenizer.decode(tokens))

    assert set(json.loads(compare(scene))) == {"yes"}


@pytest.mark.parametrize("n_actions", [20, *in_soak(1000)])
def test_random_arrivals_cancels_and_slot_actions_lead_no_rank_astray(
    compare: Callable[[Play], Any], group: RankGroup, n_actions: int
) -> None:
    """Every record carries a digest: a rank that stands elsewhere would end the group."""
    beginnings = [prompt(140, seed) for seed in (21, 22)]

    def scene(driver: Driver) -> None:
        random = Random(16)
        asks = list[str]()
        for n in range(n_actions):
            match random.randrange(6):
                case 0 if asks:
                    driver.engine.cancel(random.choice(asks))
                case 1:
                    driver.engine.run_slot_command(EraseSlot(random.randrange(3)))
                case 2:
                    driver.engine.run_slot_command(SaveSlot(random.randrange(3), f"{n % 3}.bin"))
                case 3:
                    command = RestoreSlot(random.randrange(3), f"{n % 3}.bin")
                    driver.engine.run_slot_command(command)
                case _:
                    tokens = random.choice(beginnings) + prompt(random.randrange(1, 60), n)
                    rules = SamplingParams(temperature=random.choice((0.0, 1.0)), seed=n)
                    agent = random.choice((None, "ann"))
                    asks.append(driver.submit(tokens, 4, sampling=rules, agent=agent))
            if random.random() < 0.3 and asks:
                driver.until(random.choice(asks), (RequestFinished, RequestFailed))
        ends = [driver.until(ask, (RequestFinished, RequestFailed)) for ask in asks]
        assert not [end for end in ends if isinstance(end, RequestFailed)]
        driver.catch_up()

    compare(scene)
    assert not group.lost
    assert compare(lambda driver: driver.answer(beginnings[0], 4)) == compare(
        lambda driver: driver.cold(beginnings[0], 4)
    )
