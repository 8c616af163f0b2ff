"""The long runs in full: `python -m tests.endurance`; prints what each came to."""

import sys
import tempfile
from pathlib import Path

from mlxstack.demo import MODEL_DIR
from tests.endurance.clock import clock
from tests.endurance.crowd import crowd
from tests.endurance.cuts import cuts
from tests.endurance.damaged import damaged
from tests.endurance.forged import FORGERIES, forged
from tests.endurance.front import check, front
from tests.endurance.kills import kills
from tests.endurance.lying_member import lying_member
from tests.endurance.many_models import many_models
from tests.endurance.odd_adapters import odd_adapters
from tests.endurance.out_of_memory import Shortage, out_of_memory
from tests.endurance.peers import peers
from tests.endurance.picture_floods import bodies_of, floods, picture_floods
from tests.endurance.planted import planted
from tests.endurance.ranks import ranks_under_faults
from tests.endurance.revivals import revivals
from tests.endurance.roundabout import roundabout
from tests.endurance.salt_timing import salt_timing
from tests.endurance.siege import Force, siege
from tests.endurance.soak import soak
from tests.endurance.thrash import thrash
from tests.endurance.two_homes import two_homes
from tests.features.formats.call_walks import check_all
from tests.models import build

MINUTE_S = 60.0


def main(minutes: float) -> None:
    """`minutes` of random load in all; the other runs have fixed sizes."""
    print("calls of random schemas", check_all(100), flush=True)
    print("verify", planted(), flush=True)
    root = Path(tempfile.mkdtemp(prefix="endurance-"))
    kinds = ("tiny", "tiny-swa", "tiny-hybrid")
    for kind in kinds:
        model = build(root / kind, kind)
        seconds = minutes * MINUTE_S / len(kinds)
        print(kind, crowd(model, root / f"{kind}-home", seconds, seed=1), flush=True)
    for kind, n_requests in (("tiny", 2000), ("tiny-swa", 400), ("tiny-hybrid", 400)):
        print(kind, soak(root / kind, root / f"{kind}-soak", n_requests, seed=1), flush=True)
    for kind in kinds:
        print(kind, cuts(root / kind, root / f"{kind}-cuts", 20, n_engines=20, seed=1), flush=True)
    front_outcome = front(
        root / "front", 2 * minutes * MINUTE_S, n_agents=12, kill_every_s=40, seed=1
    )
    print("gateway", front_outcome, flush=True)
    check(front_outcome)
    for outcome in siege(root / "siege", Force(), n_times=3):
        print(outcome, flush=True)
    print(kills(root / "tiny", root / "kills-home", n_kills=100, seed=1), flush=True)
    print(revivals(MODEL_DIR, root / "revivals", n_blows=10, seed=1), flush=True)
    print("damaged", damaged(root / "damaged", seed=1, n_rounds=40), flush=True)
    for kind in ("tiny", "tiny-hybrid"):
        forgeries = forged(root / kind, root / f"{kind}-forged", 1, 8 * len(FORGERIES))
        print("forged", kind, forgeries, flush=True)
    adapters = odd_adapters(root / "adapters")
    assert not adapters.faults, adapters.faults
    print("adapters", adapters, flush=True)
    print("clock", clock(root / "clock", seed=1, n_rounds=60), flush=True)
    print("two homes", two_homes(root / "homes", seed=1, n_rounds=60), flush=True)
    print("thrash", thrash(root / "thrash", n_clients=300, n_requests=6), flush=True)
    print("salts", salt_timing(root / "salts", n_rounds=30), flush=True)
    print("ranks", ranks_under_faults(root / "ranks", seed=1), flush=True)
    print("peers", peers(root / "peers", seed=1, n_wire=100), flush=True)
    print("lies", lying_member(root / "lies"), flush=True)
    print("many models", many_models(root / "many", n_models=2000), flush=True)
    print("memory", out_of_memory(root / "memory", Shortage(), seed=1), flush=True)
    print("pictures", picture_floods(root / "pictures", bodies_of() | floods()), flush=True)
    print(roundabout(root / "round", n_requests=396, swap_every=20, seed=1), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 5.0)
