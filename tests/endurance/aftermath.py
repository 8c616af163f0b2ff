"""What a fresh engine makes of a home that kills, power cuts and faults of a disk have left."""

from collections.abc import Iterable
from pathlib import Path

from mlxstack.core.commands import RestoreSlot
from mlxstack.core.preset import SlotSpec
from tests.engine.harness import WAIT_S, preset_of, prompt, running


def check_answers(
    model: Path, home: Path, n_ctx: int, n_agents: int, slot_files: Iterable[str]
) -> int:
    """Each agent and each of these slot files answers as from cold; how many answers there were."""
    n_answered = 0
    with running(preset_of(model, slots=SlotSpec(count=2, n_ctx=n_ctx)), home) as driver:
        for agent in range(n_agents):
            tokens = prompt(150, seed=agent) + prompt(9, seed=77)
            assert driver.answer(tokens, 4, agent=f"agent-{agent}") == driver.cold(tokens, 4)
            n_answered += 1
        for name in slot_files:
            driver.engine.run_slot_command(RestoreSlot(0, name)).result(timeout=WAIT_S)
            held = driver.context(0)[: n_ctx - 40]
            if len(held) > 1:
                assert driver.answer(held, 4, slot=0) == driver.cold(held, 4, slot=1)
            n_answered += 1
    return n_answered
