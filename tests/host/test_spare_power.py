"""Whether the computer has power to spare."""

from types import SimpleNamespace

import pytest

from mlxstack.host.spare_power import has_spare_power, is_on_battery


@pytest.mark.parametrize(
    ("battery", "is_on"),
    [
        (None, False),
        (SimpleNamespace(power_plugged=True), False),
        (SimpleNamespace(power_plugged=None), False),
        (SimpleNamespace(power_plugged=False), True),
    ],
    ids=["no battery", "mains", "an unknown plug", "battery"],
)
def test_power_is_spare_on_mains_only(battery: SimpleNamespace | None, is_on: bool) -> None:
    assert is_on_battery(battery) == is_on


def test_this_computer_is_asked() -> None:
    assert isinstance(has_spare_power(), bool)
