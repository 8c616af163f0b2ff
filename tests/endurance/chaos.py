"""Chaos: random clients, cancels, swaps, saves, erases, kills and spoiled files, by a seed.

`python -m tests.endurance.chaos SEED MINUTES`. What a round does is drawn from the seed and the
round's number alone. After each round nothing is under way: then every history is the one that
the clients know, the counters add up, and some agents' next answers are those from cold. In the
end all agents' are, with both models.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random

from msgspec.structs import replace

from tests.endurance.knowing import Agents, Deed
from tests.endurance.meddling import meddle
from tests.endurance.stage import Outcome, Stage
from tests.endurance.talkers import WORDS
from tests.endurance.tally import Tally


class Chaos:
    """One run."""

    def __init__(self, root: Path, seed: int) -> None:
        self.stage = Stage(root, seed)
        self.agents = Agents(self.stage)

    def run(self, until: Callable[[int], bool]) -> Outcome:
        """Rounds while `until(n_rounds)` is false. Raises AssertionError with what was done."""
        self.stage.house.start()
        try:
            while not until(self.stage.outcome.n_rounds):
                self._round()
                self.stage.count(n_rounds=1)
            self.agents.prove(list(self.agents.minds))
            self._load("b" if self.stage.house.model() == "a" else "a")
            self.agents.prove(list(self.agents.minds))
            self.stage.settle()
        except BaseException as error:
            error.add_note(
                f"{self.stage.outcome}\n{self.stage.did}\n{self.stage.house.log()[-3000:]}"
            )
            raise
        finally:
            self.stage.house.end()
            self.stage.wire.close()
        return replace(self.stage.outcome, n_kills=self.stage.house.n_kills)

    def _round(self) -> None:
        random = Random(f"{self.stage.outcome.seed}/{self.stage.outcome.n_rounds}")
        fate = Random(f"{self.stage.outcome.seed}/{self.stage.outcome.n_rounds}/faults")
        self.stage.did = [f"round {self.stage.outcome.n_rounds}"]
        *names, unlisted = random.sample(list(self.agents.minds), 4)
        deeds = [self.agents.deed(name, random) for name in names]
        if random.random() < 0.15:
            deeds[0] = partial(self.agents.fork, names[0], unlisted)
        deeds += [self._stranger(random) for _ in range(random.randrange(4))]
        deeds += [self._housework(random) for _ in range(random.randrange(3))]
        if fate.random() < 0.06:
            deeds.append(partial(self._load, fate.choice("ab")))
        if fate.random() < 0.5:
            deeds.append(partial(self._meddle, fate.random()))
        random.shuffle(deeds)
        is_killed = fate.random() < 0.04
        patience_s = fate.random() * 0.3
        with ThreadPoolExecutor(len(deeds)) as pool:
            done = [pool.submit(deed) for deed in deeds]
            if is_killed:
                time.sleep(patience_s)
                self.stage.did.append("kill -9")
                self.stage.house.kill()
            for task in done:
                task.result()
        self.agents.resync()
        if is_killed:
            self.stage.tally = Tally()
        self.agents.prove(random.sample(list(self.agents.minds), 2))
        self.stage.settle()
        if fate.random() < 0.1:
            self._spoil(fate)

    def _stranger(self, random: Random) -> Deed:
        text = f"you like the {random.choice(WORDS)} " * random.randrange(1, 60)
        kind = random.choice(
            ("chat", "chat", "messages", "responses", "completions", "bad", "long")
        )
        leaves = random.randrange(1, 6) if random.random() < 0.3 else None
        return lambda: self.stage.hear(*self.stage.wire.stranger(kind, text, leaves))

    def _housework(self, random: Random) -> Deed:
        slot = random.randrange(3)
        name = f"{random.randrange(4)}.bin"
        salt = random.randrange(9)
        file = {"filename": name}
        spoiled = {200, 400, 404, 503, 507}
        prefix = {"name": f"p{salt}", "text": f"{WORDS[salt % 8]} " * 150}
        deeds: list[Deed] = [
            lambda: self.stage.ask(f"/slots/{slot}?action=save", {200, 400, 503, 507}, body=file),
            lambda: self.stage.ask(f"/slots/{slot}?action=restore", spoiled, body=file),
            lambda: self.stage.ask(f"/slots/{slot}?action=erase", {200, 503}, body={}),
            lambda: self.stage.ask("/cache/clear", {200, 503}, body={}),
            lambda: self.stage.ask("/cache/gc", {200, 503}, body={"max_bytes": salt * 1_000_000}),
            lambda: self.stage.ask("/cache/prefixes", {200, 503}, body=prefix, is_asked=True),
            lambda: self.stage.ask(f"/cache/prefixes/p{salt}", {200, 404, 503}, "DELETE"),
            lambda: self.stage.ask("/slots", {200, 503}, "GET"),
            lambda: self.stage.ask("/v1/agents", {200, 503}, "GET"),
        ]
        return random.choice(deeds)

    def _load(self, model: str) -> None:
        reply = self.stage.ask("/v1/models/load", {200, 409, 503}, body={"preset": model})
        self.stage.count(n_swaps=int(reply.status == 200))

    def _meddle(self, chance: float) -> None:
        done = meddle(self.stage.house.home.root, Random(chance))
        self.stage.did.append(done)
        self.stage.count(n_meddled=bool(done))

    def _spoil(self, random: Random) -> None:
        """A history is cut in half; its agent is told, and sends all of it once."""
        name = random.choice(list(self.agents.minds))
        path = self.stage.house.home.agents / name / "history.json"
        if path.exists() and path.stat().st_size > 10:
            os.truncate(path, path.stat().st_size // 2)
            self.agents.minds[name].is_spoiled = True
            self.stage.ask(f"/v1/agents/{name}/history", {409}, "GET")


def main(seed: int, minutes: float) -> None:
    """Prints what the run came to."""
    root = Path(tempfile.mkdtemp(prefix="chaos-"))
    end = time.monotonic() + 60 * minutes
    print(f"seed {seed}, {minutes} minutes, in {root}", flush=True)
    print(Chaos(root, seed).run(lambda _: time.monotonic() > end), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
