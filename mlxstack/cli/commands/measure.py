"""`bench`: speed of the running service."""

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from mlxstack.cli.output import note, say, table
from mlxstack.cli.service_request import ServiceOptions
from mlxstack.cli.start_choice import ModelToStart
from mlxstack.cli.verbs import VerbResult
from mlxstack.core.formatting import count, tokens

if TYPE_CHECKING:
    from mlxstack.bench.my_service import PromptSpeed, ServiceSpeed

Seconds = Annotated[
    float,
    typer.Option(
        min=1, max=3600, help="Longer prompts are skipped where they would take longer than this."
    ),
]


class BenchGroup(TyperGroup):
    """Group that sends benchmarks of mlx-stack itself to `bench dev`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the verb. Raises UsageError with the place of a benchmark."""
        if self.get_command(ctx, args[0]) is None:
            ctx.fail(
                f"there is no `{args[0]}` here; `mlx-stack bench` measures the running service, "
                "`mlx-stack bench dev` mlx-stack itself"
            )
        return super().resolve_command(ctx, args)


def bench(
    service: ServiceOptions, model: ModelToStart = None, seconds: Seconds = 60.0
) -> VerbResult:
    """Measure the running service in about a minute.

    Prefill and decode rates with prompts of 1k, 8k and 32k tokens as far as the context allows,
    the next turn against the first one, and 1, 2 and 4 agents at once.
    """
    from datetime import UTC, datetime

    from msgspec.structs import replace

    from mlxstack.bench.environment import conditions, ended
    from mlxstack.bench.my_service import measure
    from mlxstack.cli.gateway_member import start_member
    from mlxstack.cli.start_offer import name_of
    from mlxstack.cli.target import target
    from mlxstack.host.home import home_from

    home = home_from(os.environ)
    named = service._replace(name=name_of(home, *service, model))
    where = target(home, *named)
    start_member(where)
    machine = None
    if _is_local(where.url):
        machine = conditions("", datetime.now(UTC).date(), os.environ)
    speed = named.ask(lambda client: measure(client, seconds, note))
    if machine is not None:
        speed = replace(speed, conditions=ended(replace(machine, model=speed.model)))
    return VerbResult(speed, lambda: _show(speed))


def _is_local(url: str) -> bool:
    """Whether the address of a service is of this computer."""
    from urllib.parse import urlsplit

    from mlxstack.config.preset_checks import is_loopback

    return is_loopback(urlsplit(url).hostname or "")


def _show(speed: "ServiceSpeed") -> None:
    from mlxstack.bench.environment import description

    say(f"{speed.model} at {speed.url}: {speed.n_slots} slots x {tokens(speed.n_ctx)} tokens")
    for line in description(speed.conditions) if speed.conditions is not None else ():
        say(line)
    say("")
    headings = ("PROMPT", "PREFILL", "DECODE", "FIRST TOKEN", "NEXT TURN", "ITS REUSED", "ITS NEW")
    table(headings, [_prompt_row(prompt) for prompt in speed.prompts])
    say("")
    rows = [(row.n_agents, f"{row.total_tps:.1f}", f"{row.each_tps:.1f}") for row in speed.agents]
    table(("AGENTS", "DECODE, ALL", "EACH"), rows)
    say("")
    say("The next turn continues the conversation: most of its longer prompt is reused.")
    say(f"Rates are tokens per second. Measured in {speed.seconds:.0f} s.")
    if speed.n_busy:
        note(f"warning: {speed.n_busy} slots were busy with other requests")


def _prompt_row(speed: "PromptSpeed") -> tuple[object, ...]:
    if speed.skipped:
        return (count(speed.n_wanted), speed.skipped, "", "", "", "", "")
    return (
        count(speed.n_prompt),
        f"{speed.prefill_tps:.0f}",
        f"{speed.decode_tps:.1f}",
        f"{speed.cold_ttft_s:.2f} s",
        f"{speed.warm_ttft_s:.2f} s",
        count(speed.n_warm_reused),
        count(speed.n_warm_new),
    )
