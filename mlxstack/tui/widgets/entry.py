"""A line to write in, in which keys act in the order in which they come."""

from textual.binding import Binding
from textual.events import Key
from textual.widgets import Input

ACTIONS = {
    key.strip(): binding.action
    for binding in Input.BINDINGS
    if isinstance(binding, Binding)
    for key in binding.key.split(",")
}


class Entry(Input):
    """Over a network keys come in bursts.

    The toolkit lets keys with a meaning wander up to the app before they act; letters that came
    after them would act first.
    """

    async def on_key(self, event: Key) -> None:
        """What has a meaning acts at once."""
        action = ACTIONS.get(event.key)
        if action is not None:
            event.stop()
            event.prevent_default()
            await self.run_action(action)
