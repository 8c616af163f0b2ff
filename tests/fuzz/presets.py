"""Fuzzes presets: whatever a file holds, it is a preset or a SetupError in words."""

import tempfile
from functools import cache
from pathlib import Path

import msgspec
import yaml
from msgspec import inspect

from mlxstack.config.presets import load
from mlxstack.core.errors import SetupError
from mlxstack.core.preset import Preset
from mlxstack.host.home import Home
from tests.fuzz.dice import Dice

YAML = (
    "model:", " id: demo", "\n", "\n  ", "- ", "&a ", "*a", "!!int ", "!!timestamp ", "{", "}",
    "!!python/name:os.system", "[", "]", ": ", "? ", "<<: ", "extends: demo", "2001-99-99", "0b",
    "|", ">", "'", '"', "#", "%YAML 1.1", "---", "...", "\t", "\x00", "0o9", "1:99:99", "=",
    "1_000", "~", ".inf",
)  # fmt: skip


@cache
def folder() -> Path:
    """Where the presets are written."""
    return Path(tempfile.mkdtemp(prefix="fuzz-"))


def presets(data: bytes) -> None:
    """Raises what is neither a preset nor a SetupError."""
    dice = Dice(data)
    path = folder() / "one.yaml"
    path.write_bytes(_file(dice))
    try:
        loaded = load(str(path), Home(folder()))
    except SetupError as error:
        assert error.message.strip()
        return
    assert isinstance(loaded.preset, Preset)
    msgspec.json.encode(loaded.preset)


def _file(dice: Dice) -> bytes:
    match dice.below(4):
        case 0:
            return dice.rest()
        case 1:
            return "".join(dice.pick(YAML) for _ in range(dice.below(60))).encode()
        case 2:
            n = dice.pick((30, 300, 600))
            return b"model: " + dice.pick((b"[", b"{a: ", b"- ", b"? ", b"!!seq ")) * n
    fields: dict[str, object] = {}
    for _ in range(dice.below(6)):
        section = dice.pick(SECTIONS)
        keys = dice.pick(KEYS[section]) if KEYS[section] else ""
        value: object = dice.number() if dice.chance(60) else dice.text(YAML)
        fields[section] = {keys: value} if keys and dice.chance(90) else value
    return yaml.safe_dump(fields, allow_unicode=True).encode()


def _keys() -> dict[str, tuple[str, ...]]:
    keys: dict[str, tuple[str, ...]] = {}
    kind = inspect.type_info(Preset)
    assert isinstance(kind, inspect.StructType)
    for field in kind.fields:
        inner = field.type
        below = inner.fields if isinstance(inner, inspect.StructType) else ()
        keys[field.encode_name] = tuple(field_below.encode_name for field_below in below)
    return keys


KEYS = _keys()
SECTIONS = tuple(KEYS)
