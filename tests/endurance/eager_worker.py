"""Worker that shares prefixes and begins next turns wherever it may: `... eager_worker PRESET`.

A small model on a CPU gains nothing by live sharing, and clients of a test pause shortly, answer
with few tokens and seldom go on, so that decisions about cost would leave both unused.
"""

import sys

from mlxstack.cli.main import main
from mlxstack.engine import core
from mlxstack.policy.kv.shared_prefixes import MIN_TOKENS, SharingCosts
from mlxstack.policy.scheduling import early_history
from mlxstack.service.parts import early_turns

PAUSE_S = 0.05

if __name__ == "__main__":
    core.measure_sharing = lambda *_: [SharingCosts(MIN_TOKENS, 1.0, 0.5)]  # type: ignore[attr-defined]
    early_turns.PAUSE_S = PAUSE_S
    early_history.FEWEST_TOKENS = 1
    early_history.MOST_WASTED = 1_000_000
    sys.argv = ["mlx-stack", "serve", sys.argv[1]]
    main()
