"""Generate docs/cli.md from the command line itself, for `make docs`.

The text is the help text, so it cannot differ from what --help prints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from degarble.harness.cli.main import app
from degarble.suites.house.repository import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = ROOT / "docs" / "cli.md"

HEAD = """# The command line

Written by `make docs` from the commands themselves; edit their help texts, not this page.

Exit status: 0 the run agrees; 1 it differs, or two runs disagree; 2 refused, or nothing could be
decided. Warnings alone are status 0. A refusal prints name, value, expectation and remedy to
stderr, and leaves nothing half-written.
"""


def commands() -> Iterator[tuple[str, Any]]:
    """Yield every command with its full name, subcommands included, in the order of --help."""
    yield from _commands("degarble", typer.main.get_command(app))


def page() -> str:
    """Return the whole page."""
    return "\n".join([HEAD, *(section(name, command) for name, command in commands())])


def section(name: str, command: Any) -> str:
    """One command: usage, help, and a table of arguments and options."""
    taken = parameters(name, command)
    rows = [f"| `{_cell(spelled(p))}` | {_cell(_meaning(p))} |" for p in taken]
    usage = " ".join([name, *(spelled(p) for p in taken if p.required)])
    optional = [p for p in taken if p.param_type_name == "argument" and not p.required]
    usage += "".join(f" [{spelled(p)}]" for p in optional)
    if hasattr(command, "list_commands"):
        usage += " COMMAND"
    usage += " [OPTIONS]" if any(not p.required for p in taken) else ""
    text = " ".join((command.help or "").split())
    head = [f"## {name}", "", text, "", "```", usage, "```", ""]
    table = ["| argument or option | meaning |", "|---|---|", *rows, ""] if rows else []
    return "\n".join([*head, *table])


def parameters(name: str, command: Any) -> list[Any]:
    """Arguments and options of a command, without --help."""
    context = command.make_context(name, [], resilient_parsing=True)
    return [p for p in command.get_params(context) if p.name != "help" and not p.hidden]


def spelled(parameter: Any) -> str:
    """A parameter as people type it: an argument's name, or an option with its value's name."""
    if parameter.param_type_name == "argument":
        return f"{parameter.metavar}..." if parameter.nargs == -1 else str(parameter.metavar)
    names = ", ".join(parameter.opts)
    return names if parameter.is_flag else f"{names} {parameter.metavar}"


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    if not hasattr(command, "list_commands"):
        return
    context = command.make_context(name, [], resilient_parsing=True)
    for part in command.list_commands(context):
        inner = command.get_command(context, part)
        if not inner.hidden:
            yield from _commands(f"{name} {part}", inner)


def _meaning(parameter: Any) -> str:
    text = " ".join((parameter.help or "").split())
    shown = parameter.show_default
    default = shown if isinstance(shown, str) else parameter.default
    if shown and default not in (None, False, "", ()):
        text = f"{text} Default: {default}."
    return text


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
