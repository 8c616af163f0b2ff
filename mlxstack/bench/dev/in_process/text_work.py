"""Text work of a request, from template to block hashes."""

import time
from collections.abc import Callable
from random import Random
from typing import TypeVar

from mlxstack.bench.dev.trials import BenchResult, FollowUp, TrialSamples
from mlxstack.core.conversation import Conversation, Message, Role
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.engine.loading.loader import LoadedModel
from mlxstack.policy.kv import block_hash
from mlxstack.text.assembly import assemble_text
from mlxstack.text.prompt.prompt import PromptMaker

A = TypeVar("A")
T = TypeVar("T")

BLOCK = 128
N_WORDS = 400
"""Length of one message."""

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def follow_up(trial: FollowUp, loaded: LoadedModel) -> BenchResult:
    """Passes with a new history and an empty cache each."""
    times: dict[tuple[str, str], list[float]] = {}
    for seed in range(trial.passes):
        plain = assemble_text(loaded.tokenizer).prompt_maker
        history = _history(plain, Random(seed), trial.n_tokens)
        prompt_maker = assemble_text(loaded.tokenizer).prompt_maker
        for who, talk in (("scratch", history), ("next", _continued(history, Random(seed + 1)))):
            prompt, prompt_s = _timed(prompt_maker.make, talk)
            _, hash_s = _timed(_keys, prompt)
            times.setdefault((who, "prompt_s"), []).append(prompt_s)
            times.setdefault((who, "hash_s"), []).append(hash_s)
    return BenchResult(tuple(TrialSamples(*name, tuple(values)) for name, values in times.items()))


def _keys(prompt: PromptTokens) -> tuple[bytes, ...]:
    return block_hash.extend(block_hash.start(b"salt", BLOCK), prompt).keys


def _history(prompt_maker: PromptMaker, random: Random, n_tokens: int) -> Conversation:
    """Turns until about `n_tokens` are reached."""
    messages = [Message(Role.SYSTEM, _text(random))]
    n = 0
    while n < n_tokens:
        text = _text(random)
        n += len(prompt_maker.plain(text).tokens)
        role = Role.USER if len(messages) % 2 else Role.ASSISTANT
        messages.append(Message(role, text))
    if messages[-1].role is not Role.USER:
        messages.append(Message(Role.USER, _text(random)))
    return Conversation(tuple(messages))


def _continued(talk: Conversation, random: Random) -> Conversation:
    more = (Message(Role.ASSISTANT, _text(random)), Message(Role.USER, "And then?"))
    return Conversation((*talk.messages, *more))


def _text(random: Random) -> str:
    return " ".join(
        "".join(random.choices(LETTERS, k=random.randint(2, 9))) for _ in range(N_WORDS)
    )


def _timed(work: Callable[[A], T], argument: A) -> tuple[T, float]:
    began = time.perf_counter()
    done = work(argument)
    return done, time.perf_counter() - began
