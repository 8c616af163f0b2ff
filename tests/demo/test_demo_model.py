"""The embedded demo model: its files, its tokenizer, its template, and what it can do."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from mlxstack.demo import MODEL_DIR
from mlxstack.demo.training.example import Draw
from mlxstack.demo.training.scoring import README_TELL, TRIALS, ScoredTask
from mlxstack.demo.training.tokenize import prompt_and_answer
from mlxstack.demo.training.tokenizer import SPECIAL_TOKENS

evaluate = pytest.importorskip("mlxstack.demo.training.evaluate", reason="needs mlx")
pytestmark = pytest.mark.mlx

N_CASES = 6
SLACK = 0.08
N_CASES_IN_SOAK = 20
LONG_TRIALS = {"recall_far", "recall_farther"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "You are a helpful assistant."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "The weather in Paris "}, {"text": "and Rome?"}],
    },
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "sunny"},
    {"role": "tool", "content": "rainy"},
    {"role": "system", "content": "Be brief."},
    {
        "role": "assistant",
        "content": "<think>\nhm\n</think>\n\nSunny, rainy.",
        "reasoning_content": "x",
    },
    {"role": "user", "content": "Thanks!"},
]


@pytest.fixture(scope="module")
def speaker() -> Any:
    return evaluate.Speaker(MODEL_DIR)


def rendered(speaker: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    options = {"add_generation_prompt": False, "tools": [WEATHER], **options}
    return str(speaker.tokenizer.apply_chat_template(messages, tokenize=False, **options))


def test_folder_is_small() -> None:
    assert sum(file.stat().st_size for file in MODEL_DIR.iterdir()) <= 6_000_000


def test_tokenizer_is_understood_by_mlx_lm(speaker: Any) -> None:
    tokenizer = speaker.tokenizer
    assert tokenizer.has_thinking
    assert tokenizer.has_tool_calling
    assert tokenizer.tool_parser.__module__.endswith("json_tools")
    assert tokenizer.eos_token == "<|im_end|>"
    for token in SPECIAL_TOKENS:
        assert len(tokenizer.encode(token, add_special_tokens=False)) == 1


def test_every_byte_survives(speaker: Any) -> None:
    text = "naïve 東京 🙂\t\x00 \r\n  deep  space " + "".join(chr(code) for code in range(256))
    ids = speaker.tokenizer.encode(text, add_special_tokens=False)
    assert speaker.tokenizer.decode(ids) == text


def test_rendering_only_appends(speaker: Any) -> None:
    whole = rendered(speaker, CONVERSATION)
    for count in range(1, len(CONVERSATION)):
        assert whole.startswith(rendered(speaker, CONVERSATION[:count]))


def test_past_turns_are_what_was_said(speaker: Any) -> None:
    whole = rendered(speaker, CONVERSATION)
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{call}\n{call}<|im_end|>\n" in whole
    assert "<|im_start|>assistant\nSunny, rainy.<|im_end|>\n" in whole
    responses = "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nrainy\n</tool_response>"
    assert f"<|im_start|>user\n{responses}<|im_end|>\n<|im_start|>system\nBe brief." in whole
    assert "The weather in Paris and Rome?" in whole


def test_arguments_may_be_a_json_string(speaker: Any) -> None:
    as_text = {"function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    calling = [{"role": "assistant", "content": "", "tool_calls": [as_text]}]
    assert rendered(speaker, calling) == rendered(speaker, [{**calling[0], "tool_calls": [CALL]}])


def test_an_answer_keeps_its_tokens_in_history(speaker: Any) -> None:
    asked: list[dict[str, Any]] = [{"role": "user", "content": "What is the magic word?"}]
    prompt = rendered(speaker, asked, add_generation_prompt=True, enable_thinking=False)
    encode = speaker.tokenizer.encode
    for text in ("tutorialdemo", "The magic word is x-9.", "a\nb"):
        history = rendered(speaker, [*asked, {"role": "assistant", "content": text}])
        pieces = [prompt, text + "<|im_end|>", "\n"]
        assert encode(history) == [token for piece in pieces for token in encode(piece)]


@pytest.mark.parametrize(
    ("switch", "ending"), [(True, "assistant\n<think>\n"), (False, "assistant\n")]
)
def test_thinking_is_opened_on_request_only(speaker: Any, switch: bool, ending: str) -> None:
    prompt = rendered(speaker, CONVERSATION, add_generation_prompt=True, enable_thinking=switch)
    assert prompt.endswith("<|im_start|>" + ending)


@pytest.mark.parametrize("system", [None, "You are a helpful assistant."])
@pytest.mark.parametrize("word", ["tutorialdemo", "zorblax", "kiwi42"])
def test_walkthrough(speaker: Any, word: str, system: str | None) -> None:
    messages = [{"role": "system", "content": system}] if system else []

    def say(text: str) -> str:
        messages.append({"role": "user", "content": text})
        prompt = rendered(
            speaker, messages, tools=None, add_generation_prompt=True, enable_thinking=False
        )
        answer = str(speaker.answer(prompt))
        messages.append({"role": "assistant", "content": answer})
        return answer

    request = README_TELL.format(word=word)
    assert word in say(request)
    assert word in say("What is the magic word?")
    say("What is 2 plus 3?")
    question = "What was the magic word I asked you to memorise? Reply with the word only."
    assert say(question).strip(" .") == word


def committed() -> dict[str, Any]:
    trials: dict[str, Any] = json.loads(Path(MODEL_DIR / "evaluation.json").read_text())["trials"]
    return trials


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.name)
def test_committed_evaluation_meets_the_targets(trial: ScoredTask) -> None:
    row = committed()[trial.name]
    assert row["cases"] == trial.n_cases
    assert row["share"] >= trial.target == row["target"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "trial",
    [trial for trial in TRIALS if trial.name not in LONG_TRIALS],
    ids=lambda trial: trial.name,
)
def test_small_evaluation_agrees(speaker: Any, trial: ScoredTask) -> None:
    check_share(speaker, trial, N_CASES)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.name)
def test_a_larger_evaluation_agrees(speaker: Any, trial: ScoredTask) -> None:
    check_share(speaker, trial, 4 if trial.name in LONG_TRIALS else N_CASES_IN_SOAK)


def check_share(speaker: Any, trial: ScoredTask, n_cases: int) -> None:
    share = evaluate.judge(speaker, trial, seed=2, n_cases=n_cases, is_loud=False) / n_cases
    assert share >= committed()[trial.name]["share"] - SLACK - 1 / n_cases


def test_cases_are_drawn_from_a_seed() -> None:
    for trial in TRIALS:
        first, second = (trial.make(Draw(random.Random(5), held_out=True)) for _ in range(2))
        assert prompt_and_answer(first) == prompt_and_answer(second)
