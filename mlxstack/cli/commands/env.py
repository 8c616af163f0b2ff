"""`env` and `run`: point a coding agent at a running service."""

import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn
from urllib.parse import urlsplit

import typer

from mlxstack.cli.completion import preset_names
from mlxstack.cli.exit_codes import Misuse
from mlxstack.cli.output import confirm, emit, is_interactive, note
from mlxstack.cli.service_request import ServiceOptions
from mlxstack.cli.start_choice import ModelToStart
from mlxstack.cli.verbs import VerbResult
from mlxstack.features.receipts.mode import ReceiptMode

if TYPE_CHECKING:
    from mlxstack.cli.target import ServiceTarget
    from mlxstack.host.coding_clients import ClientSetup, Endpoint
    from mlxstack.host.home import Home

NAMES = (
    "claude", "codex", "opencode", "aider", "pi", "qwen", "hermes", "openclaw", "openai",
)  # fmt: skip
HEAD_S = 2.0
INSTALLS = {
    "claude": "npm install -g @anthropic-ai/claude-code",
    "codex": "npm install -g @openai/codex",
    "opencode": "npm install -g opencode-ai",
    "aider": "uv tool install aider-chat",
    "pi": "npm install -g @earendil-works/pi-coding-agent",
    "qwen": "npm install -g @qwen-code/qwen-code",
    "hermes": "uv tool install hermes-agent",
    "openclaw": "npm install -g openclaw",
}


Client = Annotated[
    str, typer.Argument(metavar="|".join(NAMES), help="The client.", autocompletion=lambda: NAMES)
]

Anyway = Annotated[
    bool, typer.Option("--anyway", help="Start it even where its prompts do not fit into a slot.")
]

ShownReceipt = Annotated[
    ReceiptMode,
    typer.Option(
        "--receipt",
        help="Show the receipt of each turn in Claude Code, opencode and pi; `wrap`: below your "
        "own status line, which `auto` keeps alone.",
    ),
]


def env(client: Client, service: ServiceOptions) -> VerbResult:
    """Print the environment and config of a client.

    For a shell: eval "$(mlx-stack env claude)"
    """
    from mlxstack.host.coding_clients import as_shell, too_small

    where = _running(client, service)
    endpoint = _endpoint(where)
    setup = _setup(client, endpoint, ReceiptMode.AUTO)
    _warn(too_small(client, endpoint) or setup.caution)
    return VerbResult(setup, lambda: emit(as_shell(setup)))


def run(
    context: typer.Context,
    client: Client,
    service: ServiceOptions,
    model: ModelToStart = None,
    anyway: Anyway = False,
    receipt: ShownReceipt = ReceiptMode.AUTO,
) -> None:
    """Start a client on a service.

    What follows `--` is for the client: mlx-stack run claude -- -p "hello"
    After `openai` comes the program: mlx-stack run openai -- python script.py
    """
    from mlxstack.cli.gateway_member import start_member

    where = _running_or_started(client, service, model)
    endpoint = _endpoint(where)
    setup = _setup(client, endpoint, receipt)
    argv = list(context.args)
    if setup.program:
        argv = [setup.program, *setup.options, *(context.args or setup.default_arguments)]
    program = _path_of(argv)
    if not anyway:
        _check_context(client, endpoint)
    start_member(where)
    _warn(setup.caution)
    if setup.hint is not None:
        note(setup.hint)
    _write(setup)
    _prepare_head(client, where)
    _become(program, argv, setup)


def _prepare_head(client: str, where: "ServiceTarget") -> None:
    """Let the service compute the client's last head, while the client starts."""
    from mlxstack.core.errors import StackError

    body = {"client": client, "folder": str(Path.cwd())}
    # An older service has no heads, and a client starts without one.
    with suppress(StackError):
        where.ask(lambda api: api.post("/heads", body), where.member, timeout_s=HEAD_S)


def _running(client: str, service: ServiceOptions) -> "ServiceTarget":
    from mlxstack.cli.start_offer import refuse_without_service
    from mlxstack.cli.target import target
    from mlxstack.host.home import home_from

    _check(client)
    home = home_from(os.environ)
    if service == ServiceOptions():
        refuse_without_service(home)
    return target(home, *service)


def _running_or_started(client: str, service: ServiceOptions, model: str | None) -> "ServiceTarget":
    """The service, started for `model`, or after a question where nothing runs."""
    from mlxstack.cli.start_offer import name_of, running_or_offered
    from mlxstack.cli.target import target
    from mlxstack.host.home import home_from

    _check(client)
    home = home_from(os.environ)
    if service == ServiceOptions() and model is None:
        return running_or_offered(home, client)
    return target(home, name_of(home, *service, model), service.url)


