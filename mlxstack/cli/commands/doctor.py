"""`doctor`: problems of this machine and their remedies."""

import os
from functools import partial
from typing import TYPE_CHECKING, Annotated

from mlxstack.cli.completion import preset_argument
from mlxstack.cli.exit_codes import Misuse, failed_if
from mlxstack.cli.output import table
from mlxstack.cli.start_choice import HostsOption
from mlxstack.cli.verbs import VerbResult

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlxstack.cli.check_result import CheckResult
    from mlxstack.host.home import Home

ModelArgument = Annotated[
    str | None, preset_argument("Whose model files to compare on all machines.", "MODEL")
]


def doctor(model: ModelArgument = None, hosts: HostsOption = None) -> VerbResult:
    """Check this machine, and with --hosts the others.

    The exit code is 1 when something must be repaired.
    """
    from mlxstack.cli.check_result import CheckLevel
    from mlxstack.cli.doctor import examine
    from mlxstack.host.home import home_from

    home = home_from(os.environ)
    remote = _others(model, hosts, home)
    results = [*examine(home, os.environ), *remote]
    rows = [(result.verdict, result.subject, result.detail, result.remedy) for result in results]
    is_bad = any(result.verdict is CheckLevel.BAD for result in results)
    show = partial(table, ("", "CHECK", "FOUND", "REMEDY"), rows)
    return VerbResult({"findings": results}, show, failed_if(is_bad))


def _others(model: str | None, hosts: str | None, home: "Home") -> "Iterator[CheckResult]":
    """Checks of other machines, not run yet. Raises Misuse, SetupError."""
    from mlxstack.config.preset_checks import HOST
    from mlxstack.features.ranks.doctor import examine_hosts
    from mlxstack.host.hardware import this_memory
    from mlxstack.planner.derived_preset import candidate_for

    if model is not None:
        sets = () if hosts is None else (f"hosts=[{hosts}]",)
        candidate = candidate_for(model, home, this_memory(os.environ), sets)
        if not candidate.preset.hosts:
            raise Misuse(f"{model} names no `hosts`; name them by --hosts A,B, this one first")
        return examine_hosts(candidate.preset.hosts, candidate.preset.model, candidate.reply.shape)
    if hosts is None:
        return iter(())
    names = hosts.split(",")
    if len(names) < 2 or not all(map(HOST.fullmatch, names)):
        raise Misuse(f"--hosts {hosts}: write names or IPv4 addresses as A,B, this one first")
    return examine_hosts(names)
