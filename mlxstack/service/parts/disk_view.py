"""View of the disk: space, and bytes written by day."""

import logging

from msgspec.structs import replace

from mlxstack.core.errors import StackError
from mlxstack.core.preset import AUTO, DiskSpec
from mlxstack.core.status import CacheView, DiskView
from mlxstack.store.gc import VolumeSpace, automatic_limit, space_of
from mlxstack.store.kv_store import DiskKVStore
from mlxstack.store.write_counter import WriteCounter

log = logging.getLogger(__name__)

N_DAYS = 7


def disk_view(store: DiskKVStore, counter: WriteCounter) -> DiskView:
    """Space and writes; zeros where they cannot be read."""
    view = DiskView(max_daily_bytes=counter.max_bytes, trouble=counter.trouble)
    try:
        space = space_of(store.root)
        view = replace(view, free_bytes=space.n_free, total_bytes=space.n_total)
        return replace(view, today=counter.today(), days=counter.days(N_DAYS))
    except (OSError, StackError) as error:
        log.debug("the view of the disk is not complete: %s", error)
        return view


def with_disk(view: CacheView, spec: DiskSpec, disk: DiskView) -> CacheView:
    """Cache statistics with those of the disk, and the limit of `auto`."""
    budget = view.disk_budget
    if spec.max_bytes == AUTO and disk.total_bytes:
        budget = automatic_limit(view.disk_bytes, VolumeSpace(disk.free_bytes, disk.total_bytes))
    return replace(view, disk=disk, disk_budget=budget)
