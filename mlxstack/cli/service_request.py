"""HTTP requests of a verb to a service."""

import os
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar
from urllib.parse import quote

import typer

from mlxstack.cli.completion import service_option
from mlxstack.cli.exit_codes import Misuse

if TYPE_CHECKING:
    from mlxstack.cli.target import Question

T = TypeVar("T")

Name = Annotated[str | None, service_option("The service, when several run.")]
Url = Annotated[str | None, typer.Option("--url", help="URL of a remote service.")]


class ServiceOptions(NamedTuple):
    """A service by its options `--name` and `--url`; the only one without."""

    name: Name = None
    url: Url = None

    def ask(self, question: "Question[T]", *, is_of_all: bool = False) -> T:
        """Send one request.

        A member of a gateway that does not run is started. `is_of_all`: the gateway itself answers.
        """
        from mlxstack.cli.gateway_member import start_member
        from mlxstack.cli.target import target
        from mlxstack.core.errors import Busy
        from mlxstack.host.home import home_from

        where = target(home_from(os.environ), *self)
        member = None if is_of_all else where.member
        try:
            return where.ask(question, member)
        except Busy:
            if where.member is None:
                raise
        start_member(where)
        return where.ask(question, member)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """JSON object of a POST."""
        return self.ask(lambda client: client.post(path, body))


def path_of(*parts: str) -> str:
    """Path of a resource. Raises Misuse for unsafe parts."""
    odd = [part for part in parts if part in {"", ".", ".."}]
    if odd:
        raise Misuse(f"invalid name `{odd[0]}`")
    return "".join(f"/{quote(part, safe='')}" for part in parts)
