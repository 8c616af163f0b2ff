# ruff: noqa: T201
"""Record answers that run to their limit, as token ids.

    python -m tests.features.loops.record MODEL_FOLDER NAME --temperature 0.8

Reads a model folder, answers the prompts below in batches, and writes `NAME-TEMPERATURE.json` with
those that had no end: {"model", "temperature", "answers": [[prompt ids, answer ids], ...]}. An
answer is not continued once it is degenerate, or shows no repetition after `--give-up` tokens. A
greedy repetition that has begun is continued in one pass, as with drafts: by the tokens that the
model would choose. `--plain` continues the prompts as texts, without the chat template.
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
from msgspec import Struct

from mlxstack.engine import device
from tests.features.loops.recorded import MIN_COPIES, MIN_TOKENS, final_copies

MAX_TOKENS = 1600
"""Tokens of an answer without an end."""
GIVE_UP = 448
BEGUN_COPIES = 4
BEGUN_TOKENS = 48
"""Copies of a repetition that may go on, and their tokens."""
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
    "mountains", "a red square", "rivers of Asia", "binary search trees", "musical instruments",
    "HTTP status codes", "the moons of Jupiter", "bank accounts", "matrix multiplication",
    "kitchen recipes", "chess openings", "Unix signals", "birds", "currency rates",
    "weather stations", "graph traversal", "country codes",
)  # fmt: skip
MORE_TOPICS = (
    "volcanoes", "planets", "trees", "metals", "dinosaurs", "fonts", "bridges", "spices",
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
    tasks = [task.format(topic) for task in TASKS for topic in TOPICS]
    more = [task.format(topic) for topic in MORE_TOPICS for task in TASKS]
    return [*PROMPTS, *tasks, *more]


class Recording(Struct, frozen=True):
    """Model, and how long its answers are continued."""

    model: Any
    tokenizer: Any
    temperature: float
    give_up: int

    def answers(self, ids: list[list[int]], n_rows: int) -> Iterator[tuple[list[int], list[int]]]:
        """Prompts and answers without an end, as token ids."""
        generator = self._generator(n_rows)
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
                prompt = prompt_of[response.uid]
                if response.finish_reason == "length":
                    yield prompt, answer
                elif self._is_decided(answer):
                    generator.remove([response.uid])
                    yield prompt, answer
                elif self.temperature == 0 and has_begun(answer):
                    generator.remove([response.uid])
                    yield prompt, continued(self.model, prompt, answer)
            if n_steps % 50 == 0:
                n = sum(map(len, answer_of.values()))
                print(f"{n} tokens", flush=True)

    def _generator(self, n_rows: int) -> Any:
        batches = importlib.import_module("mlx_lm.generate")
        temperature = self.temperature
        sampler = make_sampler(
            temp=temperature, top_p=0.95 if temperature else 0.0, top_k=40 if temperature else 0
        )
        return batches.BatchGenerator(
            self.model,
            stop_tokens=[[token] for token in self.tokenizer.eos_token_ids],
            max_tokens=MAX_TOKENS,
            sampler=sampler,
            completion_batch_size=n_rows,
            prefill_batch_size=n_rows,
        )

    def _is_decided(self, answer: list[int]) -> bool:
        """Whether more tokens would not show another kind of answer."""
        if len(answer) % LOOK_EVERY:
            return False
        if final_copies(answer) is not None:
            return True
        return len(answer) >= self.give_up and not has_begun(answer)


def has_begun(answer: list[int]) -> bool:
    """Whether an answer ends in copies that may go on."""
    if len(answer) % LOOK_EVERY:
        return False
    return final_copies(answer, BEGUN_COPIES, BEGUN_TOKENS) is not None


def continued(model: Any, prompt: list[int], answer: list[int]) -> list[int]:
    """Greedy answer, continued by copies as long as the model chooses them."""
    copies = final_copies(answer, BEGUN_COPIES, BEGUN_TOKENS)
    assert copies is not None
    n_wanted = copies.start + max(MIN_COPIES * copies.period, MIN_TOKENS)
    wanted = answer.copy()
    while len(wanted) < n_wanted:
        wanted.append(wanted[-copies.period])
    logits = model(mx.array([[*prompt, *wanted[:-1]]]))[0, len(prompt) + len(answer) - 1 :]
    chosen: Any = mx.argmax(logits, axis=-1).tolist()
    for token in chosen:
        answer = [*answer, token]
        if token != wanted[len(answer) - 1]:
            break
    return answer


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
    parser.add_argument("--skip", type=int, default=0, help="leave out the first prompts")
    parser.add_argument("--rows", type=int, default=24, help="answers at a time")
    parser.add_argument("--give-up", type=int, default=GIVE_UP, metavar="TOKENS")
    parser.add_argument("--plain", action="store_true", help="continue the prompts as texts")
    options = parser.parse_args()
    mx.random.seed(1)
    model, tokenizer = load(options.folder)[:2]
    if not device.has_gpu():
        # As in our engine: a CPU computes half precision slowly.
        model.set_dtype(mx.float32)
    texts = prompts()[options.skip :: options.every]
    name = options.name
    if not options.plain:
        ids = [chat_ids(tokenizer, text) for text in texts]
    else:
        ids = [list(tokenizer.encode(text)) for text in texts]
        name += "-plain"
    pairs: list[tuple[list[int], list[int]]] = []
    recording = Recording(model, tokenizer, options.temperature, options.give_up)
    for prompt, answer in recording.answers(ids, options.rows):
        pairs.append((prompt, answer))
        record = {"model": name, "temperature": options.temperature, "answers": pairs}
        path = Path(f"{name}-{options.temperature}.json")
        path.write_text(json.dumps(record, separators=(",", ":")))
        print(len(pairs), final_copies(answer), repr(tokenizer.decode(answer[-30:])), flush=True)


if __name__ == "__main__":
    main()
