"""Greedy tokens of real weights: from any KV, in any batch, those of the prompt cold and alone."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from msgspec import Struct

from mlxstack.core.preset import KVSpec, Speculation
from tests.real.asking import Asker, Comparison, Ids, asking, texts
from tests.real.folders import GEMMA, SMOLLM2, folder

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.slow]


class Size(Struct, frozen=True):
    """Tokens of prompts and answers, and of a long prompt; 0 for none.

    `n_texts` of the texts are prompts.
    """

    n_prompt: int
    n_answer: int
    n_long: int = 0
    n_texts: int = 4


SLICE = Size(72, 4, n_texts=2)
CASES = [
    pytest.param(SMOLLM2, {}, SLICE, id="smollm2-f32-slice"),
    pytest.param(SMOLLM2, {}, Size(400, 16, 2000), id="smollm2-f32", marks=pytest.mark.real),
    pytest.param(
        SMOLLM2, {"speculation": Speculation.AUTO}, Size(400, 24, 1000), id="smollm2-drafts",
        marks=pytest.mark.real,
    ),
    pytest.param(
        SMOLLM2, {"kv": KVSpec(bits=8)}, Size(300, 12, n_texts=2), id="smollm2-kv8",
        marks=pytest.mark.real,
    ),
    pytest.param(
        "smollm2-135m-bf16", {}, Size(300, 12), id="smollm2-bf16", marks=pytest.mark.real
    ),
    pytest.param(
        "smollm2-135m-8bit", {}, Size(140, 8, n_texts=2), id="smollm2-8bit", marks=pytest.mark.real
    ),
    pytest.param(
        "smollm2-135m-4bit", {}, Size(140, 8, n_texts=2), id="smollm2-4bit", marks=pytest.mark.real
    ),
    pytest.param(GEMMA, {}, Size(300, 12, 1700), id="gemma3-bf16", marks=pytest.mark.real),
]  # fmt: skip


@pytest.mark.parametrize(("name", "sections", "size"), CASES)
def test_every_path_gives_the_tokens_of_cold_and_alone(
    name: str, sections: dict[str, Any], size: Size, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    compared = Comparison(request.node.callspec.id)
    model = folder(name)
    verdicts = []
    with asking(model, tmp_path, **sections) as asker:
        passages = list(texts().values())[: size.n_texts]
        prompts = [asker.ids(text, size.n_prompt) for text in passages]
        walk = Walk(asker, compared, size.n_answer)
        for ids in prompts:
            verdicts += walk.alone(ids)
        verdicts += walk.batches(prompts)
        verdicts += walk.slot_file(prompts[0])
        if size.n_long:
            long = asker.ids(texts()["code"], size.n_long)
            verdicts += walk.alone(long) + walk.back(long, 700)
        followed = [walk.next_turn(ids) for ids in prompts]
        expected = [asker.cold(ids, size.n_answer) for ids in followed]
        for ids in followed:
            asker.answer(ids, size.n_answer)
    with asking(model, tmp_path, **sections) as asker:
        answers = [asker.answer(ids, size.n_answer) for ids in followed]
        assert all(answer.n_cached >= size.n_prompt for answer in answers)
        verdicts += compared.check("restart", [answer.tokens for answer in answers], expected)
    assert all(verdicts), f"{verdicts.count(False)} of {len(verdicts)} differ"


@pytest.mark.parametrize(
    ("n_texts", "n_prompt"), [(1, 60), pytest.param(4, 120, marks=pytest.mark.real)]
)
def test_float32_answers_are_those_of_mlx_lm(tmp_path: Path, n_texts: int, n_prompt: int) -> None:
    model = folder(SMOLLM2)
    theirs, _ = load_model(model)
    with asking(model, tmp_path) as asker:
        for text in list(texts().values())[:n_texts]:
            ids = asker.ids(text, n_prompt)
            expected = []
            cache = make_prompt_cache(theirs)
            fed = [*ids]
            for _ in range(6):
                logits = theirs(mx.array([fed]), cache=cache)[0, -1]
                fed = [int(mx.argmax(logits))]
                expected += fed
            same = Comparison("smollm2-f32").check(
                "mlx-lm", [asker.answer(ids, 6).tokens], [tuple(expected)]
            )
            assert same == [True]


class Walk:
    """Paths by which KV of a prompt is found again."""

    def __init__(self, asker: Asker, compared: Comparison, n_answer: int) -> None:
        self._asker = asker
        self._compared = compared
        self._n = n_answer
        self._answers: dict[Ids, Ids] = {}

    def next_turn(self, ids: Ids) -> Ids:
        """The prompt, its answer and some more tokens."""
        return ids + self._answers[ids] + ids[:20]

    def alone(self, ids: Ids) -> list[bool]:
        """First, hit, and next turn."""
        asker = self._asker
        n = self._n
        self._answers[ids] = expected = asker.cold(ids, n)
        first = asker.answer(ids, n)
        hit = asker.answer(ids, n)
        assert hit.n_cached >= len(ids) - 1
        following = self.next_turn(ids)
        cold = asker.cold(following, n)
        turn = asker.answer(following, n)
        assert turn.n_cached >= len(ids)
        return [
            *self._compared.check("first", [first.tokens], [expected]),
            *self._compared.check("hit", [hit.tokens], [expected]),
            *self._compared.check("next turn", [turn.tokens], [cold]),
        ]

    def back(self, ids: Ids, n_back: int) -> list[bool]:
        """A conversation that goes back by `n_back` tokens, and on from there."""
        fork = ids[: len(ids) - n_back] + ids[:10]
        expected = self._asker.cold(fork, self._n)
        self._asker.answer(ids, self._n)
        return self._compared.check("back", [self._asker.answer(fork, self._n).tokens], [expected])

    def batches(self, prompts: list[Ids]) -> list[bool]:
        """Hits and next turns of all prompts at once, and three forks of one."""
        asker = self._asker
        n = self._n
        hits = asker.together(prompts, n)
        turns = [self.next_turn(ids) for ids in prompts]
        colds = [asker.cold(ids, n) for ids in turns]
        followed = asker.together(turns, n)
        cut = 2 * len(prompts[0]) // 3
        forks = [prompts[0][:cut] + ids[:15] for ids in prompts[1:]]
        expected = [asker.cold(ids, n) for ids in forks]
        forked = asker.together(forks, n)
        hit = [self._answers[ids] for ids in prompts]
        return [
            *self._compared.check("batch of hits", [answer.tokens for answer in hits], hit),
            *self._compared.check("batch of turns", [answer.tokens for answer in followed], colds),
            *self._compared.check("forks at once", [answer.tokens for answer in forked], expected),
        ]

    def slot_file(self, ids: Ids) -> list[bool]:
        """Save, erase and restore a slot."""
        asker = self._asker
        n = self._n
        asker.answer(ids, n, id_slot=1)
        for action in ("save", "erase", "restore"):
            path = f"/slots/1?action={action}"
            body = {"filename": "real.bin"}
            asker.client.post(path, json=body).raise_for_status()
        answer = asker.answer(ids, n, id_slot=1)
        assert answer.n_cached >= len(ids) - 1
        return self._compared.check("slot file", [answer.tokens], [self._answers[ids]])
