# ruff: noqa: T201
"""Record answers that run to their limit, as token ids.

    python -m tests.features.loops.record MODEL_FOLDER NAME --temperature 0.8

Reads a model folder, answers the prompts below in batches, and writes `NAME-TEMPERATURE.json` with
those that had no end: {"model", "temperature", "answers": [[prompt ids, answer ids], ...]}.
"""

import argparse
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import load
from mlx_lm.sample_utils import make_sampler

from mlxstack.engine import device

MAX_TOKENS = 1000
"""Tokens of an answer without an end."""
MIN_LOOP = 560
"""Tokens of an exact repetition, four copies at least, after which an answer is not continued."""
ROWS = 80

TASKS = (
    "Write a Python function that {}, with tests.",
    "List 500 {} as CSV.",
    "Explain {} step by step, in great detail.",
    "Write a very long poem about {}.",
    "Write a JSON array with 200 objects about {}.",
    "Write an HTML table about {} with 100 rows.",
)
TOPICS = (
    "parses dates", "prime numbers", "sorts linked lists", "European capitals",
    "colours as hex codes", "SQL joins", "unit tests of a queue", "regular expressions",
    "mountains", "a red square",
)  # fmt: skip
PROMPTS = (
    "Say hello forever.",
    "Repeat the word 'ok' until I stop you.",
    "What do you see?",
    "Write base64 of a large file.",
    "Draw a map of a maze with ASCII characters, 80 columns and 200 lines.",
    "Print the output of a test run with 1000 passing tests.",
    "Write an SVG with a path of 500 points.",
    "Fix this bug: for i in range(10): print(i",
    "Write a Makefile with 100 targets.",
    "Write a log file of a web server, 300 lines.",
    "Count from 1 to 1000.",
    "Write pi to 1000 digits.",
    "Write the multiplication tables up to 20.",
    "Translate 'good morning' into fifty languages.",
    "Write a C header with 200 constants.",
    "Write a hexdump of 4096 bytes of zeros.",
    "Think about whether 7 is prime. Think again. Then answer.",
    "I edited the file, but the test still fails. What now?",
    "Call the tool read_file with path main.py, then call it again.",
    "Write a licence header for fifty files.",
)


def prompts() -> list[str]:
    """The prompts, in their order."""
    return [*PROMPTS, *(task.format(topic) for task in TASKS for topic in TOPICS)]


def answers(
    model: Any, tokenizer: Any, texts: list[str], temperature: float
) -> Iterator[tuple[list[int], list[int]]]:
    """Prompts and answers without an end, as token ids."""
    batches = importlib.import_module("mlx_lm.generate")
    sampler = make_sampler(
        temp=temperature, top_p=0.95 if temperature else 0.0, top_k=40 if temperature else 0
    )
    generator = batches.BatchGenerator(
        model,
        stop_tokens=[[token] for token in tokenizer.eos_token_ids],
        max_tokens=MAX_TOKENS,
        sampler=sampler,
        completion_batch_size=ROWS,
        prefill_batch_size=ROWS,
    )
    ids = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True
        )
        for text in texts
    ]
    prompt_of = dict(zip(generator.insert(ids), ids, strict=True))
    answer_of: dict[int, list[int]] = {uid: [] for uid in prompt_of}
    n_steps = 0
    while responses := generator.next_generated():
        n_steps += 1
        for response in responses:
            answer = answer_of[response.uid]
            if response.finish_reason != "stop":
                answer.append(response.token)
            is_looping = len(answer) % 16 == 0 and repeats(answer)
            if is_looping and response.finish_reason is None:
                generator.remove([response.uid])
            if is_looping or response.finish_reason == "length":
                yield prompt_of[response.uid], answer
        if n_steps % 50 == 0:
            n = sum(map(len, answer_of.values()))
            print(f"{n} tokens", flush=True)


def repeats(answer: list[int]) -> bool:
    """Whether an exact repetition has gone on for long."""
    for period in range(1, len(answer) // 4 + 1):
        n = max(4 * period, MIN_LOOP)
        if n > len(answer):
            return False
        if answer[-n:-period] == answer[period - n :]:
            return True
    return False


def main() -> None:
    """Record one model at one temperature."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("name")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--every", type=int, default=1, help="answer each n-th prompt only")
    options = parser.parse_args()
    mx.random.seed(1)
    model, tokenizer = load(options.folder)[:2]
    if not device.has_gpu():
        # As in our engine: a CPU computes half precision slowly.
        model.set_dtype(mx.float32)
    texts = prompts()[:: options.every]
    pairs: list[tuple[list[int], list[int]]] = []
    for prompt, answer in answers(model, tokenizer, texts, options.temperature):
        pairs.append((prompt, answer))
        record = {"model": options.name, "temperature": options.temperature, "answers": pairs}
        path = Path(f"{options.name}-{options.temperature}.json")
        path.write_text(json.dumps(record, separators=(",", ":")))
        print(len(pairs), repr(tokenizer.decode(answer[-30:])), flush=True)


if __name__ == "__main__":
    main()
