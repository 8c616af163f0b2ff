"""Row stacking: when decoding rows get common arrays."""

from collections.abc import Sequence

from msgspec import Struct


class StackingRules(Struct, frozen=True):
    """Bounds of row stacks.

    Rows are stacked once they have stayed the same for `least_steps`, and for as many more as
    repay the copy: a stacked step saves about the time of copying `repaid_bytes` for each row and
    layer. A step copies `building_bytes` at most, or one layer. `most_padding` is in mean tokens
    per row: reading more takes longer than the operations of a row. `most_bytes` are those of a
    stack, which holds KV a second time.
    """

    least_steps: int = 2
    repaid_bytes: int = 128 << 10
    building_bytes: int = 32 << 20
    most_padding: int = 128
    most_bytes: int = 1 << 28

    def is_worth(self, lengths: Sequence[int], n_bytes: int) -> bool:
        """Whether rows of these tokens and bytes decode faster stacked."""
        padding = sum(max(lengths, default=0) - length for length in lengths)
        is_even = padding <= self.most_padding * len(lengths)
        return len(lengths) > 1 and is_even and n_bytes <= self.most_bytes

    def steps_before(self, n_bytes: int, n_rows: int, n_layers: int) -> int:
        """Steps with the same rows before a stack of `n_bytes`."""
        return self.least_steps + n_bytes // (self.repaid_bytes * n_rows * n_layers)

    def layers_due(self, n_layers: int, n_bytes: int) -> int:
        """Layers to copy in one step, of layers of `n_bytes` together."""
        return max(1, n_layers * self.building_bytes // max(1, n_bytes))


DEFAULT_RULES = StackingRules()
