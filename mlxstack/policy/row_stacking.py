"""Row stacking: when decoding rows get common arrays."""

from collections.abc import Sequence

from msgspec import Struct


class StackingRules(Struct, frozen=True):
    """Bounds of row stacks.

    Rows are stacked after `steady_steps` of the same rows, because copying pays after about as
    many; the layers over `building_steps`, so that none takes much longer. `most_padding` is in
    mean tokens per row: reading more takes longer than the operations of a row. `most_bytes` are
    those of a stack, which holds KV a second time.
    """

    steady_steps: int = 16
    building_steps: int = 8
    most_padding: int = 128
    most_bytes: int = 1 << 28

    def is_worth(self, lengths: Sequence[int], n_bytes: int) -> bool:
        """Whether rows of these tokens and bytes decode faster stacked."""
        padding = sum(max(lengths, default=0) - length for length in lengths)
        is_even = padding <= self.most_padding * len(lengths)
        return len(lengths) > 1 and is_even and n_bytes <= self.most_bytes

    def layers_due(self, n_layers: int, n_steps: int) -> int:
        """Layers to be stacked after `n_steps` and this one."""
        return min(n_layers, -(-n_layers * (n_steps + 1) // self.building_steps))


DEFAULT_RULES = StackingRules()
