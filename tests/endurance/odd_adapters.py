"""Adapters whose configuration or matrices are odd: `python -m tests.endurance.odd_adapters`.

Each is loaded in a process of its own with bounded memory. It is served or refused in words; none
ends the process, and none is served with numbers that are no numbers.
"""

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from msgspec import Struct

from tests import models
from tests.engine.test_adapters import adapter

SERVED = 0
REFUSED = 3
WAIT_S = 120
MAX_BYTES = 8 << 30
"""Address space of a load: a rank of a billion must not be allocated."""
LOAD = """
import sys
import mlx.core as mx
from mlxstack.core.errors import StackError
from mlxstack.core.preset import KVSpec, ModelSpec
from mlxstack.engine.loading import loader
try:
    model = loader.load(ModelSpec(sys.argv[1], adapter=sys.argv[2]), KVSpec()).model
except StackError as error:
    print(error.message)
    sys.exit(3)
logits = model(mx.array([[1, 2, 3]]))
print("finite" if mx.isfinite(logits).all().item() else "not finite")
"""

Config = dict[str, Any]


class AdapterOutcome(Struct, frozen=True):
    """Adapters that were served, refused in words, and neither, with what was printed."""

    n_served: int
    n_refused: int
    faults: tuple[str, ...]


def _lora(**changed: Any) -> Callable[[Config], Config]:
    """Other parameters of the matrices."""
    return lambda config: {**config, "lora_parameters": {**config["lora_parameters"], **changed}}


def _with(**changed: Any) -> Callable[[Config], Any]:
    return lambda config: {**config, **changed}


CONFIGS: Mapping[str, Callable[[Config], Any]] = {
    "rank 0": _lora(rank=0),
    "rank -1": _lora(rank=-1),
    "rank 8 instead of 4": _lora(rank=8),
    "rank of a billion": _lora(rank=10**9),
    "rank as text": _lora(rank="4"),
    "rank null": _lora(rank=None),
    "rank 1.5": _lora(rank=1.5),
    "scale NaN": _lora(scale=float("nan")),
    "scale infinite": _lora(scale=float("inf")),
    "scale as text": _lora(scale="4"),
    "scale 1e300": _lora(scale=1e300),
    "dropout 2": _lora(dropout=2),
    "dropout null": _lora(dropout=None),
    "keys of nothing": _lora(keys=["nowhere"]),
    "keys as text": _lora(keys="self_attn.q_proj"),
    "no layers": _with(num_layers=0),
    "layers below zero": _with(num_layers=-3),
    "a billion layers": _with(num_layers=10**9),
    "layers as text": _with(num_layers="all"),
    "an unknown type": _with(fine_tune_type="telepathy"),
    "DoRA": _with(fine_tune_type="dora"),
    "full weights": _with(fine_tune_type="full"),
    "no parameters": _with(lora_parameters=None),
    "a list": lambda _: [1, 2],
    "a number": lambda _: 7,
    "nothing": lambda _: None,
    "a model file": _with(model_file="/etc/passwd", trust_remote_code=True),
}
Matrices = dict[str, mx.array]
MATRICES: Mapping[str, Callable[[Matrices], Matrices]] = {
    "not a number": lambda arrays: {
        name: mx.full(a.shape, float("nan")) for name, a in arrays.items()
    },
    "infinite": lambda arrays: {name: mx.full(a.shape, float("inf")) for name, a in arrays.items()},
    "whole numbers": lambda arrays: {name: a.astype(mx.int32) for name, a in arrays.items()},
    "turned": lambda arrays: {name: a.T for name, a in arrays.items()},
    "one dimension": lambda arrays: {name: a.reshape(-1) for name, a in arrays.items()},
    "half of them": lambda arrays: dict([*arrays.items()][::2]),
    "none": lambda _: {"x": mx.zeros((1,))},
    "other names": lambda arrays: {f"{name}.other": a for name, a in arrays.items()},
    "of the model itself": lambda arrays: {**arrays, "model.embed_tokens.weight": mx.zeros((2, 2))},
    "empty": lambda arrays: {name: mx.zeros((0, a.shape[1])) for name, a in arrays.items()},
}
BYTES: Mapping[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[: len(data) // 2],
    "no bytes": lambda _: b"",
    "text": lambda _: b"version https://git-lfs.github.com/spec/v1\n",
    "a header of 2^63 bytes": lambda data: (1 << 63).to_bytes(8, "little") + data[8:],
}


def cases(folder: Path, model: Path) -> dict[str, Path]:
    """Folders of adapters by what is odd about them."""
    folder.mkdir(parents=True)
    sound = adapter(folder / "sound", model)
    config = json.loads((sound / "adapter_config.json").read_text())
    data = (sound / "adapters.safetensors").read_bytes()
    loaded: Any = mx.load(str(sound / "adapters.safetensors"))
    folders = {"sound": sound}

    def place(name: str) -> Path:
        folders[name] = folder / f"case-{len(folders)}"
        folders[name].mkdir()
        (folders[name] / "adapter_config.json").write_text(json.dumps(config))
        (folders[name] / "adapters.safetensors").write_bytes(data)
        return folders[name]

    for name, change in CONFIGS.items():
        (place(f"config: {name}") / "adapter_config.json").write_text(json.dumps(change(config)))
    for name, matrix in MATRICES.items():
        file = place(f"matrices: {name}") / "adapters.safetensors"
        mx.save_safetensors(str(file), matrix(dict(loaded)))
    for name, spoil in BYTES.items():
        (place(f"file: {name}") / "adapters.safetensors").write_bytes(spoil(data))
    return folders


def load(model: Path, lora: Path) -> "subprocess.CompletedProcess[str]":
    """Load the adapter in a process with bounded memory."""
    return subprocess.run(
        [sys.executable, "-c", LOAD, str(model), str(lora)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES)),
    )


def odd_adapters(folder: Path, names: frozenset[str] = frozenset()) -> AdapterOutcome:
    """Load each adapter, or those with these names."""
    model = models.write(folder / "model", {**models.CONFIGS["tiny"], "vocab_size": 1024})
    n_served = 0
    n_refused = 0
    faults = list[str]()
    for name, lora in cases(folder / "adapters", model).items():
        if names and name not in names:
            continue
        done = load(model, lora)
        if done.returncode == SERVED and done.stdout.strip() == "finite":
            n_served += 1
        elif done.returncode == REFUSED and len(done.stdout) < 1000 and "adapter" in done.stdout:
            n_refused += 1
        else:
            faults.append(f"{name}: {done.returncode} {done.stdout[-300:]} {done.stderr[-600:]}")
    return AdapterOutcome(n_served, n_refused, tuple(faults))


if __name__ == "__main__":
    outcome = odd_adapters(Path(tempfile.mkdtemp(prefix="adapters-")))
    print(outcome.n_served, "served,", outcome.n_refused, "refused")
    for fault in outcome.faults:
        print(fault)
    sys.exit(len(outcome.faults))
