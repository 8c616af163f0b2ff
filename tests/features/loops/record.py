# ruff: noqa: T201
"""Record answers that run to their limit, as token ids.

    python -m tests.features.loops.record MODEL_FOLDER NAME --temperature 0.8

Reads a model folder, answers the prompts below in batches, and writes `NAME-TEMPERATURE.json` with
those that had no end: {"model", "temperature", "answers": [[prompt ids, answer ids], ...]}. An
answer is not continued once it is degenerate, or shows no repetition after `MIN_ANSWER` tokens.
`--plain` continues the prompts as texts, without the chat template.
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
from tests.features.loops.recorded import final_copies

MAX_TOKENS = 1600
"""Tokens of an answer without an end."""
MIN_ANSWER = 448
MIN_BEGUN = 48
"""Tokens of a repetition that may go on."""
LOOK_EVERY = 16

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
    model: Any, tokenizer: Any, ids: list[list[int]], temperature: float, n_rows: int
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
        completion_batch_size=n_rows,
        prefill_batch_size=n_rows,
    )
    prompt_of = dict(zip(generator.insert(ids), ids, strict=True))
    answer_of: dict[int, list[int]] = {uid: [] for uid in prompt_of}
    n_steps = 0
    while responses := generator.next_generated():
        n_steps += 1
        for response in responses:
            answer = answer_of[response.uid]
            if response.finish_reason == "stop":
                continue
            answer.append(response.token)
            is_over = response.finish_reason == "length"
            if not is_over and is_decided(answer):
                generator.remove([response.uid])
                is_over = True
            if is_over:
                yield prompt_of[response.uid], answer
        if n_steps % 50 == 0:
            n = sum(map(len, answer_of.values()))
            print(f"{n} tokens", flush=True)


def is_decided(answer: list[int]) -> bool:
    """Whether more tokens would not show another kind of answer."""
    if len(answer) % LOOK_EVERY:
        return False
    if final_copies(answer) is not None:
        return True
    return len(answer) >= MIN_ANSWER and final_copies(answer, 3, MIN_BEGUN) is None


def chat_ids(tokenizer: Any, text: str) -> list[int]:
    """Prompt of one message."""
    message = {"role": "user", "content": text}
    return list(tokenizer.apply_chat_template([message], add_generation_prompt=True))


def main() -> None:
    """Record one model at one temperature."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("name")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--every", type=int, default=1, help="answer each n-th prompt only")
    parser.add_argument("--rows", type=int, default=24, help="answers at a time")
    parser.add_argument("--plain", action="store_true", help="continue the prompts as texts")
    options = parser.parse_args()
    mx.random.seed(1)
    model, tokenizer = load(options.folder)[:2]
    if not device.has_gpu():
        # As in our engine: a CPU computes half precision slowly.
        model.set_dtype(mx.float32)
    texts = prompts()[:: options.every]
    ids = [chat_ids(tokenizer, text) for text in texts]
    name = options.name
    if options.plain:
        ids = [list(tokenizer.encode(text)) for text in texts]
        name += "-plain"
    pairs: list[tuple[list[int], list[int]]] = []
    for prompt, answer in answers(model, tokenizer, ids, options.temperature, options.rows):
        pairs.append((prompt, answer))
        record = {"model": name, "temperature": options.temperature, "answers": pairs}
        path = Path(f"{name}-{options.temperature}.json")
        path.write_text(json.dumps(record, separators=(",", ":")))
        print(len(pairs), repr(tokenizer.decode(answer[-30:])), flush=True)


if __name__ == "__main__":
    main()
