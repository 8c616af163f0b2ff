"""Cases as tokens, through the same chat template that the service uses."""

import json
from functools import cache
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from mlxstack.demo import MODEL_DIR
from mlxstack.demo.training.copy_task import Sample
from mlxstack.demo.training.example import Case


@cache
def template() -> Any:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string((MODEL_DIR / "chat_template.jinja").read_text())


def render(case: Case, count: int, is_prompt: bool) -> str:
    """First `count` messages of a case; prompts open the next turn."""
    text: str = template().render(
        messages=case.messages[:count],
        tools=case.tools,
        add_generation_prompt=is_prompt,
        enable_thinking=case.thinks,
    )
    return text


def prompt_and_answer(case: Case) -> tuple[str, str]:
    """Prompt for the last message, and its expected generation."""
    last = len(case.messages) - 1
    prompt = render(case, last, is_prompt=True)
    opened = prompt.removesuffix("<think>\n") if case.thinks else prompt
    answer = render(case, last + 1, is_prompt=False)[len(opened) :].removesuffix("\n")
    if case.thinks:
        answer = f"{case.messages[last]['thought']}\n</think>\n\n{answer}"
    return prompt, answer


def answer_marks(tokens: list[int], opening: list[int], end: int) -> list[bool]:
    """Mask of assistant tokens, after `opening` up to `end`."""
    marks = []
    is_inside = False
    for position, token in enumerate(tokens):
        marks.append(is_inside)
        if is_inside and token == end:
            is_inside = False
        elif tokens[position - len(opening) + 1 : position + 1] == opening:
            is_inside = True
    return marks


def to_sample(case: Case, tokenizer: Tokenizer) -> Sample:
    """Tokens, and a mask of those to learn: all assistant turns."""
    prompt, answer = prompt_and_answer(case)
    opening = tokenizer.encode("<|im_start|>assistant\n").ids
    end: int = tokenizer.encode("<|im_end|>").ids[0]
    n_past = len(tokenizer.encode(prompt.rpartition("<|im_start|>")[0]).ids)
    asked = tokenizer.encode(prompt).ids
    answered = tokenizer.encode(answer).ids
    marks = answer_marks(asked[:n_past], opening, end) + [False] * (len(asked) - n_past)
    return asked + answered, marks + [True] * len(answered)
