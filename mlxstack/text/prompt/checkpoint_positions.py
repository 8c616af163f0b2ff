"""Checkpoint positions of a prompt: ends of parts that other prompts share."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from mlxstack.text.tokens.cached_tokenizer import CachedTokenizer, Prompt

MAX_TURN_ENDS = 4
MIN_GAP = 8
SMALL_TAIL = 32
MAX_IN_VAIN = 2**30


def head_end(encoder: CachedTokenizer, prompt: Prompt, char: int) -> int:
    """The token where a shared head that reaches to `char` ends.

    It is the beginning of the next turn, where that is near, so that prompts which go on
    differently still agree on it.
    """
    piece = prompt.piece_at(char)
    if char - prompt.chars[piece] <= SMALL_TAIL:
        return prompt.places[piece]
    return encoder.place(prompt, char)


def turn_ends(text: str, turns: Sequence[tuple[str, bool]], end: int) -> list[int]:
    """End characters of the last turns before `end`, and the user's.

    `turns` are (text, whether of a user) of user and tool messages, in order. They are looked
    for from the end, so that the cost does not grow with the history; a text which the
    template rewrote is passed over, until MAX_IN_VAIN characters were looked through for such.
    """
    # Backwards letters, since `find` takes linear time and `rfind` does not.
    backwards = text[end - 1 :: -1] if end else ""
    n_passed = 0
    in_vain = 0
    ends: list[int] = []
    for content, is_user in reversed(turns):
        stripped = content.strip()
        if in_vain > MAX_IN_VAIN:
            break
        if not stripped or (len(ends) >= MAX_TURN_ENDS and not is_user):
            continue
        place = backwards.find(stripped[::-1], n_passed)
        if place < 0:
            in_vain += len(backwards) - n_passed
            continue
        ends.append(end - place)
        n_passed = place + len(stripped)
        if is_user and len(ends) >= MAX_TURN_ENDS:
            break
    return ends


def after_turn(prompt: Prompt, char: int) -> int | None:
    """Token after the special token that closes the turn at `char`."""
    piece = prompt.piece_from(char)
    if piece == len(prompt.chars):
        return None
    if piece + 1 == len(prompt.chars):
        return prompt.places[piece] + 1
    tail = prompt.marked[prompt.chars[piece] : prompt.chars[piece + 1]]
    is_closed = len(tail) < SMALL_TAIL and tail[-1:].isspace()
    if is_closed:
        return prompt.places[piece + 1]
    return prompt.places[piece] + 1


def tidy(head: int, ends: Iterable[int | None], n_tokens: int) -> tuple[int, ...]:
    """Ascending positions in the prompt, with the head, without close neighbors."""
    positions = sorted({min(end, n_tokens - 1) for end in ends if end is not None and end > head})
    apart = [a for a, b in pairwise([*positions, n_tokens + MIN_GAP]) if b - a >= MIN_GAP]
    return tuple(cut for cut in (head, *apart) if 0 < cut < n_tokens)
