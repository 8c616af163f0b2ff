"""`python -m tests.endurance.menu MINUTES`: three clients change between twelve models on a disk.

Every answer must come from the model that it names, memory must hold, and returns must be warm.
"""

import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.gateway.any_site import AnySite, Talker, any_site, n_loads, n_reserved

MEMORY = "1G"


def main() -> None:
    """Talk for the minutes that the command line gives, and tell the counts."""
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 5.0
    with (
        tempfile.TemporaryDirectory() as folder,
        any_site(Path(folder), MEMORY, ["sesame"]) as site,
    ):
        end = time.monotonic() + 60 * minutes
        with ThreadPoolExecutor(4) as pool:
            talking = [pool.submit(_talk, site, number, end) for number in range(3)]
            watching = pool.submit(_watch, site, end)
            counts = [client.result() for client in talking]
        n_visits, n_warm = (sum(column) for column in zip(*counts, strict=True))
        highest = watching.result()
        budget = site.spec.budget
        n = sum(n_loads(site).values())
        print(f"{n_visits} answers, each from its model; {n} loads, {n_warm} warm returns")
        print(f"memory reserved: {highest / 1e6:.0f} of {budget / 1e6:.0f} MB")
        assert highest <= budget


def _talk(site: AnySite, number: int, end: float) -> tuple[int, int]:
    chosen = random.Random(number)
    talker = Talker(site, f"client {number}")
    n_warm = 0
    while time.monotonic() < end:
        n_warm += talker.visit(chosen.choice(list(site.word_of))) > 0
    return talker.n_visits, n_warm


def _watch(site: AnySite, end: float) -> int:
    highest = 0
    while time.monotonic() < end:
        highest = max(highest, n_reserved(site))
        time.sleep(0.2)
    return highest


if __name__ == "__main__":
    main()
