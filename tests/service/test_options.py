"""Whose word counts: the request's, the preset's, the model's, or nobody's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.api.request_fields import Fields, sampling
from mlxstack.core.errors import BadRequest, TooLong
from mlxstack.core.model_info import SamplingDefaults
from mlxstack.core.preset import SamplingSpec
from mlxstack.core.request import SamplingParams
from mlxstack.policy.default_sampling import default_sampling, described
from mlxstack.service.calls.admission import check, room
from mlxstack.service.parts.generation_options import GenerationOptions

N_CTX = 512
NOTHING = (default_sampling(SamplingSpec(), SamplingDefaults()), N_CTX)


def test_without_any_choice_the_defaults_are_those_of_llama_server() -> None:
    found = sampling(Fields(), *NOTHING)
    assert found == SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
    assert described(found) == "temperature 0.8, top_k 40, top_p 0.95, min_p 0.05"


@pytest.mark.parametrize(
    "preset, model, shown",
    [
        (SamplingSpec(temperature=0), SamplingDefaults(), "greedy"),
        (
            SamplingSpec(),
            SamplingDefaults(temperature=0.6, top_p=0.9),
            "temperature 0.6, top_p 0.9",
        ),
        (SamplingSpec(), SamplingDefaults(top_k=20), "temperature 1, top_k 20"),
        (
            SamplingSpec(),
            SamplingDefaults(temperature=0.0, repetition_penalty=1.1),
            "greedy, repetition_penalty 1.1",
        ),
    ],
)
def test_a_preset_or_card_that_chooses_one_field_chooses_all(
    preset: SamplingSpec, model: SamplingDefaults, shown: str
) -> None:
    assert described(default_sampling(preset, model)) == shown


def test_the_nearest_word_counts() -> None:
    model = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20)
    preset = SamplingSpec(temperature=0.0, top_p=0.8)
    found = sampling(Fields(top_p=0.7), default_sampling(preset, model), N_CTX)
    assert (found.temperature, found.top_p, found.top_k) == (0.0, 0.7, 20)


def test_a_word_of_zero_is_a_word() -> None:
    preset = SamplingSpec(temperature=0.7, top_k=40, min_p=0.1)
    defaults = default_sampling(preset, SamplingDefaults())
    found = sampling(Fields(temperature=0, top_k=0, min_p=0), defaults, N_CTX)
    assert (found.temperature, found.top_k, found.min_p) == (0.0, 0, 0.0)


def test_the_window_of_penalties_is_that_of_llama_server() -> None:
    wish = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    assert sampling(Fields(repeat_last_n=-1, **wish), *NOTHING).window == N_CTX
    assert sampling(Fields(repeat_last_n=10**9, **wish), *NOTHING).window == N_CTX
    off = sampling(Fields(repeat_last_n=0, **wish), *NOTHING)
    assert (off.repetition_penalty, off.presence_penalty, off.frequency_penalty) == (1, 0, 0)


@given(st.integers() | st.none())
def test_every_seed_fits_a_key(seed: int | None) -> None:
    found = sampling(Fields(seed=seed), *NOTHING).seed
    assert found is None if seed is None or seed < 0 else found is not None
    assert found is None or 0 <= found < 2**63


@given(
    st.builds(
        Fields,
        temperature=st.floats(allow_nan=False, allow_infinity=False) | st.none(),
        top_p=st.floats(0, 1) | st.none(),
        top_k=st.integers() | st.none(),
        min_p=st.floats(0, 1) | st.none(),
        repeat_last_n=st.integers() | st.none(),
    )
)
def test_whatever_was_wished_can_be_sampled(wish: Fields) -> None:
    found = sampling(wish, *NOTHING)
    assert found.temperature >= 0
    assert 0 < found.top_p <= 1
    assert found.top_k >= 0
    assert 1 <= found.window <= N_CTX


@given(st.integers(0, 100), st.integers(1, 200) | st.none())
def test_prompt_and_answer_fit_the_context(n_prompt: int, wished: int | None) -> None:
    found = room(n_prompt, wished, 101)
    assert 1 <= found <= (wished or 101)
    assert n_prompt + found <= 101


def test_a_prompt_that_leaves_no_room_is_too_long() -> None:
    with pytest.raises(TooLong) as refused:
        room(512, 1, 512)
    assert (refused.value.got, refused.value.limit) == (512, 512)


def test_slots_and_tokens_must_exist() -> None:
    n_slots = 3
    n_vocab = 100
    check(
        GenerationOptions("a", slot=2, sampling=SamplingParams(logit_bias=((99, 1.0),))),
        n_slots,
        n_vocab,
    )
    with pytest.raises(BadRequest, match="slots 0 to 2"):
        check(GenerationOptions("a", slot=3), n_slots, n_vocab)
    with pytest.raises(BadRequest, match="token 100"):
        check(
            GenerationOptions("a", sampling=SamplingParams(logit_bias=((100, 1.0),))),
            n_slots,
            n_vocab,
        )
