"""The page docs/models.md, drawn from rows and read back."""

import platform
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from mlx_lm.utils import MODEL_REMAPPING

from mlxstack.policy.pass_layout import RowMode
from tests.matrix.examine import BATCHED, Row
from tests.matrix.products import product_table
from tests.matrix.reasons import REASONS

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BY_ROW = BATCHED[RowMode.ATTENTION_BY_ROW]
COLUMNS = ("type", "caches", "batched", "rewind", "saved", "8-bit KV", "why not")

BY_PRODUCT = re.compile(
    r"\| model \| type \| preset \|.*?^Not in mlx-lm yet:[^\n]*", re.DOTALL | re.MULTILINE
)

TYPES = """\
## Model types

Every model type that mlx-lm has a file for, built tiny with random weights and run through the
engine. This page is written by `make matrix` (`python -m tests.matrix`); {versions}.

{counts}

* **caches**: what mlx-lm keeps per layer: *full* KV, a *sliding* window, *chunked* KV, or a
  recurrent *state*; in brackets, several for one layer.
* **batched**: four rows of different length, past every window and joining one after the other,
  answer in one batch what each answers alone. *Attention by row*: the self-check at load finds that
  the row view does not fit; attention modules compute one row after the other, and all else of a
  layer sees all rows. *Slot by slot*: nor does that fit, and the service decodes one slot after the
  other. The answers are the same.
* **rewind**: going back and on with other tokens answers as a cold start does, *anywhere* or from
  *checkpoints*.
* **saved**: restored from bytes alone it goes on as if it had never stopped, and can be rewound.
* **8-bit KV**: all of that with the full KV quantized to 8 bits; *none*: there is no full KV. A
  preset that asks for it where it is *no* is refused at start.

Vision and audio towers are not built for this table; [images](images.md) names the families
that take images.
"""


def versions() -> str:
    """What the page was made with."""
    return f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')} on {platform.system()}"


def counts(rows: Sequence[Row]) -> str:
    """The page in one sentence."""
    batched = [row for row in rows if row.batched in {"yes", BY_ROW}]
    by_row = [row for row in batched if row.batched == BY_ROW]
    slow = [row for row in rows if row.batched == "slot by slot"]
    unbatched = [row for row in rows if not row.batched]
    return (
        f"{len(rows)} rows: {len(batched)} are batched, "
        f"{len(by_row)} of them with attention by row, "
        f"{len(slow)} are decoded slot by slot, {len(unbatched)} are not served on this machine."
    )


def line(row: Row) -> str:
    """One line of the table."""
    cells = (row.name, row.caches, row.batched, row.rewind, row.stored, row.kv8, reason(row))
    return "| " + " | ".join(cell or "-" for cell in cells) + " |"


def reason(row: Row) -> str:
    """Why something is not served, in words for people where we have them."""
    is_full = row.batched == "yes" and row.kv8 in {"yes", "none"}
    return "" if is_full else REASONS.get(row.name, row.note).replace("|", "\\|")


def cells_of_types(text: str) -> list[list[str]]:
    """The cells of each model type on the page `text`."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [row for row in rows if len(row) == len(COLUMNS) and row[0] != COLUMNS[0]]


def with_products(text: str) -> str:
    """The page `text` with its table by product written anew."""
    batched = {row[0]: row[2] for row in cells_of_types(text)}
    return BY_PRODUCT.sub(lambda _: product_table(batched), text)


def page(rows: Sequence[Row], text: str) -> str:
    """The page `text` with its table by product and its section of types written anew."""
    before, _, old = text.partition(TYPES.partition("\n")[0])
    _, heading, after = old.partition("\n## ")
    about = TYPES.format(versions=versions(), counts=counts(rows))
    head = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    names = [f"`{new}` is served as `{old}`" for new, old in sorted(MODEL_REMAPPING.items())]
    aliases = "Other names of these types: " + ", ".join(names) + "."
    types = "\n".join([about, *head, *map(line, rows), "", aliases, ""])
    return with_products(before + types + heading + after)
