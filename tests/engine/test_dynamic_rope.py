"""Models whose rotary base depends on the length of a text answer as mlx-lm does alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlxstack.core.commands import RestoreSlot, SaveSlot
from mlxstack.core.preset import PrefillSpec, SlotSpec, Speculation
from mlxstack.engine.model.length_rope import exact_ropes
from mlxstack.engine.model.runner import ModelRunner, SlotTokens
from mlxstack.policy.pass_layout import RowMode
from tests import models
from tests.engine.harness import WAIT_S, Driver, draft_freely, preset_of, prompt, running

pytestmark = pytest.mark.mlx
N_TRAINED = 96
N_TOKENS = 24
DYNAMIC = models.LLAMA | {
    "max_position_embeddings": N_TRAINED,
    "rope_scaling": {"type": "dynamic", "factor": 2.0},
}
INTERNLM3 = {
    "model_type": "internlm3", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
    "vocab_size": models.VOCAB, "bias": False, "qkv_bias": False, "rope_theta": 10000.0,
    "max_position_embeddings": N_TRAINED, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
}  # fmt: skip


@pytest.fixture(scope="module", params=[DYNAMIC, INTERNLM3], ids=["llama", "internlm3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write(tmp_path_factory.mktemp("models") / "model", request.param)


@pytest.fixture
def driver(folder: Path, tmp_path: Path) -> Iterator[Driver]:
    """Short chunks, so that every prompt is cut where mlx-lm does not cut it."""
    preset = preset_of(
        folder,
        slots=SlotSpec(count=3, n_ctx=4096),
        prefill=PrefillSpec(chunk_size=64),
        speculation=Speculation.AUTO,
    )
    with running(preset, tmp_path) as started:
        draft_freely(started)
        yield started


def alone(folder: Path, tokens: tuple[int, ...], n: int = N_TOKENS) -> list[int]:
    """Greedy tokens of mlx-lm."""
    model: Any = load_model(folder)[0]
    model.set_dtype(mx.float32)
    steps = generate_step(mx.array(tokens), model, max_tokens=n)
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("n", [7, 80, 97, 98, 150, 700, 2100])
def test_an_answer_is_that_of_mlx_lm_cold_again_and_with_drafts(
    driver: Driver, folder: Path, n: int
) -> None:
    tokens = prompt(n, seed=n)
    answer = alone(folder, tokens)
    assert driver.answer(tokens, N_TOKENS) == answer
    assert driver.answer(tokens, N_TOKENS) == answer
    assert driver.answer(tokens, N_TOKENS, prediction=tuple(answer)) == answer
    asked = [driver.submit(tokens, N_TOKENS, prediction=tuple(answer)) for _ in range(3)]
    for one in asked:
        driver.finish(one)
    assert [driver.tokens(one) for one in asked] == [answer] * 3


def test_the_next_turn_is_that_of_mlx_lm(driver: Driver, folder: Path) -> None:
    tokens = prompt(60, seed=1)
    for n in range(4):
        answer = driver.answer(tokens, N_TOKENS, agent="a")
        assert answer == alone(folder, tokens), n
        tokens = (*tokens, *answer, *prompt(20, seed=n))


def test_a_saved_slot_is_used_by_a_prompt_of_its_length_alone(driver: Driver, folder: Path) -> None:
    tokens = prompt(400, seed=3)
    driver.answer(tokens, 4, slot=0)
    driver.engine.run_slot_command(SaveSlot(0, "a.bin")).result(WAIT_S)
    driver.engine.run_slot_command(RestoreSlot(1, "a.bin")).result(WAIT_S)
    longer = (*tokens, *prompt(30, seed=4))
    assert driver.answer(longer, N_TOKENS, slot=1) == alone(folder, longer)
    assert driver.answer(tokens, N_TOKENS, slot=1) == alone(folder, tokens)


def test_prompts_of_one_length_and_those_within_the_trained_one_share_kv(tmp_path: Path) -> None:
    folder = models.write(tmp_path / "model", DYNAMIC)
    with running(preset_of(folder), tmp_path / "home") as driver:
        short = prompt(90, seed=5)
        long = prompt(400, seed=5)
        for tokens, n_cached in ((short, 90), (long, 400)):
            driver.answer(tokens, 4)
            again = driver.submit(tokens, 4)
            driver.finish(again)
            assert driver.seated(again).n_cached == n_cached
        longer = driver.submit((*long, 1), 4)
        driver.finish(longer)
        assert driver.seated(longer).n_cached == 0


def test_a_failed_prefill_leaves_no_length_for_rows_that_decode(folder: Path) -> None:
    model: Any = load_model(folder)[0]
    exact_ropes(model)
    runner = ModelRunner(model, rows=RowMode.ATTENTION_BY_ROW)
    contexts = [make_prompt_cache(model) for _ in range(4)]
    for caches in contexts:
        mx.eval(runner.execute([SlotTokens(caches, mx.array(prompt(150, seed=8)))]))
    rows = [SlotTokens(caches, mx.array([5])) for caches in contexts]
    logits = runner.execute(rows[:2])
    broken = SlotTokens([object()], mx.array(prompt(60, seed=9)), n_prefill=700)
    with pytest.raises(AttributeError):
        runner.execute([broken])
    assert mx.array_equal(runner.execute(rows[2:]), logits)
