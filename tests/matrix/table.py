"""The page docs/models.md, drawn from rows and read back."""

import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from mlx_lm.utils import MODEL_REMAPPING

from tests.matrix.examine import Row
from tests.matrix.products import product_table
from tests.matrix.reasons import REASONS

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
COLUMNS = ("type", "caches", "batched", "rewind", "saved", "8-bit KV", "why not")

ABOUT = """\
# Models

Any model of these types is served by its hub id or folder: `mlx-stack up ORG/NAME`. A preset says
more than the planner knows: sampling of the model's card, and switches of its template.

{products}

## Multi-token prediction heads

With `speculation: auto` and no `model.draft`, the MTP head of a checkpoint drafts for all slots;
the output stays the same. `/props` and the dashboard then name `MTP head` as the draft model.
Heads are read from any safetensors file of the model's folder:

| model type | tensors |
| --- | --- |
| `qwen3_next`, `qwen3_5`, `qwen3_5_moe` | `mtp.*` |
| `glm4_moe`, `glm4_moe_lite`, `deepseek_v3` | `model.layers.N.*`, N being the number of layers |

Conversions by mlx-lm drop these tensors. `model.mtp` of a preset names the checkpoint that a model
was converted from: of that one only the weight files of its head are downloaded, and the head gets
the quantization of the model. No published head was measured here.

```sh
mlx-stack up mlx-community/Qwen3.6-27B-4bit --set model.mtp=Qwen/Qwen3.6-27B --set speculation=auto
```

## Draft models

`mlx-stack up MODEL --draft SMALL` (in a preset `model.draft` and `speculation: auto`) loads a small
model of the same vocabulary that drafts tokens; the output stays the same. Published siblings, as
suggestions that were not measured here; the vocabulary is compared at load:

| model | draft model |
| --- | --- |
| Qwen3.6 35B-A3B, Qwen3.6 27B, Qwen3.5 9B | Qwen3.5 0.8B |
| Qwen3-Coder 30B-A3B, Qwen3 | Qwen3 0.6B |
| Devstral Small 2 | Mistral Small 3.1 DRAFT 0.5B |
| GPT-OSS 120B | GPT-OSS 20B |
| Llama 3.1 and 3.3, 8B and 70B | Llama 3.2 1B |

Models with few active parameters gain least: a pass of theirs is hardly slower than one of the
draft model.

## Model types

Every model type that mlx-lm has a file for, built tiny with random weights and run through the
engine. This page is written by `make matrix` (`python -m tests.matrix`); {versions}.

{counts}

* **caches**: what mlx-lm keeps per layer: *full* KV, a *sliding* window, *chunked* KV, or a
  recurrent *state*; in brackets, several for one layer.
* **batched**: four rows of different length, past every window and joining one after the other,
  answer in one batch what each answers alone. *Slot by slot*: the self-check at load finds that
  the row view does not fit, and the service decodes one slot after the other; same answers.
* **rewind**: going back and on with other tokens answers as a cold start does, *anywhere* or from
  *checkpoints*.
* **saved**: restored from bytes alone it goes on as if it had never stopped, and can be rewound.
* **8-bit KV**: all of that with the full KV quantized to 8 bits; *none*: there is no full KV. A
  preset that asks for it where it is *no* is refused at start.

Vision and audio towers are not built: mlx-lm serves the language model of such types.
"""


def versions() -> str:
    """What the page was made with."""
    return f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')} on {platform.system()}"


def counts(rows: Sequence[Row]) -> str:
    """The page in one sentence."""
    batched = [row for row in rows if row.batched == "yes"]
    slow = [row for row in rows if row.batched == "slot by slot"]
    rest = [row for row in rows if not row.batched]
    return (
        f"{len(rows)} rows: {len(batched)} are batched, {len(slow)} are decoded slot by slot, "
        f"{len(rest)} are not served on this machine."
    )


def line(row: Row) -> str:
    """One line of the table."""
    cells = (row.name, row.caches, row.batched, row.rewind, row.stored, row.kv8, reason(row))
    return "| " + " | ".join(cell or "-" for cell in cells) + " |"


def reason(row: Row) -> str:
    """Why something is not served, in words for people where we have them."""
    is_full = row.batched == "yes" and row.kv8 in {"yes", "none"}
    return "" if is_full else REASONS.get(row.name, row.note).replace("|", "\\|")


def page(rows: Sequence[Row]) -> str:
    """The whole page."""
    batched = {row.name: row.batched or "not here" for row in rows}
    about = ABOUT.format(products=product_table(batched), versions=versions(), counts=counts(rows))
    head = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    names = [f"`{new}` is served as `{old}`" for new, old in sorted(MODEL_REMAPPING.items())]
    other = "Other names of these types: " + ", ".join(names) + "."
    return "\n".join([about, *head, *map(line, rows), "", other, ""])
