"""What can be done to a whole service: change its model, or the mode of its computer."""

from mlxstack.core.errors import Unsupported
from mlxstack.core.formatting import printable
from mlxstack.tui.actions.action import Action, ActionContext, ActionInput, ActionTarget, Aim
from mlxstack.tui.state import DashboardState
from mlxstack.tui.views.formatting import short_time


async def swap(hands: ActionContext, aim: Aim) -> str:
    """Requests wait until the new model is there."""
    done = await hands.calls.post("/v1/models/load", {"preset": aim.words})
    took = short_time(sum(step["ms"] for step in done.get("steps", ())) / 1000)
    before, now = done.get("before", "the model"), done.get("model", aim.words)
    return f"{before} was changed for {now} in {took}"


async def switch(hands: ActionContext, aim: Aim) -> str:
    """Raises Unsupported when the services run elsewhere."""
    if hands.machine is None:
        raise Unsupported("modes can be switched on the computer of the service only")
    return await hands.machine.switch_mode(aim.words)


def _model(model: DashboardState) -> str:
    return printable(model.frame.service.model, 40) or "the model"


DEEDS: tuple[Action, ...] = (
    Action(
        id="swap",
        key="m",
        label="Model",
        help="Change the model of the service: requests wait, contexts go to disk.",
        target=ActionTarget.SERVICE,
        wants=ActionInput.PRESET,
        describe=lambda model, _: f"Serve which preset instead of {_model(model)}?",
        do=swap,
    ),
    Action(
        id="switch",
        key="o",
        label="Mode",
        help="Switch this computer to a mode: what it does not have stops, what it lacks starts.",
        target=ActionTarget.MACHINE,
        wants=ActionInput.MODE,
        describe=lambda *_: "Switch to which mode? Services that it does not have are stopped.",
        do=switch,
    ),
)
