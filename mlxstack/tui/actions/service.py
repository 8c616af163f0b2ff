"""Actions on the service: model swap and mode switch."""

from functools import partial

from mlxstack.core.errors import Unsupported
from mlxstack.core.formatting import printable, short_time
from mlxstack.tui.actions.action import ActionContext, ActionInput, ActionTarget, Aim, action
from mlxstack.tui.state import DashboardState


def _model(model: DashboardState, _: str) -> str:
    return printable(model.frame.service.model, 40) or "the model"


on_service = partial(action, ActionTarget.SERVICE, _model)
on_model = partial(action, ActionTarget.MODEL, lambda _, key: key)
on_machine = partial(action, ActionTarget.MACHINE, lambda *_: "")


@on_service(
    "m", "Model", "Serve which preset instead of {}?", wants=ActionInput.PRESET, title="Swap model"
)
async def swap(context: ActionContext, aim: Aim) -> str:
    """Swap the model: requests wait, contexts are saved to disk."""
    done = await context.calls.post("/v1/models/load", {"preset": aim.text})
    took = short_time(sum(step["ms"] for step in done.get("steps", ())) / 1000)
    before = done.get("before", "the model")
    now = done.get("model", aim.text)
    return f"{before} was replaced by {now} in {took}"


@on_model("a", "Load", "Load {}.", wants=ActionInput.NOTHING, title="Load model")
async def load(context: ActionContext, aim: Aim) -> str:
    """Load a model of a gateway, before its first request."""
    await context.calls.post("/v1/models/load", {"model": aim.key})
    return f"{aim.key} is loaded"


@on_machine(
    "M",
    "Mode",
    "Switch to which mode? Services outside of it are stopped.",
    wants=ActionInput.MODE,
    is_destructive=True,
    title="Switch mode",
)
async def switch(context: ActionContext, aim: Aim) -> str:
    """Switch this computer to a mode: other services stop, missing ones start."""
    if context.machine is None:
        raise Unsupported("modes can be switched on the computer of the service only")
    return await context.machine.switch_mode(aim.text)


ACTIONS = (swap, load, switch)
