"""`bench`: measure a running service, or, in a checkout, mlx-stack itself."""

import typer

from mlxstack.cli.commands import bench_dev

app = typer.Typer(help="Measure speed and memory.", no_args_is_help=True)
app.command("dev")(bench_dev.dev)
