"""Expected time of calls and repairs, from measured rates."""

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct

from mlxstack.cli.verification.tools.call_tasks import CallTask
from mlxstack.cli.verification.tools.chat_server import ChatServer
from mlxstack.text.tokens.cached_tokenizer import common_length

CHARS_OF_TOKEN = 3.0
"""Characters of JSON that a token has, about."""
N_PROSE = 24
"""Tokens of an answer beside its calls."""
N_MEASURED = 16
TURNS_OF_REPAIR = 5
PROMPT_OF_REPAIR = 900
"""New prompt tokens of a repair in all its turns."""
ANSWER_OF_REPAIR = 80
"""Tokens of one answer."""


class WorkRates(Struct, frozen=True):
    """Tokens per second of all requests at a time together."""

    prefill: float
    decode: float


def measured_rates(server: ChatServer, tasks: Sequence[CallTask], n_at_once: int) -> WorkRates:
    """Rates of a first prompt and of a batch of answers."""
    task = tasks[0]
    first = server.ask(task.messages, task.tools, 1)
    began = time.monotonic()
    with ThreadPoolExecutor(n_at_once) as pool:
        answers = pool.map(
            lambda _: server.ask(task.messages, task.tools, N_MEASURED), range(n_at_once)
        )
        n_generated = sum(answer.n_generated for answer in answers)
    return WorkRates(
        prefill=max(1, first.n_prompt - first.n_cached) / max(first.seconds, 1e-6),
        decode=max(1, n_generated) / max(time.monotonic() - began, 1e-6),
    )


def estimate_s(rates: WorkRates, tasks: Sequence[CallTask], n_repairs: int) -> float:
    """Seconds for all requests; shared beginnings of prompts count once."""
    n_prompt = n_repairs * float(PROMPT_OF_REPAIR)
    n_answer = n_repairs * float(TURNS_OF_REPAIR * ANSWER_OF_REPAIR)
    before = ""
    for task in tasks:
        text = json.dumps((task.tools, task.messages))
        n_shared = common_length(before, text)
        n_prompt += (len(text) - n_shared) / CHARS_OF_TOKEN
        calls = json.dumps([call.arguments for call in task.expected])
        n_answer += N_PROSE + len(calls) / CHARS_OF_TOKEN
        before = text
    return n_prompt / rates.prefill + n_answer / rates.decode
