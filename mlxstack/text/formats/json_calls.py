"""Tells calls that are JSON objects while they are copied."""

import json

from mlxstack.text.formats.call_writer import CallWriter
from mlxstack.text.formats.description import JsonBody
from mlxstack.text.formats.notations import JSON
from mlxstack.text.formats.value_copier import Path, ValueCopier

FUNCTION = "function"
ARGUMENT_PATHS = tuple(
    (*outer, key) for outer in ((FUNCTION,), ()) for key in ("arguments", "parameters")
)
NAME_PATHS = ((FUNCTION, "name"), ("name",))


class JsonCalls:
    """Writes the calls of a JSON object or list.

    A call opens where its arguments begin, if its name stands before them, and its id too where the
    format writes one. None opens if it `is_stuck`: calls before these are untold. `told_end` is
    the end of the last call of a list that was told.
    """

    def __init__(
        self, body: JsonBody, at: int, stops: tuple[str, ...], writer: CallWriter, *, is_stuck: bool
    ) -> None:
        self.copier = ValueCopier(at, JSON, stops, on_begin=self._begin, on_end=self._end)
        self.told_end = at
        self._body = body
        self._writer = writer
        self._name_paths = tuple(path for path in (body.name, *NAME_PATHS) if path)
        self._argument_paths = (*((body.arguments,) if body.name else ()), *ARGUMENT_PATHS)
        self._is_list = False
        self._is_stuck = is_stuck
        self._fields: dict[Path, str] = {}
        self._starts: dict[Path, int] = {}
        self._arguments: Path | None = None

    def _begin(self, path: Path, sign: str) -> None:
        if not path:
            self._is_list = sign == "["
        inner = path[self._is_list :]
        if path and not inner:
            self._fields = {}
            self._starts = {}
            self._arguments = None
        if sign == '"' and (inner in self._name_paths or inner == self._body.id):
            self._starts[inner] = len(self.copier.written)
        elif sign == "{" and self._arguments is None and self._is_arguments(inner):
            name = self._name(inner)
            is_told = bool(name) and self._writer.open(name, self._fields.get(self._body.id, ""))
            if is_told:
                self._arguments = inner
                self._writer.copy(self.copier, len(path))

    def _end(self, path: Path) -> None:
        inner = path[self._is_list :]
        start = self._starts.pop(inner, -1)
        if start >= 0 and inner not in self._fields and self.copier.written[start:]:
            self._fields[inner] = json.loads(self.copier.written[start:])
        if inner == self._arguments and self._writer.is_open:
            self._writer.end()
        if not inner and (path or not self._is_list) and self._arguments is None:
            # Later calls have to wait for this one.
            self._is_stuck = True
        elif path and not inner:
            self.told_end = self.copier.at

    def _is_arguments(self, inner: Path) -> bool:
        if self._is_stuck or (self._body.id and self._body.id not in self._fields):
            return False
        if not self._body.name:
            return len(inner) == 1
        return inner in self._argument_paths

    def _name(self, inner: Path) -> str:
        if not self._body.name:
            return str(inner[0])
        return next((self._fields[one] for one in self._name_paths if one in self._fields), "")
