"""Metal dispatches of an MLX graph, simulated without a GPU.

Operations run in the order of `eval_impl` (mlx/transforms.cpp); barriers and command buffers follow
`CommandEncoder` (mlx/backend/metal/device.cpp), both of MLX 0.32.4. Attention over 1,024 keys or
more and large sorts are several dispatches on a device and count as one here.
"""

import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import mlx.core as mx
from msgspec import Struct

VIEWS = frozenset(
    {
        "AsStrided",
        "Broadcast",
        "BroadcastAxes",
        "Contiguous",
        "Copy",
        "ExpandDims",
        "Flatten",
        "NumberOfElements",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "StopGradient",
        "Transpose",
        "Unflatten",
        "View",
    }
)
"""Operations whose output is the buffer of their first input; they dispatch nothing."""
IN_PLACE = VIEWS | {"SliceUpdate"}
N_COPYING = {"ScatterAxis": 2, "Scatter": 2}
"""Dispatches of operations that first copy their first input."""
MAX_WIDTH = 20
"""MLX's default of MLX_BFS_MAX_WIDTH."""

OPERATION = re.compile(r'^\{ \d+ \[label ="(\w+)"')
INPUT = re.compile(r'^"(.+)" -> \d+$')
OUTPUT = re.compile(r'^\d+ -> "(.+)"$')


class Operation(Struct, frozen=True):
    """A node of the graph, with the names of its arrays."""

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def n_dispatches(self) -> int:
        """Kernels that it launches."""
        if self.kind in VIEWS:
            return 0
        return len(self.inputs) if self.kind == "Concatenate" else N_COPYING.get(self.kind, 1)


class Graph(Struct, frozen=True):
    """Operations of an evaluation, and the arrays that it asks for."""

    operations: list[Operation]
    roots: list[str]


class BufferLimits(Struct, frozen=True):
    """Limits of a command buffer: operations, and 2^20 elements of its distinct arrays."""

    n_operations: int
    n_elements: int


def graph_of(roots: Sequence[mx.array], names: Mapping[str, mx.array]) -> Graph:
    """Graph of these arrays; `names` are those of inputs."""
    named = {f"root {i}": root for i, root in enumerate(roots)}
    text = io.StringIO()
    mx.export_to_dot(text, *roots, **names, **named)
    operations: list[tuple[str, list[str], list[str]]] = []
    # Compiled functions share an identifier; the lines of an operation follow its own.
    for line in text.getvalue().splitlines():
        if match := OPERATION.match(line):
            operations.append((match[1], [], []))
        elif match := INPUT.match(line):
            operations[-1][1].append(match[1])
        elif match := OUTPUT.match(line):
            operations[-1][2].append(match[1])
    return Graph(
        [Operation(kind, tuple(ins), tuple(outs)) for kind, ins, outs in operations], list(named)
    )


def tape_of(graph: Graph) -> list[Operation]:
    """Operations in MLX's order: breadth first from the roots, reversed, of limited width."""
    producer = {name: i for i, op in enumerate(graph.operations) for name in op.outputs}
    sources = [
        [producer[name] for name in op.inputs if name in producer] for op in graph.operations
    ]
    end = len(sources)
    sources.append([producer[name] for name in graph.roots if name in producer])
    n_uses = _uses(sources)
    reached = [end]
    position = 0
    deeper: list[tuple[int, int]] = []
    while position < len(reached) or deeper:
        if position < len(reached):
            current = reached[position]
            start = 0
            position += 1
        else:
            current, start = deeper.pop()
        for i in range(start, len(sources[current])):
            if len(reached) - position >= MAX_WIDTH:
                deeper.append((current, i))
                break
            source = sources[current][i]
            n_uses[source] -= 1
            if not n_uses[source]:
                reached.append(source)
    return [graph.operations[i] for i in reversed(reached) if i != end]


def count_dispatches(tape: Sequence[Operation]) -> int:
    """Kernels that these operations launch."""
    return sum(op.n_dispatches for op in tape)


def count_barriers(tape: Sequence[Operation]) -> int:
    """Barriers among these operations.

    One comes before an operation that reads or overwrites what was written since the last one, or
    overwrites what was read.
    """
    buffers = _buffers(tape)
    n_barriers = 0
    read: set[str] = set()
    written: set[str] = set()
    for op in tape:
        if not op.n_dispatches:
            continue
        inputs = {buffers.get(name, name) for name in op.inputs}
        outputs = {buffers.get(name, name) for name in op.outputs}
        if (inputs | outputs) & written or outputs & read:
            n_barriers += 1
            read.clear()
            written.clear()
        read |= inputs
        written |= outputs
    return n_barriers


def count_command_buffers(
    tape: Sequence[Operation], sizes: Mapping[str, int], limits: BufferLimits
) -> int:
    """Command buffers of these operations; arrays without a size have no elements.

    MLX commits after an operation that passes a limit (`needs_commit`).
    """
    buffers = _buffers(tape)
    n_buffers = 0
    n_operations = 0
    used: set[str] = set()
    for op in tape:
        if not op.n_dispatches:
            continue
        n_operations += op.n_dispatches
        used |= {buffers.get(name, name) for name in (*op.inputs, *op.outputs)}
        n_elements = sum(sizes.get(name, 0) for name in used)
        if n_operations > limits.n_operations or n_elements >> 20 > limits.n_elements:
            n_buffers += 1
            n_operations = 0
            used.clear()
    return n_buffers + (n_operations > 0)


def _uses(sources: Sequence[Sequence[int]]) -> Counter[int]:
    """Uses of each operation's outputs below the last one."""
    n_uses: Counter[int] = Counter()
    reached = [len(sources) - 1]
    while reached:
        for source in sources[reached.pop()]:
            if not n_uses[source]:
                reached.append(source)
            n_uses[source] += 1
    return n_uses


def _buffers(tape: Sequence[Operation]) -> dict[str, str]:
    """Buffer of each array that has that of another."""
    buffers: dict[str, str] = {}
    for op in tape:
        if op.kind in IN_PLACE and op.inputs:
            buffers |= dict.fromkeys(op.outputs, buffers.get(op.inputs[0], op.inputs[0]))
    return buffers
