"""Forward passes that all ranks run alike."""

import zlib
from collections.abc import Sequence

import mlx.core as mx
import msgspec

from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.model.runner import ModelRunner, SlotTokens

MAX_LOGITS = 64
"""Tokens per slot of the longest pass whose logits are needed; drafts are shorter."""


def run_pass(
    runner: ModelRunner, contexts: Sequence[SlotContext], tokens: Sequence[Sequence[int]]
) -> mx.array:
    """Logits of a forward pass, evaluated; every rank evaluates the same collectives.

    Of a chunk of a prompt only the KV is evaluated: its logits are not needed, and many.
    """
    plan = [SlotTokens(c.caches, mx.array(list(t))) for c, t in zip(contexts, tokens, strict=True)]
    # Not the method of a subclass, which calls this function.
    logits = ModelRunner.execute(runner, plan)
    if sum(map(len, tokens)) <= MAX_LOGITS * len(tokens):
        mx.eval(logits)
    if any(len(ids) > 1 for ids in tokens):
        for context in contexts:
            context.evaluate()
    return logits


def digest_of(contexts: Sequence[SlotContext]) -> int:
    """Digest of the lengths of contexts and KV.

    It is the same for any layers of a rank.
    """
    lengths = [(len(c), max(getattr(leaf, "offset", 0) for leaf in c.leaves)) for c in contexts]
    return zlib.crc32(msgspec.msgpack.encode(lengths))
