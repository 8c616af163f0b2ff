"""Rows of a model's embedding and position tables.

MLX checks no index: a token or a position without a row reads what lies behind the table. The
tables are found by a forward pass that computes nothing but the indices that each table gets, so
no type of model is known by name.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache
from msgspec import Struct

from mlxstack.core.errors import SetupError
from mlxstack.engine.model.mlx_vlm_models import TextModel

TABLES = (nn.Embedding, nn.QuantizedEmbedding)
N_PROBED = 3
"""Tokens of the pass; the last one is beyond all rows where nothing is computed."""


class EmbeddingTables(Struct, frozen=True):
    """`n_rows` tokens have a row, of embedding and head; 0: unknown.

    `n_positions` is the length of a table of learned positions; 0: the model has none.
    """

    n_rows: int = 0
    n_positions: int = 0


def embedding_tables(model: Any) -> EmbeddingTables:
    """Rows of the tables of a model.

    Raises SetupError where the head has more rows than the embedding: it would sample tokens that
    cannot be read again.
    """
    tables = [module for _, module in model.named_modules() if isinstance(module, TABLES)]
    if not tables:
        return EmbeddingTables()
    # A model of mlx-vlm may compute in its pass, so its last token has a row.
    is_lazy = not isinstance(model, TextModel)
    last = max(map(_n_rows, tables)) if is_lazy else min(map(_n_rows, tables)) - 1
    tokens = [*range(N_PROBED - 2, -1, -1), last]
    try:
        with _recorded(tables) as indices:
            logits = model(mx.array([tokens]), cache=make_prompt_cache(model))
    except Exception:
        # A model that cannot run is refused by the self-check, in its words.
        return EmbeddingTables()
    token_rows: list[int] = []
    position_rows: list[int] = []
    for table, index in indices:
        row: Any = index.reshape(-1).tolist()
        if row == tokens:
            token_rows.append(_n_rows(table))
        elif _is_ascending(row) and len(row) == N_PROBED:
            position_rows.append(_n_rows(table) - row[0])
    n_sampled = int(logits.shape[-1])
    n_rows = min(token_rows, default=0)
    if 0 < n_rows < n_sampled:
        raise SetupError(
            f"the weights have {n_sampled} rows in the head and {n_rows} in the embedding, which "
            "do not belong together; choose another model"
        )
    return EmbeddingTables(min(n_rows, n_sampled), min(position_rows, default=0))


def _n_rows(table: Any) -> int:
    return int(table.weight.shape[0])


def _is_ascending(row: Sequence[int]) -> bool:
    return all(after == before + 1 for before, after in pairwise(row))


@contextmanager
def _recorded(tables: Sequence[Any]) -> Iterator[list[tuple[Any, mx.array]]]:
    """Record the indices that these tables get, in their order."""
    indices: list[tuple[Any, mx.array]] = []

    def recording(plain: type) -> type:
        def look_up(self: Any, index: mx.array) -> Any:
            indices.append((self, index))
            return plain.__call__(self, index)

        return type(plain.__name__, (plain,), {"__call__": look_up})

    classes = [type(table) for table in tables]
    try:
        for table, plain in zip(tables, classes, strict=True):
            table.__class__ = recording(plain)
        yield indices
    finally:
        for table, plain in zip(tables, classes, strict=True):
            table.__class__ = plain
