"""Verbs by their results, which are printed as JSON or for people."""

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from typing import Annotated, Any, NamedTuple, TypeVar, get_type_hints

import typer

from mlxstack.cli.exit_codes import Exit
from mlxstack.cli.output import as_json, say
from mlxstack.cli.service_request import ServiceOptions
from mlxstack.cli.start_choice import StartChoice
from mlxstack.cli.tool_options import ToolOptions

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
OPTION = Parameter.KEYWORD_ONLY
JSON = Parameter("json", OPTION, default=False, annotation=Json)
OPTION_GROUPS = (ServiceOptions, StartChoice, ToolOptions)
"""Options that a verb takes as one parameter."""

Verb = TypeVar("Verb", bound=Callable[..., Any])


class VerbResult(NamedTuple):
    """Outcome of a verb."""

    value: object
    """For programs, as JSON."""
    text: str | Callable[[], object]
    """For people; a function prints it itself."""
    code: Exit = Exit.OK


class VerbApp(typer.Typer):
    """Group of verbs; those that return a VerbResult have `--json`.

    Each field of an option group, such as `--url` of ServiceOptions, is an option of its own.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(rich_markup_mode=None, **options)

    def command(self, *names: Any, **options: Any) -> Callable[[Verb], Verb]:
        """Add a verb."""

        def add(verb: Verb) -> Verb:
            super(VerbApp, self).command(*names, **options)(command_of(verb))
            return verb

        return add

    def without_verb(self, verb: Verb) -> Verb:
        """Run this verb where none is given."""
        run = command_of(verb)

        @wraps(run)
        def callback(context: typer.Context, **values: Any) -> None:
            if context.invoked_subcommand is None:
                run(**values)

        own = signature(run)
        first = Parameter("context", OPTION, annotation=typer.Context)
        parameters = [first, *own.parameters.values()]
        callback.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        self.callback(invoke_without_command=True)(callback)
        return verb


def command_of(verb: Callable[..., Any]) -> Callable[..., None]:
    """Function with the options of a verb, which prints its VerbResult."""
    own = signature(verb)
    is_printed = own.return_annotation is VerbResult
    groups = {parameter.name: parameter.annotation for parameter in own.parameters.values()}
    groups = {name: kind for name, kind in groups.items() if kind in OPTION_GROUPS}
    parameters: list[Parameter] = []
    for parameter in own.parameters.values():
        if parameter.name in groups:
            parameters += _options_of(groups[parameter.name])
        else:
            parameters.append(parameter.replace(kind=OPTION))
    if is_printed:
        parameters.append(JSON)

    @wraps(verb)
    def run(**values: Any) -> None:
        is_json = is_printed and values.pop("json")
        for name, kind in groups.items():
            values[name] = kind(**{field: values.pop(field) for field in kind._fields})
        result = verb(**values)
        if is_printed:
            _print(result, is_json)

    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def _options_of(group: Any) -> list[Parameter]:
    """One parameter for each field of an option group."""
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(field, OPTION, default=group._field_defaults[field], annotation=hints[field])
        for field in group._fields
    ]


def _print(result: VerbResult, is_json: bool) -> None:
    if is_json:
        as_json(result.value)
    elif callable(result.text):
        result.text()
    elif result.text:
        say(result.text)
    if result.code:
        raise typer.Exit(result.code)
