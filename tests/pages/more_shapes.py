"""Shapes of the presets that mlx-vlm serves, stored; `make shapes` writes them.

The pages are drawn where mlx-vlm may not be installed, and say the same everywhere.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from mlxstack.core.preset import Preset
from mlxstack.engine.model.model_shape import shape_of_config
from mlxstack.models.model_files import ModelFiles
from mlxstack.planner.candidate import Candidate, excerpts, of_many
from mlxstack.policy.memory.capacity import ModelShape, ShapeReply
from tests.matrix.products import NOT_YET

FILE = Path(__file__).with_name("more_shapes.json")


def configs() -> dict[str, dict[str, Any]]:
    """Shipped configs of types that mlx-lm lacks, by preset."""
    shipped = {
        file.stem: json.loads(file.read_text()) for file in sorted(excerpts().glob("*.json"))
    }
    types = NOT_YET.values()
    return {name: config for name, config in shipped.items() if config["model_type"] in types}


def stored() -> dict[str, ModelShape]:
    """Their shapes, as the file has them."""
    return msgspec.json.decode(FILE.read_bytes(), type=dict[str, ModelShape])


def candidates(pairs: Sequence[tuple[Preset, ModelFiles]]) -> list[Candidate]:
    """Candidates of the planner, with stored shapes for types that mlx-lm lacks."""
    shapes = stored()
    return [
        replace(candidate, reply=ShapeReply(shapes[candidate.preset.name]))
        if candidate.preset.name in shapes
        else candidate
        for candidate in of_many(pairs)
    ]


def main() -> None:
    """Write the file."""
    shapes = {name: shape_of_config(config) for name, config in configs().items()}
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(shapes), indent=0) + b"\n")


if __name__ == "__main__":
    main()
