"""Tokens to thoughts, words, calls and stops."""

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxstack.core.conversation import Tool, ToolCall
from mlxstack.core.engine_events import FinishReason
from mlxstack.core.response_parts import (
    AnswerPart,
    ArgumentsPart,
    ContentPart,
    ReasoningPart,
    ToolCallPart,
    ToolCallStarted,
)
from mlxstack.features.formats.output_format import OutputFormat
from mlxstack.features.formats.output_parser import OutputParser
from tests.text.tokenizer_kinds import kind_of

TOOLS = (Tool("read_file"), Tool("bash"))
CALL_TEXT = '<tool_call>\n{"name": "bash", "arguments": {"b": 1, "a": "x"}}\n</tool_call>'
EOS = FinishReason.EOS


def hear(
    tokenizer: Any, text: str, reason: FinishReason = EOS, **options: Any
) -> tuple[list[AnswerPart], OutputParser]:
    ids = itertools.count()
    speech = OutputParser(OutputFormat(tokenizer), lambda: f"call_{next(ids)}", **options)
    deltas = []
    for token in tokenizer.encode(text, add_special_tokens=False):
        deltas += speech.push(token)
    return deltas + speech.finish(reason), speech


def text_of(deltas: list[AnswerPart]) -> str:
    return "".join(d.text for d in deltas if isinstance(d, ContentPart))


def thoughts(deltas: list[AnswerPart]) -> str:
    return "".join(d.text for d in deltas if isinstance(d, ReasoningPart))


def calls(deltas: list[AnswerPart]) -> list[ToolCall]:
    found = (d for d in deltas if isinstance(d, ToolCallPart) and not d.is_cut)
    return [ToolCall(call.id, call.name, call.arguments) for call in found]


def test_b13_thoughts_are_apart(chatml: Any) -> None:
    deltas, speech = hear(chatml, "let me\n\nsee\n</think>\n\nyes", is_in_thinking=True)
    assert (thoughts(deltas), text_of(deltas)) == ("let me\n\nsee", "yes")
    assert 0 < speech.n_reasoning < len(chatml.encode("let me\n\nsee\n</think>\n\nyes"))


def test_thoughts_may_begin_in_the_answer(chatml: Any) -> None:
    deltas, _ = hear(chatml, "<think>\nhm\n</think>\n\nyes")
    assert (thoughts(deltas), text_of(deltas)) == ("hm", "yes")


def test_a34_empty_thoughts_and_line_breaks_say_nothing(chatml: Any) -> None:
    text = "\n\n</think>\n\n" + CALL_TEXT + "\n" + CALL_TEXT + "\n"
    deltas, _ = hear(chatml, text, tools=TOOLS, is_in_thinking=True)
    said = [type(d) for d in deltas if not isinstance(d, ArgumentsPart)]
    assert said == [ToolCallStarted, ToolCallPart] * 2


def test_a23_several_calls_among_words(chatml: Any) -> None:
    deltas, speech = hear(chatml, f"First.\n{CALL_TEXT}\n{CALL_TEXT}", tools=TOOLS)
    assert text_of(deltas) == "First."
    assert calls(deltas) == [
        ToolCall("call_0", "bash", {"b": 1, "a": "x"}),
        ToolCall("call_1", "bash", {"b": 1, "a": "x"}),
    ]
    assert speech.n_blocks == 2


def test_words_around_calls_stay_apart(chatml: Any) -> None:
    deltas, _ = hear(chatml, f"First.\n{CALL_TEXT}\n{CALL_TEXT}\n\nLast.", tools=TOOLS)
    assert text_of(deltas) == "First.\n\nLast."
    deltas, _ = hear(chatml, f"<think>Hm.\n</think>\nSo.\n{CALL_TEXT}\n<think>Ah.", tools=TOOLS)
    assert (thoughts(deltas), text_of(deltas)) == ("Hm.\nAh.", "So.")


def test_a_call_keeps_its_tokens_for_the_replay(chatml: Any) -> None:
    tokens = tuple(chatml.encode(CALL_TEXT, add_special_tokens=False))
    text = f"First.\n{CALL_TEXT}\n{CALL_TEXT}\nLast."
    _, speech = hear(chatml, text, tools=TOOLS)
    assert [block.tokens for block in speech.blocks] == [tokens, tokens]
    _, speech = hear(chatml, CALL_TEXT.removesuffix("</tool_call>"), tools=TOOLS)
    (block,) = speech.blocks
    assert (block.tokens, block.is_closed) == (tokens[:-1], False)


