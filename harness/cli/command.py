"""Declare commands: a frozen record of options, and one function that receives it.

A command with nine options is still a function of two parameters. Every command takes `--quiet` and
`--json[=FILE]`, before its name (without a file) or after it; `--cluster` where it can be spread.
"""

import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from degarble.harness.cli.terminal import Terminal
from degarble.harness.cli.values import writable
from degarble.harness.errors import InvalidArgument, UnknownName

CLUSTERS = ("ray",)
EVERYWHERE = "Everywhere"

Json = Annotated[
    bool,
    typer.Option("--json", help="Write one JSON document to stdout.", rich_help_panel=EVERYWHERE),
]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="[=FILE]",
        help="Write one JSON document to stdout, or to FILE.",
        rich_help_panel=EVERYWHERE,
    ),
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

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options of the group itself."""
        return _without_types_of_flags(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that `args` begins with."""
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            raise UnknownName.among(f"command of {ctx.command_path}", args[0], self.commands)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; the group alone shows what there is."""
        if not ctx._protected_args and not ctx.args:  # noqa: SLF001  what is left to run
            sys.stdout.write(f"{ctx.get_help()}\n")
            raise typer.Exit
        return super().invoke(ctx)


def command(
    app: typer.Typer,
    name: str,
    options: type[Options],
    *,
    spreads: bool = False,
    json_word: bool = False,
) -> Callable[[Body[Options]], Body[Options]]:
    """Register a function of (options, terminal) as `name`; its docstring is the help.

    `json_word` keeps the older spelling `--json FILE` alive, where a word that is not needed as an
    argument follows.
    """
    kinds = get_type_hints(options, include_extras=True)
    defaults = {f.name: f.default for f in fields(options)}  # type: ignore[arg-type]
    paths = {
        key for key, kind in kinds.items() if Path in (*get_args(kind.__origin__), kind.__origin__)
    }
    common: dict[str, tuple[Any, object]] = {"quiet": (Quiet, False), "json": (JsonFile, None)}
    paths.add("json")
    if spreads:
        common["cluster"] = (Cluster, None)

    def register(body: Body[Options]) -> Body[Options]:
        def parsed(context: typer.Context, **values: Any) -> int:
            session: Session = context.find_root().obj
            given = {key: values.pop(key, None) for key in common}
            session.terminal = _terminal(session.terminal, name, given)
            if session.terminal.json_file is not None:
                writable("--json", session.terminal.json_file)
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
        app.command(name, cls=_command_class(paths, file_after_json=json_word))(parsed)
        return body

    return register


def _command_class(paths: Collection[str], *, file_after_json: bool) -> type[TyperCommand]:
    """Make a class of commands that refuse an empty path: Python takes one for the folder `.`."""

    class Command(TyperCommand):
        json_word = file_after_json

        def get_params(self, ctx: Any) -> list[Any]:
            return _without_types_of_flags(super().get_params(ctx))

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            """Look at the words before they are turned into paths."""
            words = self._with_value_of_json(ctx, args)
            given, _, _ = self.make_parser(ctx).parse_args(args=list(words))
            for each in self.params:
                if each.name in paths and given.get(each.name) == "":
                    raise InvalidArgument(
                        each.opts[0] if each.opts[0].startswith("-") else str(each.metavar),
                        "",
                        "the path of a file or folder",
                        "Write `.` for the folder that you are in.",
                    )
            return super().parse_args(ctx, words)

        def _with_value_of_json(self, ctx: Any, args: list[str]) -> list[str]:
            """Write out the value of `--json`: typer has no option whose value may be left out."""
            at = json_at(args)
            if at is None:
                return args
            follows = args[at + 1 : at + 2]
            if self.json_word and follows and (follows[0] == "-" or not follows[0].startswith("-")):
                words = [*args[:at], f"--json={follows[0]}", *args[at + 2 :]]
                if not self._lacks_an_argument(ctx, words):
                    return words
            return [*args[:at], "--json=-", *args[at + 1 :]]

        def _lacks_an_argument(self, ctx: Any, words: list[str]) -> bool:
            given, _, _ = self.make_parser(ctx).parse_args(args=list(words))
            needed = [p for p in self.params if p.param_type_name == "argument" and p.required]
            return any(not isinstance(given.get(p.name), (str, list, tuple)) for p in needed)

    return Command


def json_at(words: Sequence[str]) -> int | None:
    """Return the place of a `--json` without a value; what follows `--` is no option."""
    options = words[: words.index("--")] if "--" in words else words
    return options.index("--json") if "--json" in options else None


def _without_types_of_flags(parameters: list[Any]) -> list[Any]:
    """Show no `<bool>` in the help of an option that takes no value."""
    for each in parameters:
        if getattr(each, "is_flag", False):
            each.display_type_rich = lambda ctx: None  # noqa: ARG005  typer passes it by name
    return parameters


def _terminal(before: Terminal, name: str, given: dict[str, Any]) -> Terminal:
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
    json_file: Path | None = given["json"]
    to_stdout = json_file is not None and str(json_file) == "-"
    return Terminal(
        json_wanted=bool(before.json_wanted or to_stdout),
        json_file=None if to_stdout else json_file,
        quiet=bool(before.quiet or given["quiet"]),
        cluster=cluster,
    )
