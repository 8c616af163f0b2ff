"""Template variables that switch thinking, found by probing.

Publishers name them as they like: `preserve_thinking`, `clear_thinking`, `thinking_mode` ... What
a variable does is seen by rendering one conversation with each of its values.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from mlxstack.text.template.capabilities import SYSTEM, TOOL, answer, call, calling, result, user
from mlxstack.text.tokens.cached_tokenizer import common_length

LEVELS = ("minimal", "low", "medium", "high", "xhigh", "max")
"""Levels of effort, from least to most, as clients send them."""
COMMON_LEVELS = ("low", "medium", "high")
OFF_WORDS = frozenset({"none", "no_think", "nothink", "off", "disabled", "disable", "chat", "no"})
ON_WORDS = frozenset({"on", "enabled", "enable", "think", "thinking", "yes", "always"})
SWITCH = re.compile(r"think|thought|reason|effort|budget", re.IGNORECASE)
INVERSE = re.compile(r"\b(?:no|disable|skip|hide|without)_", re.IGNORECASE)
EFFORT = re.compile(r"effort|strength|level", re.IGNORECASE)
BUDGET = re.compile(r"budget", re.IGNORECASE)
WORD = "sxword0"
THOUGHTS = ("sxthought1", "sxthought2")
LAST_TEXT = "sxtext2"
HISTORY = (
    user(0),
    calling(call(1), thought=THOUGHTS[0]),
    result(1),
    answer(2, THOUGHTS[1]),
    user(3),
)
ASKED = (SYSTEM, user(0))


Tried = Callable[..., str | None]
"""`ChatTemplate.tried`: the rendering of a conversation with variables; None if refused."""


class TemplateSwitches(Struct, frozen=True):
    """Variables of a template by what they do."""

    keep: Mapping[str, Any] = field(default_factory=dict)
    """Make it write the thoughts of earlier turns, so that a prompt begins with the one before and
    its answer."""
    on: Mapping[str, Any] = field(default_factory=dict)
    """Switch thinking on."""
    off: Mapping[str, Any] = field(default_factory=dict)
    """Switch thinking off."""
    levels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Levels of effort that each variable for it takes."""
    keeps_thoughts: bool = False
    """It writes the thoughts of earlier turns, by `keep` or anyway."""

    def effort(self, asked: str) -> dict[str, str]:
        """Variables for the level of effort nearest to the requested one."""
        return {name: nearest(asked, levels) for name, levels in self.levels.items()}


NO_SWITCHES = TemplateSwitches()


def nearest(asked: str, levels: Sequence[str]) -> str:
    """Level nearest to `wanted`, the higher of two; unknown ones stay."""
    if asked in levels or asked not in LEVELS or not levels:
        return asked
    place = LEVELS.index(asked)
    return min(levels, key=lambda level: (abs(LEVELS.index(level) - place), -LEVELS.index(level)))


def find_switches(tried: Tried, variables: Mapping[str, Sequence[str]]) -> TemplateSwitches:
    """Switches among a template's free variables, by compared texts."""
    on: dict[str, Any] = {}
    off: dict[str, Any] = {}
    levels: dict[str, tuple[str, ...]] = {}
    for name, texts in variables.items():
        if not SWITCH.search(name):
            continue
        if EFFORT.search(name) and (taken := _levels(tried, name)):
            levels[name] = taken
        _read_switch(tried, name, texts, on, off)
    lowest = {
        name: taken[0]
        for name, taken in levels.items()
        if not off and _asked(tried, {name: taken[0]}) != _asked(tried, {})
    }
    keep = _keep(tried, variables)
    keeps = _keeps(tried, {"enable_thinking": True, **keep})
    return TemplateSwitches(keep, on, {**lowest, **off}, levels, keeps)


def _asked(tried: Tried, variables: dict[str, Any]) -> str | None:
    return tried(ASKED, (), variables, opens_answer=True)


def _read_switch(
    tried: Tried, name: str, texts: Sequence[str], on: dict[str, Any], off: dict[str, Any]
) -> None:
    """Enter a variable's values that switch thinking, if any."""
    plain = _asked(tried, {})
    if BUDGET.search(name):
        if _asked(tried, {name: 0}) not in (plain, None):
            off[name] = 0
    elif set(texts) & (OFF_WORDS | ON_WORDS):
        _read_words(tried, name, texts, on, off)
    elif not EFFORT.search(name):
        true = _asked(tried, {name: True})
        false = _asked(tried, {name: False})
        if None not in (true, false) and true != false:
            off[name] = INVERSE.search(name) is not None
            on[name] = not off[name]


def _read_words(
    tried: Tried, name: str, texts: Sequence[str], on: dict[str, Any], off: dict[str, Any]
) -> None:
    """Enter the values of a variable with named levels."""
    plain = _asked(tried, {})
    silent = (word for word in (*texts, *sorted(OFF_WORDS)) if word in OFF_WORDS)
    chosen = next((word for word in silent if _asked(tried, {name: word}) is not None), None)
    if chosen is None:
        return
    off[name] = chosen
    without = _asked(tried, {name: chosen})
    if plain == without:
        loud = (word for word in (*texts, "high", *sorted(ON_WORDS)) if word not in OFF_WORDS)
        choices = (word for word in loud if _asked(tried, {name: word}) not in (None, without))
        if (word := next(choices, None)) is not None:
            on[name] = word


def _levels(tried: Tried, name: str) -> tuple[str, ...]:
    """Levels of a variable; the common ones where only quoted."""
    taken = tuple(level for level in LEVELS if _asked(tried, {name: level}) is not None)
    texts = {_asked(tried, {name: level}) for level in taken}
    if len(texts) < 2:
        return ()
    word = _asked(tried, {name: WORD})
    if word is not None and WORD in word:
        return COMMON_LEVELS
    return taken


def _keep(tried: Tried, variables: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Variable that keeps earlier thoughts, where they are dropped otherwise."""
    base = {"enable_thinking": True}
    if _keeps(tried, base):
        return {}
    plain = tried(ASKED, (TOOL,), base, opens_answer=True)
    for name, texts in variables.items():
        for value in (True, False, *texts):
            changed = {**base, name: value}
            if not _keeps(tried, changed):
                continue
            if tried(ASKED, (TOOL,), changed, opens_answer=True) == plain:
                return {name: value}
    return {}


def _keeps(tried: Tried, variables: dict[str, Any]) -> bool:
    """Whether a later prompt extends an earlier one with its answer."""
    later = tried(HISTORY, (TOOL,), variables)
    closed = tried(HISTORY[:-1], (TOOL,), variables)
    if later is None or closed is None or any(thought not in later for thought in THOUGHTS):
        return False
    return common_length(later, closed) >= closed.rfind(LAST_TEXT) + len(LAST_TEXT)