def _check(client: str) -> None:
    """Raise Misuse for an unknown client, suggesting verbs for a model."""
    from mlxstack.config.preset_reflection import suggestion
    from mlxstack.host.coding_clients import CLIENTS

    if client in CLIENTS:
        return
    if "/" in client or client in preset_names():
        raise Misuse(
            f"`{client}` is a model, and `run` starts a client: `mlx-stack run claude --model "
            f"{client}`; `mlx-stack chat {client}` talks to it"
        )
    raise Misuse(f"no client is called `{client}`{suggestion(client, CLIENTS)}")


def _check_context(client: str, endpoint: "Endpoint") -> None:
    """Ask whether to start a client that cannot work.

    Raises SetupError in a pipe, or for a no.
    """
    from mlxstack.core.errors import SetupError
    from mlxstack.host.coding_clients import too_small

    reason = too_small(client, endpoint)
    if reason is None:
        return
    question = f"{reason[0].upper()}{reason[1:]}. Start it all the same?"
    if is_interactive() and confirm(question, default=False, err=True):
        return
    raise SetupError(
        f"{reason}; `mlx-stack plan` names what fits this machine with longer slots, "
        "`mlx-stack chat` needs no more than this one, and `--anyway` starts it all the same"
    )


def _setup(client: str, endpoint: "Endpoint", receipt: ReceiptMode) -> "ClientSetup":
    from msgspec.structs import replace

    from mlxstack.features.receipts.client_hooks import claude_place, with_receipt
    from mlxstack.host.coding_clients import CLIENTS
    from mlxstack.host.home import home_from

    home = home_from(os.environ)
    setup = CLIENTS[client](endpoint, _folder(home, client, endpoint.url))
    place = claude_place(os.environ, Path.cwd())
    setup = with_receipt(client, setup, endpoint, receipt, place)
    return replace(setup, variables=setup.variables | _unproxied(endpoint.url))


def _unproxied(url: str) -> dict[str, str]:
    """Variables that keep a service of this machine from the proxy."""
    from mlxstack.config.preset_checks import is_loopback

    host = urlsplit(url).hostname or ""
    if not (is_loopback(host) and any(name.lower().endswith("_proxy") for name in os.environ)):
        return {}
    excluded = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    return dict.fromkeys(("no_proxy", "NO_PROXY"), f"{excluded},{host}".lstrip(","))


def _member_endpoint(home: "Home", where: "ServiceTarget") -> "Endpoint | None":
    """Endpoint of a gateway's member, running or not, else None."""
    from mlxstack.cli.target import gateway_spec, known_service
    from mlxstack.host.coding_clients import Endpoint

    if where.name is None or where.member is None:
        return None
    spec = gateway_spec(home, known_service(home, where.name))
    members = spec.members if spec is not None else ()
    return next(
        Endpoint(
            where.url,
            member.name,
            member.service.n_ctx,
            where.api_key,
            accepts_images="vision" in member.model.capabilities,
        )
        for member in members
        if member.name == where.member
    )


def _endpoint(where: "ServiceTarget") -> "Endpoint":
    """Endpoint of a service, or of a gateway's member."""
    from mlxstack.host.coding_clients import Endpoint
    from mlxstack.host.home import home_from

    member = _member_endpoint(home_from(os.environ), where)
    if member is not None:
        return member
    props = where.ask(lambda client: client.props(), timeout_s=10.0)
    n_ctx = props.default_generation_settings.n_ctx
    model = props.model_alias or Path(props.model_path).name or "mlx-stack"
    accepts_images = props.modalities.get("vision", False)
    return Endpoint(where.url, model, n_ctx, where.api_key, accepts_images=accepts_images)


def _folder(home: "Home", client: str, url: str) -> Path:
    """Folder per client and service, where the client's own files stay."""
    place = url.partition("://")[2]
    return home.root / "clients" / client / "".join(c if c.isalnum() else "_" for c in place)


def _warn(caution: str | None) -> None:
    if caution is not None:
        note(f"warning: {caution}")


def _write(setup: "ClientSetup") -> None:
    from mlxstack.host.home import make_folder
    from mlxstack.host.services import write_private

    for path, text in setup.files.items():
        make_folder(Path(path).parent)
        write_private(Path(path), text.encode())


def _path_of(argv: list[str]) -> str:
    """Path of the program.

    Raises Misuse without a program, NotFound where it is not installed.
    """
    from mlxstack.core.errors import NotFound

    if not argv:
        raise Misuse("name the program: mlx-stack run openai -- python script.py")
    program = shutil.which(argv[0])
    if program is None:
        command = INSTALLS.get(argv[0])
        remedy = "install it first"
        if command:
            remedy = f"install it with `{command}`"
        raise NotFound(f"there is no program `{argv[0]}` in PATH; {remedy}")
    return program


def _become(program: str, argv: list[str], setup: "ClientSetup") -> NoReturn:
    inherited = {key: value for key, value in os.environ.items() if key not in setup.unset}
    sys.stdout.flush()
    os.execve(program, argv, inherited | setup.variables)
