"""Worker that begins next turns wherever it may: `... eager_worker PRESET`.

Clients of a test pause shortly, answer with few tokens and seldom go on, so that decisions about
cost would leave early turns unused.
"""

import sys

from mlxstack.cli.main import main
from mlxstack.features.early_turns import history as early_history
from mlxstack.features.early_turns import service as early_turns

PAUSE_S = 0.05

if __name__ == "__main__":
    early_turns.PAUSE_S = PAUSE_S
    early_history.MIN_TOKENS = 1
    early_history.MAX_WASTED = 1_000_000
    sys.argv = ["mlx-stack", "serve", sys.argv[1]]
    main()
