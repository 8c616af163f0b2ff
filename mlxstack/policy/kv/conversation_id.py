"""Conversation identity: names conversations by their user turns.

A conversation keeps its identity as long as it only grows. A client's own name for it (a hint)
decides between conversations with equal turns; it never joins two that differ. Conversations
under different salts are never the same.
"""

import hashlib
import re
from collections import OrderedDict

from msgspec import Struct

from mlxstack.core.conversation import Conversation, Role

MAX_KNOWN = 512
"""Maximum number of remembered conversations; the least recent go first."""

MAX_TURNS = 1024
"""Turns per conversation that are remembered and compared."""

INPUT_ROLES = frozenset({Role.USER, Role.TOOL})
N_DIGITS = 8
IMPLICIT = re.compile(
    rf"(?:chat|claude|codex|opencode|key|user)-[0-9a-f]{{{N_DIGITS}}}(?:\.[0-9]+)?"
)
"""Names of `ConversationNamer`: client of the hint, and a digest.

Without a hint the client is "chat".
"""


class KnownConversation(Struct, frozen=True):
    """Named conversation: digests of its first turns, and its client's hint."""

    name: str
    turns: tuple[str, ...]
    n_turns: int
    hint: str | None = None


class ConversationNamer:
    """Names conversations, deterministically by their order of arrival. Single owner."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, KnownConversation] = OrderedDict()
        self._by_first: dict[str, dict[str, None]] = {}
        """Names of known conversations by their first turn, which all that one goes on share."""

    def name(self, turns: tuple[str, ...], hint: str | None) -> str:
        """The name of the conversation that these turns continue, or begin."""
        earlier = self._find(turns, hint)
        n_turns = len(turns)
        if earlier is None:
            name = self._fresh(turns[0], hint)
        else:
            name = earlier.name
            hint = hint or earlier.hint
            if earlier.n_turns > n_turns:
                turns = earlier.turns
                n_turns = earlier.n_turns
        self._known[name] = KnownConversation(name, turns[:MAX_TURNS], n_turns, hint or None)
        self._known.move_to_end(name)
        same_first = self._by_first.setdefault(turns[0], {})
        same_first.pop(name, None)
        same_first[name] = None
        if len(self._known) > MAX_KNOWN:
            self._forget(self._known.popitem(last=False)[1])
        return name

    def expected(self, turns: tuple[str, ...], hint: str | None) -> str:
        """Name that `name` would give these turns."""
        earlier = self._find(turns, hint)
        if earlier is not None:
            return earlier.name
        return self._fresh(turns[0], hint)

    def _find(self, turns: tuple[str, ...], hint: str | None) -> KnownConversation | None:
        same_first = [self._known[name] for name in self._by_first.get(turns[0], ())]
        candidates = [c for c in same_first if _goes_on(c, turns, hint)]
        return max(
            candidates, key=lambda c: (hint is not None and c.hint == hint, c.n_turns), default=None
        )

    def _forget(self, conversation: KnownConversation) -> None:
        names = self._by_first[conversation.turns[0]]
        del names[conversation.name]
        if not names:
            del self._by_first[conversation.turns[0]]

    def _fresh(self, first: str, hint: str | None) -> str:
        client = hint.partition(":")[0] if hint else "chat"
        stem = f"{client}-{first[:N_DIGITS]}"
        name = stem
        n = 2
        while name in self._known:
            name = f"{stem}.{n}"
            n = n + 1
        return name


def is_implicit(name: str) -> bool:
    """Whether a name has the form of those that `Names` gives."""
    return IMPLICIT.fullmatch(name) is not None


def user_turn_digests(conversation: Conversation, salt: str = "") -> tuple[str, ...]:
    """Digests of the input turns; one for the head and first turn.

    Another salt gives other digests and another name, so that a name cannot be guessed from text.

    Answers are left out, since clients send them back reformatted; so are system messages inside
    the conversation, which some clients change at every turn.
    """
    turns: list[str] = []
    key = b""
    if salt:
        key = hashlib.blake2b(salt.encode()).digest()
    head = hashlib.blake2b(digest_size=16, key=key)
    for message in conversation.messages:
        if message.role in INPUT_ROLES:
            head.update(f"\n{message.role}\n{message.text}".encode())
            turns.append(head.hexdigest())
            head = hashlib.blake2b(digest_size=16)
        elif message.role is Role.SYSTEM and not turns:
            head.update(f"\nsystem\n{message.text}".encode())
    return tuple(turns) or (head.hexdigest(),)


def _goes_on(earlier: KnownConversation, turns: tuple[str, ...], hint: str | None) -> bool:
    """Whether the turns continue the conversation, or cut it back.

    Only the same client cuts a conversation back.
    """
    n = min(len(earlier.turns), len(turns))
    if earlier.turns[:n] != turns[:n]:
        return False
    is_same_client = earlier.hint == hint
    if len(turns) > earlier.n_turns:
        return True
    if len(turns) == earlier.n_turns:
        return is_same_client or not (earlier.hint and hint)
    return is_same_client and hint is not None
