"""The section of types of mlx-vlm says something of every type, and no more than was run."""

from mlx_lm.utils import MODEL_REMAPPING

from tests.matrix import more_table
from tests.matrix.builder import model_types
from tests.matrix.more_configs import NOT_LANGUAGE

ASKED_FOR = ("qwen4_exp", "glm5_next", "step3p7", "k2_horizon", "inkling", "mimo_v2")
SERVED = 3
NOTE = -1


def lines() -> dict[str, list[str]]:
    return {row[0]: row for row in more_table.cells(more_table.PAGE.read_text(encoding="utf-8"))}


def test_a_type_that_is_not_served_in_full_says_why() -> None:
    for name, row in lines().items():
        is_full = row[SERVED] == "yes" and "FAILED" not in row and row[2] == "yes"
        assert is_full or row[NOTE] != "-", name


def test_mlx_lm_has_none_of_them_by_any_name() -> None:
    assert set(lines()).isdisjoint([*model_types(), *MODEL_REMAPPING])


def test_types_that_users_ask_for_answer_over_http() -> None:
    served = {name for name, row in lines().items() if row[SERVED].startswith("yes")}
    assert len(served) >= 30
    assert served >= set(ASKED_FOR)


def test_types_without_a_language_model_stand_in_the_table_with_their_reason() -> None:
    rows = lines()
    assert all(rows[name][NOTE] == reason for name, reason in NOT_LANGUAGE.items())


def test_the_section_stands_once_after_that_of_mlx_lm() -> None:
    text = more_table.PAGE.read_text(encoding="utf-8")
    assert text.count(f"{more_table.HEADING}\n") == 1
    assert text.partition(more_table.HEADING)[0].count("## Model types\n") == 1
