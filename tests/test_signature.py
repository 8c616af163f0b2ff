"""What style promises in numbers holds for every file and function."""

from pathlib import Path

import pytest

from tests.signature import Signature, measure, percentile


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


def test_no_import_cycle(house: Signature) -> None:
    assert house.cycle == ()


def test_the_measure_finds_what_it_looks_for(tmp_path: Path) -> None:
    room = tmp_path / "mlxstack"
    room.mkdir()
    (room / "__init__.py").touch()
    (room / "one.py").write_text("from mlxstack import two\n\n\ndef bare(x):\n    return x\n")
    (room / "two.py").write_text("import mlxstack.one\n" + "x = 1\n" * 400)
    for name in ("three", "four"):
        (room / f"{name}.py").write_text("class Same:\n    pass\n")
    found = measure(room)
    assert found.bare == ("mlxstack.one.bare",)
    assert set(found.cycle) == {"mlxstack.one", "mlxstack.two"}
    assert found.same_class_names == ("Same",)
    assert found.files[-1] == 401
    assert found.functions == (2,)