@pytest.mark.parametrize(
    "inside", ['{"name": "bash", "argu', "no json", "[1]", '{"arguments": {}}', '{"name": 3}', ""]
)
def test_a24_a_call_that_makes_no_sense_is_said(chatml: Any, inside: str) -> None:
    text = f"<tool_call>{inside}</tool_call>"
    deltas, speech = hear(chatml, text, tools=TOOLS)
    assert deltas == [ContentPart(text)]
    assert (speech.n_unparsed, speech.n_blocks) == (1, 0)


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.CONTEXT])
def test_a23u_a_cut_call_is_dropped(chatml: Any, reason: FinishReason) -> None:
    deltas, speech = hear(chatml, "So:\n" + CALL_TEXT[:-20], reason, tools=TOOLS)
    assert text_of(deltas) == "So:"
    assert not calls(deltas)
    assert speech.is_cut


def test_a_call_left_open_by_the_end_counts_if_it_makes_sense(chatml: Any) -> None:
    deltas, _ = hear(chatml, CALL_TEXT.removesuffix("</tool_call>"), tools=TOOLS)
    assert [c.name for c in calls(deltas)] == ["bash"]


def test_without_tools_a_call_is_text(chatml: Any) -> None:
    deltas, _ = hear(chatml, CALL_TEXT)
    assert text_of(deltas) == CALL_TEXT


def test_mistral_calls_have_no_end_marker(mistral: Any) -> None:
    text = '[TOOL_CALLS][{"name": "bash", "arguments": {}, "id": "abcdefghi"}]'
    deltas, _ = hear(mistral, text, tools=TOOLS)
    assert calls(deltas) == [ToolCall("abcdefghi", "bash", {})]
    whole, _ = hear(mistral, text, FinishReason.LENGTH, tools=TOOLS)
    assert calls(whole) == calls(deltas)


def test_harmony_channels_are_thoughts_words_and_calls(harmony: Any) -> None:
    thought = "<|channel|>analysis<|message|>hm <b><|end|>"
    answer = "<|start|>assistant<|channel|>final<|message|>yes<|return|>"
    call = "<|start|>assistant<|channel|>commentary to=functions.bash <|constrain|>json"
    call += '<|message|>{"a": 1}'
    said, speech = hear(harmony, thought + answer, tools=TOOLS)
    assert (thoughts(said), text_of(said)) == ("hm <b>", "yes")
    assert speech.n_reasoning > 0
    for ending in ("", "<|call|>"):
        called, _ = hear(harmony, thought + call + ending, tools=TOOLS)
        assert calls(called) == [ToolCall("call_0", "bash", {"a": 1})]
    cut, _ = hear(harmony, call[:-3], FinishReason.LENGTH, tools=TOOLS)
    assert cut[-1] == ToolCallPart("call_0", "bash", {}, "{", is_cut=True)
    cut, _ = hear(harmony, call[:-10], FinishReason.LENGTH, tools=TOOLS)
    assert cut == []
    untooled, _ = hear(harmony, call)
    assert text_of(untooled) == '{"a": 1}'


def test_a_harmony_answer_goes_on_in_the_channel_of_its_prefill(harmony: Any) -> None:
    before = tuple(harmony.encode("<|message|>Hello,", add_special_tokens=False))
    call = "<|end|><|start|>assistant<|channel|>commentary to=functions.bash <|message|>{}<|call|>"
    deltas, _ = hear(harmony, f" world{call}", tools=TOOLS, before=before)
    assert text_of(deltas) == " world"
    assert calls(deltas) == [ToolCall("call_0", "bash", {})]


@pytest.mark.parametrize("word", ["STOP", "brown fox", "\n\n", "x", "日本"])
def test_stop_words_may_span_tokens(chatml: Any, word: str) -> None:
    deltas, speech = hear(chatml, f"The quick {word} jumps {word}", stops=("zzz", word))
    assert text_of(deltas).strip() == "The quick"
    assert speech.stop == word


