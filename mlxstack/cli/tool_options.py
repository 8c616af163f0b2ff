"""Options of `verify --tools`."""

from typing import Annotated, NamedTuple

import typer

from mlxstack.cli.exit_codes import Misuse
from mlxstack.cli.units import seconds_of

Tools = Annotated[
    bool, typer.Option("--tools", help="Instead: 100 tool calls, and what the chat template drops.")
]
Calls = Annotated[
    int | None,
    typer.Option(
        "--calls",
        metavar="N",
        min=1,
        max=10,
        help="With --tools: requests of each of the ten kinds, 10 by default.",
    ),
]
Repairs = Annotated[
    bool,
    typer.Option(
        "--repairs",
        help="With --tools: ten small repairs by an agent too. Their tests run code that the "
        "model wrote, in a limited process.",
    ),
]
Against = Annotated[
    list[str] | None,
    typer.Option(
        "--against",
        metavar="SERVER",
        help="With --repairs: the same repairs on another server of the same model: its address, "
        "or `mlx_lm` or `vllm-mlx`, which are started. Repeatable.",
    ),
]
Limit = Annotated[
    float | None,
    typer.Option(
        metavar="TIME",
        parser=seconds_of,
        help="With --tools: time for the requests; by default three times what they should take.",
    ),
]


class ToolOptions(NamedTuple):
    """Whether and how tool calls are verified."""

    tools: Tools = False
    calls: Calls = None
    repairs: Repairs = False
    against: Against = None
    limit: Limit = None

    def check(self, *, has_others: bool) -> None:
        """Raises Misuse for options that do not go together."""
        if self.tools and has_others:
            raise Misuse("--tools is a run of its own")
        has_options = self.calls or self.repairs or self.against or self.limit is not None
        if has_options and not self.tools:
            raise Misuse("--calls, --repairs, --against and --limit are options of --tools")
        if self.against and not self.repairs:
            raise Misuse("--against compares repairs; add --repairs")
