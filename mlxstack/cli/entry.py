"""Entry of the `mlx-stack` command, with a short way for `why`."""

import os
import sys

from mlxstack.features.receipts.receipt_line import quick_line


def main() -> None:
    """Print the receipt that `why` asks for, or run the command."""
    if line := quick_line(sys.argv[1:], os.environ):
        sys.stdout.write(f"{line}\n")
        return
    from mlxstack.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