def test_what_only_begins_like_a_stop_word_is_said(chatml: Any) -> None:
    deltas, speech = hear(chatml, "The quick brown f", stops=("brown fox",))
    assert text_of(deltas) == "The quick brown f"
    assert speech.stop is None


def test_stop_words_do_not_count_in_thoughts_and_calls(chatml: Any) -> None:
    text = f"name</think>\n\n{CALL_TEXT}"
    deltas, _ = hear(chatml, text, tools=TOOLS, stops=("name",), is_in_thinking=True)
    assert thoughts(deltas) == "name"
    assert len(calls(deltas)) == 1


def test_special_tokens_never_leak(chatml: Any) -> None:
    deltas, _ = hear(chatml, "a<|im_start|>b<|endoftext|><|im_end|>")
    assert text_of(deltas) == "ab"


def test_a_padded_vocabulary_says_nothing(chatml: Any) -> None:
    speech = OutputParser(OutputFormat(chatml), str)
    assert speech.push(len(chatml) + 5) == []


def test_an_open_answer_keeps_its_leading_space(chatml: Any) -> None:
    before = tuple(chatml.encode("The quick", add_special_tokens=False))
    deltas, _ = hear(chatml, " brown", before=before)
    assert text_of(deltas) == " brown"


@pytest.mark.parametrize("is_raw", [False, True])
@pytest.mark.parametrize("end", ["Hello, ", "Hello,  ", "a\n\n ", "Hello,"])
def test_the_space_that_ends_a_prefill_is_not_said_again(
    chatml: Any, mistral: Any, end: str, is_raw: bool
) -> None:
    for tokenizer in (chatml, mistral):
        before = tuple(tokenizer.encode(end, add_special_tokens=False))
        deltas, _ = hear(tokenizer, "x", before=before, is_raw=is_raw)
        first = tokenizer.encode("x", add_special_tokens=False)
        said = tokenizer.decode([*before, *first]).removeprefix(tokenizer.decode(list(before)))
        assert text_of(deltas) == said


def test_raw_text_is_left_alone(chatml: Any) -> None:
    deltas, _ = hear(chatml, "\n <think>x</think> \n", is_raw=True)
    assert text_of(deltas) == "\n <think>x</think> \n"


def test_a_character_cut_in_half_is_unknown_at_the_end(chatml: Any) -> None:
    tokens = chatml.encode("ab日", add_special_tokens=False)
    speech = OutputParser(OutputFormat(chatml), str)
    deltas = [d for t in tokens[:-1] for d in speech.push(t)]
    assert text_of(deltas) == "ab"
    assert text_of(deltas + speech.finish(FinishReason.LENGTH)) == "ab\ufffd"


def test_a_token_beyond_a_hole_of_the_vocabulary_is_text() -> None:
    tokenizer = kind_of("bytes, sparse ids").tokenizer
    tokens = tokenizer.encode("Hello brave world", add_special_tokens=False)
    assert max(tokens) > len(tokenizer)
    speech = OutputParser(OutputFormat(tokenizer), str)
    deltas = [d for t in tokens for d in speech.push(t)] + speech.finish(FinishReason.LENGTH)
    assert text_of(deltas) == "Hello brave world"


def test_words_arrive_token_by_token(chatml: Any) -> None:
    speech = OutputParser(OutputFormat(chatml), str)
    tokens = chatml.encode("The quick brown fox jumps", add_special_tokens=False)
    heard = [bool(speech.push(token)) for token in tokens]
    assert sum(heard) > len(tokens) / 2


said = st.text(st.sampled_from("ab <>/|\n{}thinktool_call日é"), max_size=30)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said, said)
def test_no_text_is_lost(chatml: Any, thought: str, answer: str) -> None:
    markers = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    if any(marker in thought + answer for marker in markers):
        return
    deltas, _ = hear(chatml, f"{thought}</think>{answer}", tools=TOOLS, is_in_thinking=True)
    assert thoughts(deltas).strip() == thought.strip()
    assert text_of(deltas).strip() == answer.strip()


def test_two_calls_of_one_answer_never_share_an_id(mistral: Any) -> None:
    one = '{"name": "bash", "arguments": {}, "id": "abcdefghi"}'
    deltas, _ = hear(mistral, f"[TOOL_CALLS][{one}, {one}]", tools=TOOLS)
    assert [call.id for call in calls(deltas)] == ["abcdefghi", "call_0"]
