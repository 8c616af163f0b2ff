"""What can be done to a slot: save, restore, erase."""

from mlxstack.core.commands import (
    EraseSlot,
    RestoreSlot,
    SaveSlot,
    SlotCommand,
    SlotCommandResult,
    SlotEraseResult,
    SlotRestoreResult,
    SlotSaveResult,
)
from mlxstack.core.errors import InvalidSlot
from mlxstack.service.service import Service


async def save(service: Service, act: SaveSlot) -> SlotSaveResult:
    """Waits until the slot is idle. Raises BadRequest for a bad slot or name."""
    done = await _act(service, act)
    assert isinstance(done, SlotSaveResult)
    return done


async def restore(service: Service, act: RestoreSlot) -> SlotRestoreResult:
    """Waits until the slot is idle. Raises NotFound, Damaged or Conflict; the slot then stays."""
    done = await _act(service, act)
    assert isinstance(done, SlotRestoreResult)
    return done


async def erase(service: Service, act: EraseSlot) -> SlotEraseResult:
    """Waits until the slot is idle."""
    done = await _act(service, act)
    assert isinstance(done, SlotEraseResult)
    return done


async def _act(service: Service, act: SlotCommand) -> SlotCommandResult:
    if not 0 <= act.slot < service.preset.slots.count:
        raise InvalidSlot(act.slot, service.preset.slots.count)
    return await service.run_slot_command(act)
