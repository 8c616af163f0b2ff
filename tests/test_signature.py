"""What style promises in numbers holds for every file and function."""

import tomllib
from pathlib import Path

import pytest

from tests.signature import (
    NOT_IN_THE_WHEEL,
    PACKAGE,
    ROOT,
    Signature,
    code_lines,
    measure,
    percentile,
)

MAX_LONG_SUMMARIES = 112
"""First lines of docstrings that are longer than the style page allows."""


@pytest.fixture(scope="module")
def house() -> Signature:
    return measure()


def test_functions_fit_a_glance(house: Signature) -> None:
    assert percentile(house.functions, 0.9) <= 35
    assert house.functions[-1] <= 60, house.longest_function


def test_files_are_short(house: Signature) -> None:
    assert house.files[-1] <= 600, house.longest_file


def test_public_functions_are_annotated(house: Signature) -> None:
    assert house.bare == ()


def test_no_two_classes_share_a_name(house: Signature) -> None:
    assert house.same_class_names == ()


def test_docstrings_begin_with_a_short_line(house: Signature) -> None:
    # The limit only ever falls.
    assert len(house.long_summaries) <= MAX_LONG_SUMMARIES, "\n".join(house.long_summaries)


def test_docstrings_name_things_in_american_english(house: Signature) -> None:
    assert house.badly_worded == ()


def test_folders_left_out_of_the_wheel_are_not_counted() -> None:
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))
    excluded = project["tool"]["hatch"]["build"]["targets"]["wheel"]["exclude"]
    assert [f"{PACKAGE}/{folder}" for folder in NOT_IN_THE_WHEEL] == excluded


def test_no_import_cycle(house: Signature) -> None:
    assert house.cycle == ()


def test_no_room_imports_one_above_it(house: Signature) -> None:
    assert house.circles == ()


def test_the_measure_finds_what_it_looks_for(tmp_path: Path) -> None:
    room = tmp_path / "mlxstack"
    room.mkdir()
    (room / "__init__.py").touch()
    (room / "one.py").write_text("from mlxstack import two\n\n\ndef bare(x):\n    return x\n")
    (room / "two.py").write_text("import mlxstack.one\n" + "x = 1\n" * 400)
    for name in ("three", "four"):
        (room / f"{name}.py").write_text("class Same:\n    pass\n")
    for name, text in (
        ("long", "One two three four five six seven eight nine ten eleven twelve thirteen."),
        ("what", "What is kept."),
        ("people", "Nobody reads it."),
        ("british", "Optimised."),
        ("good", "Keep it: organic, optimistic, colorful."),
    ):
        (room / f"{name}.py").write_text(f'"""{text}"""\n')
    found = measure(room)
    assert found.bare == ("mlxstack.one.bare",)
    assert set(found.cycle) == {"mlxstack.one", "mlxstack.two"}
    assert found.same_class_names == ("Same",)
    assert found.files[-1] == 401
    assert [line.partition(":")[0] for line in found.long_summaries] == ["mlxstack.long"]
    assert {line.partition(":")[0] for line in found.badly_worded} == {
        "mlxstack.what",
        "mlxstack.people",
        "mlxstack.british",
    }
    assert found.functions == (2,)


def test_a_circle_of_rooms_is_found_in_functions_too(tmp_path: Path) -> None:
    floor = "from mlxstack.low import cellar\n"
    files = {
        "low/cellar.py": "def climb():\n    from mlxstack.high.roof import light\n",
        "high/roof.py": floor,
        "high/attic.py": f"from mlxstack.high import roof\n{floor}",
        "alone.py": f"from mlxstack.high import attic\n{floor}",
    }
    for name, text in files.items():
        file = tmp_path / "mlxstack" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (circle,) = measure(tmp_path / "mlxstack").circles
    assert circle in {"mlxstack: high -> low -> high", "mlxstack: low -> high -> low"}


def test_a_line_of_code_holds_neither_text_nor_an_import() -> None:
    source = """
'''A module.'''

import ast  # one
from json import (
    dumps,
)

# A comment.
SIZE = 1  # 1
'''Of what.'''


def shown(x):  # 2
    '''Show it.

    Twice.
    '''
    from sys import path

    text = '''a

    b'''  # 3 to 5
    return dumps(  # 6

        text  # 7
    )  # 8
"""
    assert code_lines(source) == 8
