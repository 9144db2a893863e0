"""How a command is declared: a frozen record of options, and one function that receives it.

Owns the step from a record to a typer command, so that a command with nine options still is a
function of two parameters. `--quiet`, and `--json` where it takes no file, work behind the name of
every command as well as in front of it; `--cluster` does so where the command can be spread.
Refuses a `--cluster` where it has no meaning.
What keeps it honest: suites/cli/test_command.py.
"""

import inspect
from collections.abc import Callable, Collection
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from degarble.harness.cli.terminal import Terminal
from degarble.harness.errors import InvalidArgument, UnknownName

CLUSTERS = ("ray",)
EVERYWHERE = "Everywhere"

Json = Annotated[
    bool,
    typer.Option("--json", help="Write one JSON document to stdout.", rich_help_panel=EVERYWHERE),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", help="Print nothing but refusals.", rich_help_panel=EVERYWHERE),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="ray",
        help="Spread shards over a Ray cluster (audit, quantise, convert).",
        rich_help_panel=EVERYWHERE,
    ),
]

Options = TypeVar("Options")
Body = Callable[[Options, Terminal], int]


@dataclass
class Session:
    """One run of the command line: how it talks so far. Grows while arguments are read."""

    terminal: Terminal = field(default_factory=Terminal)


class Group(TyperGroup):
    """A group that refuses a missing or unknown command in our words."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that `args` begins with."""
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            raise UnknownName.among(f"command of {ctx.command_path}", args[0], self.commands)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; the group alone does nothing."""
        if not ctx._protected_args and not ctx.args:  # noqa: SLF001  what is left to run
            names = ", ".join(self.commands)
            raise InvalidArgument(
                f"command of {ctx.command_path}",
                None,
                f"one of {names}",
                f"See {ctx.command_path} --help.",
            )
        return super().invoke(ctx)


def command(
    app: typer.Typer,
    name: str,
    options: type[Options],
    *,
    spreads: bool = False,
) -> Callable[[Body[Options]], Body[Options]]:
    """Register a function of (options, terminal) as `name`; its docstring is the help."""
    kinds = get_type_hints(options, include_extras=True)
    defaults = {f.name: f.default for f in fields(options)}  # type: ignore[arg-type]
    paths = {
        key for key, kind in kinds.items() if Path in (*get_args(kind.__origin__), kind.__origin__)
    }
    common: dict[str, tuple[Any, object]] = {"quiet": (Quiet, False)}
    if "json" not in kinds:
        common["json_wanted"] = (Json, False)
    if spreads:
        common["cluster"] = (Cluster, None)

    def register(body: Body[Options]) -> Body[Options]:
        def parsed(context: typer.Context, **values: Any) -> int:
            session: Session = context.find_root().obj
            given = {key: values.pop(key, None) for key in common}
            session.terminal = _terminal(session.terminal, name, given, values.get("json"))
            return body(options(**values), session.terminal)

        both = {key: (kinds[key], defaults[key]) for key in kinds} | common
        parsed.__doc__ = body.__doc__
        parsed.__annotations__ = {"context": typer.Context} | {k: both[k][0] for k in both}
        parsed.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(
                    "context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
                )
            ]
            + [
                inspect.Parameter(
                    key,
                    inspect.Parameter.KEYWORD_ONLY,
                    annotation=kind,
                    default=inspect.Parameter.empty if d is MISSING else d,
                )
                for key, (kind, d) in both.items()
            ]
        )
        app.command(name, cls=_refusing_empty(paths))(parsed)
        return body

    return register


def _refusing_empty(paths: Collection[str]) -> type[TyperCommand]:
    """Make a class of commands that refuse an empty path: Python takes one for the folder `.`."""

    class Command(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            """Look at the words before they are turned into paths."""
            given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
            for each in self.params:
                if each.name in paths and given.get(each.name) == "":
                    raise InvalidArgument(
                        each.opts[0] if each.opts[0].startswith("-") else str(each.metavar),
                        "",
                        "the path of a file or folder",
                        "Write `.` for the folder that you are in.",
                    )
            return super().parse_args(ctx, args)

    return Command


def _terminal(
    before: Terminal, name: str, given: dict[str, Any], json_file: Path | None
) -> Terminal:
    """Join the options in front of a command's name with those behind it."""
    cluster = given.get("cluster") or before.cluster
    if cluster is not None and cluster not in CLUSTERS:
        raise UnknownName.among("--cluster", cluster, CLUSTERS)
    if cluster is not None and "cluster" not in given:
        raise InvalidArgument(
            "--cluster",
            cluster,
            "a command that can be spread: audit, quantise, convert",
            f"Leave it out: {name} runs on this machine.",
        )
    to_stdout = json_file is not None and str(json_file) == "-"
    return Terminal(
        json_wanted=bool(before.json_wanted or given.get("json_wanted") or to_stdout),
        json_file=None if to_stdout else json_file,
        quiet=bool(before.quiet or given["quiet"]),
        cluster=cluster,
    )
