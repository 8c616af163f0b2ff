"""An MLX model whose logits follow a script; mlx-lm loads this file as the model's own code.

Everything but the choice of words is real. The tokens of a conversation are what its one layer
keeps as keys, so the model knows a conversation exactly as far as its KV cache does: after a hit,
a fork, a trim or a restart it says the next word of the script only if the cache is right.
"""

import json
import re
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import BaseModelArgs
from msgspec import Struct
from tokenizers import Tokenizer

OPENING = "<|im_start|>assistant\n"
END = 2
HORIZON = 200
"""Characters of an answer's rest that are encoded to find its next token."""


class ModelArgs(BaseModelArgs):
    """`script` is a list of {"when", "say", "think"?, "after"?}; the first `when` counts that is
    found in what was heard since the last answer.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.tokenizer = config["tokenizer"]
        self.script = config["script"]
        self.n_vocab = config["vocab_size"]

    @classmethod
    def from_dict(cls, params: dict[str, Any]) -> "ModelArgs":
        return cls(params)


class Line(Struct, frozen=True):
    """What is said when a pattern is found in what was heard since the last answer."""

    when: str
    say: str
    think: str = ""
    after: int | None = None
    """Answers before this one; None: any number."""


class Layer(nn.Module):
    """Keeps tokens; a dimension of 32 as attention heads have."""

    def __call__(self, tokens: mx.array, cache: Any) -> Any:
        keys = mx.broadcast_to(
            tokens.astype(mx.float32)[:, None, :, None], (*tokens.shape[:1], 1, tokens.shape[1], 32)
        )
        return keys if cache is None else cache.update_and_fetch(keys, keys)[0]


class Text:
    """Embeddings for images to replace; the model reads tokens, and placeholders for images."""

    @staticmethod
    def embed_tokens(tokens: mx.array) -> mx.array:
        """Nothing, in the shape of embeddings."""
        return mx.zeros((*tokens.shape, 32))


class Model(nn.Module):
    """Logits (B, L, vocabulary), of which the last position says the next token."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.model = Text()
        self.layers = [Layer()]
        self.scale = mx.ones((1,))
        self._tokenizer = Tokenizer.from_file(args.tokenizer)
        self._lines = [Line(**line) for line in args.script]

    def __call__(
        self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None
    ) -> mx.array:
        hidden = self.layers[0](inputs, cache[0] if cache else None)
        n_rows, length = inputs.shape
        rows = [self._logits(hidden[i].reshape(-1, 32)[:, 0]) for i in range(n_rows)]
        last = mx.stack(rows)[:, None]
        silent = mx.zeros((n_rows, length - 1, self.args.n_vocab))
        return mx.concatenate([silent, last], axis=1) * self.scale

    def _logits(self, hidden: mx.array) -> mx.array:
        tokens: Any = hidden.tolist()
        token = self._next([int(token) for token in tokens])
        return mx.where(mx.arange(self.args.n_vocab) == token, 30.0, 0.0)

    def _next(self, tokens: list[int]) -> int:
        text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        heard, opening, answer = text.rpartition(OPENING)
        whole = self._answer(heard, answer)
        if not opening or not whole.startswith(answer) or whole == answer:
            return END
        following = whole[len(answer) : len(answer) + HORIZON]
        return int(self._tokenizer.encode(following, add_special_tokens=False).ids[0])

    def _answer(self, heard: str, answer: str) -> str:
        latest = heard.rpartition(OPENING)[2]
        n_answers = heard.count(OPENING)
        matching = (
            line
            for line in self._lines
            if line.after in (None, n_answers) and re.search(line.when, latest, re.DOTALL)
        )
        line = next(matching, Line("", "Nothing to say."))
        thought = f"<think>\n{line.think}\n</think>\n" if answer.startswith("<think>") else ""
        return thought + line.say


def call(name: str, **arguments: Any) -> str:
    """A tool call as the demo tokenizer's family writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
