"""What can be done to a slot: save, restore, erase."""

from mlxstack.core.act import Act, Done, Erased, EraseSlot, Restored, RestoreSlot, Saved, SaveSlot
from mlxstack.core.errors import BadRequest
from mlxstack.service.service import Service


async def save(service: Service, act: SaveSlot) -> Saved:
    """Waits until the slot is idle. Raises BadRequest for a bad slot or name."""
    done = await _act(service, act)
    assert isinstance(done, Saved)
    return done


async def restore(service: Service, act: RestoreSlot) -> Restored:
    """Waits until the slot is idle. Raises NotFound, Damaged or Conflict; the slot then stays."""
    done = await _act(service, act)
    assert isinstance(done, Restored)
    return done


async def erase(service: Service, act: EraseSlot) -> Erased:
    """Waits until the slot is idle."""
    done = await _act(service, act)
    assert isinstance(done, Erased)
    return done


async def _act(service: Service, act: Act) -> Done:
    if not 0 <= act.slot < service.preset.slots.count:
        raise BadRequest("Invalid slot ID", "id_slot")
    return await service.act(act)
