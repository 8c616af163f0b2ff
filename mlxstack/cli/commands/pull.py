"""`pull`: download a model from the hub, with progress."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from mlxstack.cli.output import note, seldom
from mlxstack.cli.streams import finishes
from mlxstack.cli.verbs import VerbResult

if TYPE_CHECKING:
    from mlxstack.core.preset import ModelSpec
    from mlxstack.models.hub import Download
    from mlxstack.models.transfer import Transfer

LINE_S = 2.0


@finishes()
def pull(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model to download.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
) -> VerbResult:
    """Download a model from the hub.

    It goes on where an earlier download was interrupted, inside a file too.
    """
    from mlxstack.cli.units import size
    from mlxstack.models import hub

    spec = _spec(model, revision)
    download = hub.plan(spec.id, spec.revision)
    hub.check_disk(download)
    if download.n_missing:
        n_present = download.n_bytes - download.n_missing
        already = ""
        if n_present:
            already = f"; {size(n_present)} are here already"
        note(f"{spec.id}: {size(download.n_missing)} to download{already}")
    began = time.monotonic()
    with _progress(download) as report:
        folder = hub.download(spec.id, spec.revision, report)
    took = " already"
    if download.n_missing:
        took = f" after {time.monotonic() - began:.0f} s"
    text = f"{spec.id} is here{took}: {size(download.n_bytes)} in {folder}"
    return VerbResult({"model": spec.id, "path": folder, "n_bytes": download.n_bytes}, text)


def _spec(model: str, revision: str | None) -> "ModelSpec":
    """Hub id of a preset or argument. Raises Misuse for others."""
    from mlxstack.cli.exit_codes import Misuse
    from mlxstack.config import presets
    from mlxstack.core.preset import ModelSpec
    from mlxstack.host.home import home_from
    from mlxstack.models.reference import HUB_ID, hub_id_of

    home = home_from(os.environ)
    model = hub_id_of(model)
    if HUB_ID.fullmatch(model):
        return ModelSpec(id=model, revision=revision)
    spec = presets.load(model, home).preset.model
    if not HUB_ID.fullmatch(spec.id):
        raise Misuse(f"`{model}` serves {spec.id}, which needs no download")
    return ModelSpec(id=spec.id, revision=revision or spec.revision)


def _progress(download: "Download") -> AbstractContextManager[Callable[[int], None]]:
    """Progress bar, or lines without a terminal; call with received bytes."""
    from mlxstack.models.transfer import Transfer

    if sys.stderr.isatty():
        return _bar(download)
    return nullcontext(_lines(download.model, Transfer(download.n_missing, time.monotonic())))


@contextmanager
def _bar(download: "Download") -> Iterator[Callable[[int], None]]:
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.percentage:>3.0f} %"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as drawn:
        task = drawn.add_task(download.model, total=max(download.n_missing, 1))
        yield lambda n_bytes: drawn.advance(task, n_bytes)


def _lines(model: str, transfer: "Transfer") -> Callable[[int], None]:
    show = seldom(lambda text: note(f"downloading {model}: {text}"), LINE_S)

    def report(n_bytes: int) -> None:
        transfer.add(n_bytes)
        show(transfer.text(time.monotonic()))

    return report
