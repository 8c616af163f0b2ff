"""Stop strings: holds back text that may begin one, and trims white space."""

from typing import Any

from mlx_lm.generate import TextStateMachine

NORMAL = "normal"


class WhitespaceTrimmer:
    """Trims line breaks at the beginning, and holds white space back at the end."""

    def __init__(self, *, is_open: bool = False) -> None:
        self._is_open = is_open
        self._held = ""

    def push(self, text: str) -> str:
        """Return the text that can be emitted now."""
        text = self._held + text
        if not self._is_open:
            text = text.lstrip("\r\n")
        said = text.rstrip()
        self._held = text[len(said) :]
        self._is_open = self._is_open or bool(said)
        return said

    def finish(self) -> str:
        """The held white space, if it follows anything; the next stretch begins anew."""
        held = self._held if self._is_open else ""
        self._held, self._is_open = "", False
        return held


class StopStringFilter:
    """The answer itself. `stop` is the stop word that was met.

    `is_raw` text is not trimmed; `is_open` speech goes on in the middle of a line.
    """

    def __init__(self, stops: tuple[str, ...], *, is_raw: bool, is_open: bool) -> None:
        self.stop: str | None = None
        self._words = tuple(word for word in stops if word)
        self._state = _stop_state(self._words)
        self._edges = None if is_raw else WhitespaceTrimmer(is_open=is_open)

    def push(self, text: str) -> str:
        """Return the text that can be emitted now: no stop string, no beginning of one."""
        self._state, segments = TextStateMachine.split(self._state, text)
        said = self._trimmed(segments[0][1])
        if len(segments) > 1:
            self.stop = self._words[int(segments[1][0])]
            said += self._rest()
        return said

    def leave(self) -> str:
        """Return held-back text without trailing white space, as something else follows."""
        said = self._trimmed(self._flushed())
        self._rest()
        return said

    def finish(self) -> str:
        """Return held-back text; nothing follows."""
        return self._trimmed(self._flushed()) + self._rest()

    def _flushed(self) -> str:
        self._state, held, _ = TextStateMachine.flush(self._state)
        return str(held)

    def _trimmed(self, text: str) -> str:
        return text if self._edges is None else self._edges.push(text)

    def _rest(self) -> str:
        return "" if self._edges is None else self._edges.finish()


def _stop_state(words: tuple[str, ...]) -> Any:
    """A state that leaves NORMAL for the number of the first word that is complete."""
    edges = [(word, str(at)) for at, word in enumerate(words)]
    machine = TextStateMachine({NORMAL: edges, **{name: [] for _, name in edges}})
    return machine.make_state(NORMAL)
