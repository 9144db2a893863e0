"""Parse the arguments of one command, and turn Typer's usage errors into ours.

Typer's classes become a name, a value, an expectation and a remedy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from degarble.harness.base.errors import EXIT_AGREES, InvalidArgument, Refused, UnknownName
from degarble.harness.cli.command import json_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from degarble.harness.cli.command import Session


def dispatch(app: typer.Typer, arguments: Sequence[str], session: Session) -> int:
    """Run the command that `arguments` name and give its exit status."""
    root = typer.main.get_command(app)
    try:
        with root.make_context("degarble", list(arguments), obj=session) as context:
            status = root.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except typer.TyperException as error:
        raise refusal(error, arguments) from error
    return EXIT_AGREES if status is None else int(status)


def refusal(error: typer.TyperException, arguments: Sequence[str]) -> Refused:
    """Turn what typer found wrong into one of our refusals."""
    # Trap: the classes of wrong usage are private to typer, so they are told apart by their names.
    context: Any = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "degarble"
    remedy = f"See {path} --help."
    parameter: Any = getattr(error, "param", None)
    kind = type(error).__name__
    if kind == "NoSuchOption":
        return UnknownName.among(
            f"option of {path}", getattr(error, "option_name", ""), _option_names(context)
        )
    if kind == "MissingParameter" and parameter is not None:
        return InvalidArgument(_name(parameter), None, f"a value: {path} needs it", remedy)
    if kind == "BadParameter" and parameter is not None:
        name = _name(parameter)
        reason = error.message.rstrip(".")
        return InvalidArgument(name, _given(name, arguments), f"another value: {reason}", remedy)
    return InvalidArgument("arguments", str(error), f"what {path} takes", remedy)


def asks_for_json(session: Session, arguments: Sequence[str]) -> bool:
    """Return whether a command line with wrong usage asks for a JSON document on stdout."""
    if session.json_asked is not None:
        return session.json_asked
    return json_at(arguments) is not None or "--json=-" in arguments  # no command read its words


def _name(parameter: Any) -> str:
    is_argument = parameter.param_type_name == "argument"
    return str(parameter.metavar or parameter.name) if is_argument else str(parameter.opts[0])


def _option_names(context: Any) -> list[str]:
    if context is None:
        return []
    parameters = context.command.get_params(context)
    return [name for parameter in parameters for name in parameter.opts if name.startswith("--")]


def _given(option: str, arguments: Sequence[str]) -> str:
    """Find what the command line gave `option`."""
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if word == option:
            return following
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return "?"
