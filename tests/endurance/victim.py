"""A process to be killed: it serves agents, saves slots and agents' turns, again and again."""

import sys
from contextlib import suppress
from pathlib import Path
from random import Random

from mlxstack.core.commands import SaveSlot
from mlxstack.core.errors import DiskFull
from mlxstack.core.preset import DiskSpec, PrefixCacheSpec, SlotSpec
from tests.engine.harness import preset_of, prompt, running

N_CTX = 1024
MAX_BYTES = 16_000_000
"""So little that files are deleted too while the victim lives."""


def main(model: Path, home: Path, seed: int) -> None:
    """Until killed. Prints a line per turn, so that the killer can time its blow."""
    random = Random(seed)
    cache = PrefixCacheSpec(disk=DiskSpec(max_bytes=MAX_BYTES))
    preset = preset_of(model, slots=SlotSpec(count=2, n_ctx=N_CTX), prefix_cache=cache)
    with running(preset, home) as driver:
        histories = {n: prompt(150, seed=n) for n in range(4)}
        print("ready", flush=True)
        while True:
            agent = random.randrange(4)
            history = histories[agent]
            answer = driver.answer(history, 4, agent=f"agent-{agent}")
            grown = history + tuple(answer) + prompt(20, seed=len(history))
            histories[agent] = grown if len(grown) < N_CTX - 40 else prompt(150, seed=agent)
            with suppress(DiskFull):
                command = SaveSlot(random.randrange(2), f"{agent}.bin")
                driver.engine.run_slot_command(command).result(timeout=60)
            print("turn", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
