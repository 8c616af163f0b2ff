"""Real weights with equal bits: answers alone and beside seven others."""

from pathlib import Path

import pytest

from mlxstack.core.exact_rows import ExactBits
from mlxstack.core.preset import BatchSpec, SlotSpec
from tests.real.asking import Comparison, asking
from tests.real.company import N_CLIENTS, compare, prompts_of
from tests.real.folders import GEMMA, folder

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.slow, pytest.mark.real]


@pytest.mark.parametrize(
    ("name", "n_tokens"), [("smollm2-135m-bf16", 32), ("smollm2-135m-8bit", 6), (GEMMA, 16)]
)
def test_answers_beside_others_are_those_alone(name: str, n_tokens: int, tmp_path: Path) -> None:
    batch = BatchSpec(exact=ExactBits.ON, max_size=N_CLIENTS)
    slots = SlotSpec(count=N_CLIENTS, n_ctx=1024)
    with asking(folder(name), tmp_path, batch=batch, slots=slots) as asker:
        exact = asker.client.get("/props").raise_for_status().json()["exact"]
        assert exact["is_on"], exact["reason"]
        counted = compare(asker, prompts_of(asker, N_CLIENTS, 0), n_tokens)
    total = [True] * counted.n
    cold = [i < counted.n_equal_cold for i in range(counted.n)]
    cached = [i < counted.n_equal_cached for i in range(counted.n)]
    compared = Comparison(name)
    assert all(compared.check("beside others", cold, total))
    assert all(compared.check("beside, cached", cached, total))
