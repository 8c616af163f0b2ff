"""Options of `up` and `install` that choose what is started."""

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from mlxstack.cli.completion import preset_argument, preset_names
from mlxstack.cli.exit_codes import Misuse
from mlxstack.cli.output import note
from mlxstack.cli.units import tokens_of

if TYPE_CHECKING:
    from mlxstack.control.start import StartRequest
    from mlxstack.host.home import Home

Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key, such as slots.count=5."),
]
Ctx = Annotated[
    int | None,
    typer.Option(
        "--ctx", metavar="TOKENS", parser=tokens_of, help="Context per slot, such as 64k."
    ),
]
Slots = Annotated[int | None, typer.Option("--slots", min=1, max=256, help="Number of slots.")]
KvBits = Annotated[int | None, typer.Option("--kv-bits", help="KV precision: 16, 8 or 4.")]
Models = Annotated[
    list[str] | None,
    preset_argument("Preset, hub id or model folder. Several get one address.", "MODEL"),
]
Draft = Annotated[
    str | None,
    typer.Option("--draft", metavar="MODEL", help="Small model that drafts for this one."),
]
ModelToStart = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Preset, hub id or folder to start first, where it is not running.",
        autocompletion=preset_names,
    ),
]
ModeOption = Annotated[
    str | None, typer.Option("--mode", help="The members of this mode, at one address.")
]
AnyModel = Annotated[
    bool, typer.Option("--any-model", help="Every model on this disk, at one address.")
]
ServiceName = Annotated[str | None, typer.Option("--name", help="Name of the service.")]
HostOption = Annotated[str | None, typer.Option("--host", help="Address to listen on.")]
PortOption = Annotated[
    int | None, typer.Option("--port", help="Port to listen on; 0 takes a free one.")
]
HostsOption = Annotated[
    str | None,
    typer.Option(
        "--hosts", metavar="A,B", help="Machines that compute it together, this one first."
    ),
]

ONE_MODEL = "--ctx, --slots, --kv-bits, --draft and --hosts go with one model"
GATEWAY = "gateway"
"""Name of a gateway that has none."""


class StartChoice(NamedTuple):
    """One model with its options, or the members of a gateway."""

    models: Models = None
    mode: ModeOption = None
    any_model: AnyModel = False
    ctx: Ctx = None
    slots: Slots = None
    kv_bits: KvBits = None
    draft: Draft = None
    name: ServiceName = None
    host: HostOption = None
    port: PortOption = None
    hosts: HostsOption = None
    sets: Set = None

    @property
    def is_gateway(self) -> bool:
        """Whether one address serves several models."""
        return self.any_model or len(self.models or ()) != 1

    @property
    def gateway_name(self) -> str:
        return self.name or self.mode or GATEWAY

    @property
    def listening(self) -> dict[str, Any]:
        """Fields of the gateway's server section that options give."""
        options = {"host": self.host, "port": self.port, "strict_models": self.any_model or None}
        return {key: value for key, value in options.items() if value is not None}

    def check(self) -> None:
        """Raise Misuse for options that do not go together."""
        if bool(self.models or self.any_model) == (self.mode is not None):
            raise Misuse(
                "give a preset, hub id or model folder, a mode with --mode, or --any-model"
            )
        of_one_model = (self.ctx, self.slots, self.kv_bits, self.draft, self.hosts)
        if self.is_gateway and any(of_one_model):
            raise Misuse(ONE_MODEL)
        if self.mode is not None and self.sets:
            raise Misuse(
                "--set goes with models; the options of a mode's members are in the mode's file"
            )

    def requests(self, home: "Home") -> "list[StartRequest]":
        """Start requests: one, or those of a gateway's members. Raises SetupError."""
        from mlxstack.control import gateway, mode_switch
        from mlxstack.control.start import request_for
        from mlxstack.policy.memory.capacity_advice import SlotSizes

        models = self.models or []
        sets = tuple(self.sets or ())
        if self.mode is not None:
            return mode_switch.requests_of(self.mode, home)
        if self.any_model:
            on_disk = gateway.find_all(home, models, sets)
            for name, reason in on_disk.left_out.items():
                note(f"left out: {name}: {reason}")
            return list(on_disk.requests)
        if self.is_gateway:
            return [request_for(model, home, SlotSizes(), sets) for model in models]
        sizes = SlotSizes(self.slots, self.ctx, self.kv_bits)
        return [request_for(models[0], home, sizes, (*sets, *self._settings()))]

    def arguments(self, home: "Home") -> list[str]:
        """The choice as arguments of `up`, with models that any folder finds.

        Paths in the values of `--set` stay relative to the current folder. Raises SetupError.
        """
        from mlxstack.config.presets import from_anywhere

        arguments = [_from_anywhere(model, home) for model in self.models or ()]
        options = self
        if self.draft is not None:
            options = self._replace(draft=from_anywhere(self.draft))
        for field, value in options._asdict().items():
            if field == "models" or value is None or value is False:
                continue
            flag = "--set"
            if field != "sets":
                flag = f"--{field.replace('_', '-')}"
            if value is True:
                arguments.append(flag)
                continue
            for text in value if isinstance(value, list) else [value]:
                arguments += [flag, str(text)]
        return arguments

    def _settings(self) -> list[str]:
        """Options of one model as settings; a draft model enables drafts."""
        values = {
            "server.host": self.host,
            "server.port": self.port,
            "name": self.name,
            "model.draft": self.draft,
            "speculation": None if self.draft is None else "auto",
            "hosts": None if self.hosts is None else f"[{self.hosts}]",
        }
        return [f"{key}={value}" for key, value in values.items() if value is not None]


def _from_anywhere(model: str, home: "Home") -> str:
    """Preset name, hub id or absolute path. Raises SetupError."""
    from mlxstack.config import presets
    from mlxstack.models import reference

    if presets.is_known(model, home):
        return presets.from_anywhere(model)
    return reference.resolve(model, home).id
