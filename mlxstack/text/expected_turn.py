"""The turn that is expected after an answer, with a sentinel for its unknown words."""

from msgspec.structs import replace

from mlxstack.core.conversation import Conversation, Message, Role

UNKNOWN = "sxunknown0"
"""ASCII letters, which templates write as they are, also inside of JSON."""


def continued(conversation: Conversation, answer: Message) -> Conversation:
    """The conversation as its client will likely go on.

    The results of the calls of the answer follow; the user speaks if it has none.
    """
    results = (
        Message(Role.TOOL, UNKNOWN, tool_call_id=call.id, name=call.name)
        for call in answer.tool_calls
    )
    following = tuple(results) or (Message(Role.USER, UNKNOWN),)
    return replace(
        conversation,
        messages=(*conversation.messages, answer, *following),
        add_generation_prompt=True,
        continue_final=False,
    )
