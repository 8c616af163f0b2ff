"""The section of docs/models.md about types of mlx-vlm, drawn from rows and read back."""

import platform
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from mlxstack.policy.pass_layout import RowMode
from tests.matrix.examine import BATCHED
from tests.matrix.more_row import MoreRow

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEADING = "## Model types of mlx-vlm"
COLUMNS = (
    "type",
    "caches",
    "batched",
    "HTTP",
    "hit",
    "fork",
    "saved",
    "drafts",
    "8-bit KV",
    "why not",
)
BY_ROW = BATCHED[RowMode.ATTENTION_BY_ROW]
PROMISES = ("served", "hit", "fork", "stored")

ABOUT = """\
{heading}

Model types that mlx-lm has no file for, and mlx-vlm has: the extra `more-models` adds them
([installation](installation.md#more-model-types)). Text only: images are refused. This section is
written by `make models` (`python -m tests.matrix.more`); {versions}.

{counts}

* **batched**, **saved**: as above. **hit**, **fork**: going on with other tokens, in the slot or in
  a copy, *anywhere* or from *checkpoints*, answers as a cold start does.
* **HTTP**: tiny weights on disk, loaded and asked over HTTP: a second turn answers the same after
  the first, after a restart, and cold.
* **drafts**: several tokens of a row in a pass, some taken back.
* A type of which the last column says only what it makes instead of text was not run: that is
  read from mlx-vlm's folders.
* *FAILED*: the last column says how answers differ. A type is served all the same where it loads.
* `qwen4_exp` is compared with transformers 5.24 on tiny random weights, in float32 on a CPU
  (`tests/engine/test_qwen4_exp.py`): 300 tokens pass windows and sparse blocks many times, and
  logits agree within 1e-4 in one pass, cut, and after hit, fork and restart: one model at every
  position, two at every seventh. Of blocks with equal scores, zero in each head of the indexer,
  mlx-vlm takes the last ones and `torch.topk` others, so that logits differ there; transformers
  names no order. In a config.json without `output_gate_type` mlx-vlm takes `sigmoid`;
  transformers takes `hidden_act`, which is right. The config of Qwen3.8-Flash-Next names `sigmoid`.
"""


def counts(rows: Sequence[MoreRow]) -> str:
    """The section in one sentence."""
    return (
        f"{len(rows)} types: {sum(is_served(row) for row in rows)} answer over HTTP, "
        f"{sum(is_identical(row) for row in rows)} keep every promise before drafts, "
        f"{sum(row.batched in {'yes', BY_ROW} for row in rows)} are batched, "
        f"{sum(row.batched == BY_ROW for row in rows)} of them with attention by row."
    )


def is_served(row: MoreRow) -> bool:
    """Whether it answers over HTTP."""
    return row.served.startswith("yes")


def is_identical(row: MoreRow) -> bool:
    """Whether its answers are the same cold, in a batch, and after hit, fork and restart."""
    is_reused = all(getattr(row, name) not in {"", "no", "FAILED"} for name in PROMISES)
    return is_reused and is_served(row) and not row.faults


def line(row: MoreRow) -> str:
    """One line of the table."""
    cells = (
        row.name,
        row.caches,
        row.batched,
        row.served,
        row.hit,
        row.fork,
        row.stored,
        row.drafts,
        row.kv8,
        "; ".join(filter(None, (row.note, *row.faults))).replace("|", "\\|"),
    )
    return "| " + " | ".join(cell or "-" for cell in cells) + " |"


def cells(text: str) -> list[list[str]]:
    """The cells of each type in the section on the page `text`."""
    lines = [line for line in text.partition(HEADING)[2].splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [row for row in rows if len(row) == len(COLUMNS) and row[0] != COLUMNS[0]]


def page(rows: Sequence[MoreRow], text: str) -> str:
    """The page `text` with this section written anew at its end."""
    made_with = f"mlx {version('mlx')}, mlx-vlm {version('mlx-vlm')} on {platform.system()}"
    about = ABOUT.format(heading=HEADING, versions=made_with, counts=counts(rows))
    head = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    before = text.partition(HEADING)[0].rstrip()
    return "\n".join([before, "", about, *head, *map(line, rows), ""])
