"""Declare commands, parse their arguments, and turn usage errors into ours."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from degarble.harness.base.errors import EXIT_AGREES, InvalidArgument, Refused, UnknownName
from degarble.harness.cli.terminal import Terminal
from degarble.harness.cli.values import writable

# --------------------------------------------------------------------------------------------------
# Declare commands: a frozen record of options, and one function that receives it.
#
# A command with nine options is still a function of two parameters. Every command takes `--quiet`
# and `--json[=FILE]`, before its name (without a file) or after it; those that can use a cluster
# take `--cluster` as well.

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
        help="Spread the work over a Ray cluster (audit, check, quantise, convert).",
        rich_help_panel=EVERYWHERE,
    ),
]

Options = TypeVar("Options")
Body = Callable[[Options, Terminal], int]


@dataclass
class CliSession:
    """One run of the command line: how it talks so far. Grows while arguments are read."""

    terminal: Terminal = field(default_factory=Terminal)
    json_asked: bool | None = None  # on stdout, by the words of the command; None before them


# What the program says without any argument.
USAGE = """\
degarble finds which layer and which component of a low-precision model run went wrong, and why.

  degarble doctor CKPT                                a checkpoint's folder
  degarble doctor CKPT --engine "vllm serve CKPT"     the checkpoint and the engine that serves it
  degarble doctor http://HOST:PORT                    a running server
  degarble doctor CAPTURE                             a recorded run
  degarble doctor KERNEL.safetensors                  a kernel's operands and output
  degarble demo                                       a planted fault, found and named

degarble --help lists every command.
"""


class Group(TyperGroup):
    """A group that refuses a missing or unknown command in our words."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options of the group itself."""
        return _in_words(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that `args` begins with."""
        known = self.list_commands(ctx)
        if args and not args[0].startswith("-") and args[0] not in known:
            raise UnknownName.among(f"command of {ctx.command_path}", args[0], known)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write what each command does, as whole sentences."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, self.summary(ctx, name)) for name in self.list_commands(ctx)]
            )

    def summary(self, ctx: Any, name: str) -> str:
        """Return what a command does, in a sentence."""
        found: Any = self.get_command(ctx, name)
        return " ".join((found.help or "").split("\n\n")[0].split())

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
            session: CliSession = context.find_root().obj
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
    """Make a class of commands that know their `--json` and refuse empty paths."""

    class Command(TyperCommand):
        def get_params(self, ctx: Any) -> list[Any]:
            return _in_words(super().get_params(ctx))

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            """Write out the value of `--json`: typer has no option whose value may be left out."""
            words, at = list(args), json_at(args)
            if at is not None:
                words[at] = "--json=-"
                if file_after_json and at + 1 < len(words):
                    words[at + 1] = _AfterJson(words[at + 1])
            return super().parse_args(ctx, words)

        def make_parser(self, ctx: Any) -> Any:
            """Look at the words between typer's steps: before arguments are given their words."""
            parser: Any = super().make_parser(ctx)
            read, parse = parser._process_args_for_options, parser.parse_args  # noqa: SLF001  no public place knows which words are arguments

            def read_options(state: Any) -> None:
                try:
                    read(state)
                except typer.TyperException:
                    self._settle_json(ctx, state, [w for w in state.rargs if w[:1] != "-"])
                    raise
                self._settle_json(ctx, state, state.rargs)

            def parse_words(args: list[str]) -> Any:
                parsed = parse(args=args)
                self._require_paths(parsed[0])
                return parsed

            parser._process_args_for_options, parser.parse_args = read_options, parse_words  # noqa: SLF001  as above
            return parser

        def _settle_json(self, ctx: Any, state: Any, rest: list[str]) -> None:
            """Give `--json` the word that follows it where no argument needs that word."""
            needed = [p for p in self.params if p.param_type_name == "argument" and p.required]
            words = [*state.largs, *rest]
            file = next((word for word in words if isinstance(word, _AfterJson)), None)
            if file is not None and len(words) > len(needed):
                state.largs = [word for word in state.largs if word is not file]
                state.opts["json"] = str(file)
            unread = "--json=-" in state.rargs
            session = ctx.find_root().obj
            if session is not None:  # a line that is only parsed has none
                session.json_asked = state.opts.get("json", "-" if unread else "") == "-"

        def _require_paths(self, given: Mapping[str, Any]) -> None:
            """Refuse an empty path, before Python takes it for the folder `.`."""
            for param in self.params:
                if param.name in paths and given.get(param.name) == "":
                    raise InvalidArgument(
                        param.opts[0] if param.opts[0].startswith("-") else str(param.metavar),
                        "",
                        "the path of a file or folder",
                        "Write `.` for the folder that you are in.",
                    )

    return Command


class _AfterJson(str):
    """The argument after a `--json` without a value: its file, or an argument of the command."""

    __slots__ = ()


def json_at(words: Sequence[str]) -> int | None:
    """Return the place of a `--json` without a value; what follows `--` is no option."""
    options = words[: words.index("--")] if "--" in words else words
    return options.index("--json") if "--json" in options else None


def _in_words(parameters: list[Any]) -> list[Any]:
    """Show the word for a value alone: no `<bool>` of a flag, no `<path>` and `{CKPT}`."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.display_type_rich = lambda ctx: None  # noqa: ARG005  typer passes it by name
        if parameter.param_type_name == "argument" and parameter.metavar:
            parameter.display_type_rich = lambda ctx: None  # noqa: ARG005  as above
            word = parameter.metavar if parameter.required else f"[{parameter.metavar}]"
            usage = [f"{word}..." if parameter.nargs == -1 else word]
            parameter.get_usage_pieces = partial(_given_pieces, usage)
    return parameters


def _given_pieces(pieces: list[str], _context: Any) -> list[str]:
    return pieces


def _terminal(before: Terminal, name: str, given: dict[str, Any]) -> Terminal:
    """Join the options before a command's name with those after it."""
    cluster = given.get("cluster") or before.cluster
    if cluster is not None and cluster not in CLUSTERS:
        raise UnknownName.among("--cluster", cluster, CLUSTERS)
    if cluster is not None and "cluster" not in given:
        raise InvalidArgument(
            "--cluster",
            cluster,
            "a command that can be spread: audit, check, quantise, convert",
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


# --------------------------------------------------------------------------------------------------
# Parse the arguments of one command, and turn Typer's usage errors into ours.
#
# Typer's classes become a name, a value, an expectation and a remedy.


def dispatch(app: typer.Typer, arguments: Sequence[str], session: CliSession) -> int:
    """Run the command that `arguments` name and give its exit status."""
    if not arguments:
        sys.stdout.write(USAGE)
        return EXIT_AGREES
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


def asks_for_json(session: CliSession, arguments: Sequence[str]) -> bool:
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
