"""How much memory there is for models."""

import psutil
import pytest

from mlxstack.core.errors import SetupError
from mlxstack.host.hardware import bytes_of, mac_memory, mac_share, this_memory

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("24GB", 24 * GIB),
        ("24 GiB", 24 * GIB),
        ("1.5g", 3 * GIB // 2),
        ("512M", GIB // 2),
        ("24", 24 * GIB),
        ("24G", 24 * GIB),
        (" 1.5 ", 3 * GIB // 2),
        ("1T", 1024 * GIB),
    ],
)
def test_amounts_are_read_as_memory_is_sold(text: str, n_bytes: int) -> None:
    assert bytes_of(text) == n_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "much",
        "-1GB",
        "GB",
        "12 parsecs",
        "0",
        "0GB",
        "24B",
        "24 bytes",
        "10PB",
        "10240T",
        "9" * 400,
        "nan",
        "-24",
    ],
)
def test_nonsense_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(SetupError, match="write it as 24GB"):
        bytes_of(text)


def test_a13_a_mac_lets_the_gpu_use_two_thirds_or_three_quarters() -> None:
    assert mac_share(24 * GIB) == 16 * GIB
    assert mac_share(64 * GIB) == 48 * GIB
    assert mac_memory("24GB").half_bytes == 2


def test_a6_the_total_can_be_said() -> None:
    said = this_memory({"MLX_STACK_MEMORY": "1GiB"})
    assert said.total == GIB
    assert said.usable < GIB
    real = this_memory({})
    assert real.total == psutil.virtual_memory().total
    assert 0 < real.usable < real.total
