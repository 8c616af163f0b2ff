"""Modules that run as processes of their own: who starts which is listed, as imports are.

A process does not import its starter, so that import-linter does not see the arrow.
"""

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "mlxstack"
COMMAND = "mlxstack.cli.main"
DEVICE = "mlxstack.engine.device_facts"

STARTS = {
    "mlxstack.bench.dev.cli_startup": {COMMAND},
    "mlxstack.bench.dev.gateway": {COMMAND},
    "mlxstack.bench.dev.headless_tui": {COMMAND},
    "mlxstack.bench.dev.in_process_trials": {"mlxstack.bench.dev.in_process"},
    "mlxstack.bench.environment": {DEVICE},
    "mlxstack.bench.servers": {COMMAND},
    "mlxstack.cli.commands.install": {COMMAND},
    "mlxstack.cli.doctor": {COMMAND, DEVICE},
    "mlxstack.cli.local_machine": {COMMAND},
    "mlxstack.cli.start_offer": {COMMAND},
    "mlxstack.cli.verification.mac_run": {COMMAND, "mlxstack.engine.checks"},
    "mlxstack.cli.web_dashboard": {COMMAND},
    "mlxstack.control.gateway": {"mlxstack.gateway"},
    "mlxstack.control.start": {COMMAND},
    # It tells a gateway by this module.
    "mlxstack.features.receipts.receipt_line": {"mlxstack.gateway"},
    "mlxstack.features.ranks.probe": {"mlxstack.features.ranks.files_digest"},
    "mlxstack.features.ranks.hosts": {"mlxstack.features.ranks.follower"},
    # It also tells a gateway by this module.
    "mlxstack.host.services": {"mlxstack.control.supervisor", "mlxstack.gateway"},
    "mlxstack.planner.model_shapes": {"mlxstack.engine.model.model_shape"},
    "mlxstack.features.formats.grammar.client_grammars": {
        "mlxstack.features.formats.grammar.grammar_worker"
    },
    "mlxstack.text.images.bounds": {"mlxstack.text.images.image_worker"},
    "mlxstack.text.rendering.renderers": {"mlxstack.text.rendering.worker"},
}
"""Entries that each module names; one that names itself has its starter beside it."""


def sources() -> dict[str, str]:
    """Source of each module, packages by the name of their folder."""
    files = (file for file in PACKAGE.rglob("*.py") if "training" not in file.parts)
    return {_module(file): file.read_text("utf-8") for file in files}


def _module(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def names_in(source: str) -> set[str]:
    """Names of modules in a source, without those of loggers."""
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    loggers = [call for call in calls if "getLogger" in ast.unparse(call.func)]
    ignored = {argument for call in loggers for argument in call.args}
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return {str(text.value) for text in texts if text not in ignored}


def test_who_starts_which_process_is_listed() -> None:
    modules = sources()
    entries = {
        name.removesuffix(".__main__")
        for name, source in modules.items()
        if name.endswith(".__main__") or '__name__ == "__main__"' in source
    }
    starts = defaultdict[str, set[str]](set)
    for name, source in modules.items():
        for entry in names_in(source) & entries - {name}:
            starts[name].add(entry)
    assert starts == STARTS


def test_the_programs_that_are_started_by_their_files_are_the_modules() -> None:
    from mlxstack.bench.environment import DEVICE_PROGRAM
    from mlxstack.planner.model_shapes import MODULE, PROGRAM

    for module, program in ((MODULE, PROGRAM), (DEVICE, DEVICE_PROGRAM)):
        assert PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py") == program
        assert program.is_file()
