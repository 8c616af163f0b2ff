"""The types that people use most, examined anew; the page of all types agrees with them."""

from importlib.metadata import version

import pytest
from mlx_lm.utils import MODEL_REMAPPING

from mlxstack.config.presets import builtin_folder
from tests.matrix import products, table
from tests.matrix.builder import model_types
from tests.matrix.configs import VARIANTS
from tests.matrix.examine import Row, examine
from tests.matrix.reasons import NO_METAL, REASONS
from tests.repetition import in_soak

SUBSET = ("llama", "gpt_oss", "qwen3_next", "deepseek_v3")
MORE = (
    "qwen2",
    "qwen3",
    "qwen3_moe, 4-bit weights",
    "gemma3_text",
    "gemma3n",
    "gemma4_text, shared KV",
    "falcon_h1",
    "lfm2",
    "llama4",
)


def lines() -> list[list[str]]:
    """The cells of every model type on the committed page."""
    return table.cells_of_types(table.PAGE.read_text(encoding="utf-8"))


@pytest.mark.mlx
@pytest.mark.parametrize("name", [*SUBSET, *in_soak(*MORE)])
def test_z12_it_is_served_as_the_page_says(name: str) -> None:
    row = examine(name)
    assert row.faults == ()
    assert table.line(row) in table.PAGE.read_text().splitlines()


def test_z12_the_page_was_made_with_the_versions_installed_here() -> None:
    made_with = f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"
    assert made_with in table.PAGE.read_text(), "run `make matrix`"


def test_z12_the_page_lists_every_type_of_mlx_lm() -> None:
    assert {row[0] for row in lines()} == {*model_types(), *VARIANTS}


def test_z11_the_page_gives_a_reason_for_everything_not_served_in_full() -> None:
    short = {row[0] for row in lines() if row[2] != "yes" or row[5] not in {"yes", "none"}}
    without_metal = {name for name, reason in REASONS.items() if reason == NO_METAL}
    assert set(REASONS) - without_metal <= short <= set(REASONS)


def test_a_new_page_keeps_what_is_not_drawn() -> None:
    text = table.PAGE.read_text(encoding="utf-8")
    rows = [Row(name=row[0], caches=row[1], batched=row[2]) for row in lines()]
    cut = text.replace("| Llama 3, SmolLM2 |", "| Llama |")
    before, new = (
        page_text.partition("## Model types")[0] for page_text in (text, table.page(rows, cut))
    )
    assert new == before


def test_the_table_by_product_names_types_of_mlx_lm_and_listed_presets() -> None:
    batched = {row[0]: row[2] for row in lines()}
    assert products.product_table(batched) in table.PAGE.read_text(encoding="utf-8")
    assert set(products.NOT_YET.values()).isdisjoint([*model_types(), *MODEL_REMAPPING])
    presets = products.presets_by_type().values()
    named = {name.strip("`") for names in presets for name in names}
    shipped = {file.stem for file in builtin_folder().glob("*.yaml")}
    assert shipped - named == {"demo", "demo-embedding"}
    assert named <= shipped
