"""Actions on the service: model swap and mode switch."""

from mlxstack.core.errors import Unsupported
from mlxstack.core.formatting import printable, short_time
from mlxstack.tui.actions.action import Action, ActionContext, ActionInput, ActionTarget, Aim
from mlxstack.tui.state import DashboardState


async def swap(context: ActionContext, aim: Aim) -> str:
    """Swap the model; requests wait until the new one has loaded."""
    done = await context.calls.post("/v1/models/load", {"preset": aim.text})
    took = short_time(sum(step["ms"] for step in done.get("steps", ())) / 1000)
    before, now = done.get("before", "the model"), done.get("model", aim.text)
    return f"{before} was replaced by {now} in {took}"


async def load(context: ActionContext, aim: Aim) -> str:
    """Load the model: a gateway starts its member."""
    await context.calls.post("/v1/models/load", {"model": aim.key})
    return f"{aim.key} is loaded"


async def switch(context: ActionContext, aim: Aim) -> str:
    """Switch the mode. Raises Unsupported when the services run elsewhere."""
    if context.machine is None:
        raise Unsupported("modes can be switched on the computer of the service only")
    return await context.machine.switch_mode(aim.text)


def _model(model: DashboardState) -> str:
    return printable(model.frame.service.model, 40) or "the model"


ACTIONS: tuple[Action, ...] = (
    Action(
        id="swap",
        key="m",
        label="Model",
        help="Swap the model: requests wait, contexts are saved to disk.",
        target=ActionTarget.SERVICE,
        wants=ActionInput.PRESET,
        describe=lambda model, _: f"Serve which preset instead of {_model(model)}?",
        do=swap,
        title="Swap model",
    ),
    Action(
        id="load",
        key="a",
        label="Load",
        help="Load a model of a gateway, before its first request.",
        target=ActionTarget.MODEL,
        wants=ActionInput.NOTHING,
        describe=lambda _, key: f"Load {key}.",
        do=load,
        title="Load model",
    ),
    Action(
        id="switch",
        key="M",
        label="Mode",
        help="Switch this computer to a mode: other services stop, missing ones start.",
        target=ActionTarget.MACHINE,
        wants=ActionInput.MODE,
        describe=lambda *_: "Switch to which mode? Services outside of it are stopped.",
        is_destructive=True,
        do=switch,
        title="Switch mode",
    ),
)
