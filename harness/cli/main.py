"""The entry point: parse arguments, run one command, turn errors into messages and exit statuses.

Exit statuses: 0 AGREES, 1 DIFFERS or UNSTABLE, 2 REFUSED or UNDECIDED, 70 for an internal error,
130 after Ctrl-C, 141 if the reader of a pipe went away (128 + signal, as shells count). Neither
torch nor rich is imported until a command needs it, and no module of a command before that.
"""

import errno
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, NamedTuple, NoReturn, TextIO

import typer

from degarble.harness.base.errors import EXIT_REFUSED, DegarbleError, UnwritablePath
from degarble.harness.base.version import VERSION
from degarble.harness.cli.command import (
    CliSession,
    Cluster,
    Group,
    Json,
    Quiet,
    asks_for_json,
    dispatch,
)
from degarble.harness.cli.imports import EXIT_INTERRUPTED, INTERRUPTED_MESSAGE, interruptible
from degarble.harness.cli.terminal import Environment, Terminal, tell_crash, tell_refusal

EXIT_PIPE_CLOSED = 141
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO)

_COMPLETION = "_DEGARBLE_COMPLETE"  # set by the scripts of --install-completion


class _CommandHome(NamedTuple):
    """Where a command is declared, and its line in the help."""

    module: str
    add: str
    help: str


# In the order of the help. A line is the first sentence of the command's docstring.
COMMANDS = {
    "doctor": _CommandHome(
        "doctor", "add",
        "Find out what TARGET is, do all that can be done with it, and say what to do next.",
    ),
    "demo": _CommandHome(
        "museum", "add_demo",
        "Run a small model, plant a fault in it, find and name it, write a report to open.",
    ),
    "capture": _CommandHome(
        "judging", "add", "Run a model and record the inputs and outputs of every component."
    ),
    "import": _CommandHome(
        "judging", "add",
        "Turn a dump of SGLang, FlashInfer or vLLM into a capture, and say what it can decide.",
    ),
    "check": _CommandHome(
        "judging", "add",
        "Judge a captured run: which layer, which component, why, with what evidence.",
    ),
    "compare": _CommandHome("judging", "add", "Compare two captures, site by site."),
    "audit": _CommandHome(
        "checkpoints", "add_audit",
        "Judge the files of a checkpoint and say what is wrong, before a kernel runs.",
    ),
    "quantise": _CommandHome(
        "checkpoints", "add_rewriting",
        "Quantise a checkpoint by a recipe, streaming, never half-written.",
    ),
    "convert": _CommandHome(
        "checkpoints", "add_rewriting",
        "Bring a checkpoint into the form that a consumer reads; --prove compares the values.",
    ),
    "generate": _CommandHome(
        "inference", "add_generate",
        "Continue a prompt, answer in a chat, or score a text with a checkpoint of any layout.",
    ),
    "serve": _CommandHome(
        "inference", "add_serve",
        "Answer over HTTP as OpenAI's API does: models, completions, chats; health, metrics.",
    ),
    "probe": _CommandHome(
        "probing", "add",
        "Check the numbers of any server with OpenAI's interface, from outside.",
    ),
    "bisect": _CommandHome(
        "history", "add",
        "Narrow a range of commits to the one that moved a component's difference.",
    ),
    "faults": _CommandHome(
        "museum", "add_faults", "Plant known faults; check that they are found and named."
    ),
    "history": _CommandHome(
        "history", "add",
        "Query the store of all runs: trends, changes, two runs side by side.",
    ),
}  # fmt: skip


class _Program(Group):
    """The group of all commands, each imported when it is needed."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002  as typer calls it
        """Return the names in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002  as above
        """Return a command, imported now; None where there is none."""
        home = COMMANDS.get(cmd_name)
        if home is not None and cmd_name not in self.commands:
            module = import_module(f"degarble.harness.cli.commands.{home.module}")
            declared = typer.Typer(rich_markup_mode=None)
            declared.callback()(_nothing)
            getattr(module, home.add)(declared)
            self.commands.update(getattr(typer.main.get_command(declared), "commands"))  # noqa: B009  typed as one command
        return self.commands.get(cmd_name)

    def summary(self, ctx: Any, name: str) -> str:  # noqa: ARG002  as above
        """Return a command's line without importing it."""
        return COMMANDS[name].help


def _nothing() -> None:
    """Stand for the options of a group that has none."""


app = typer.Typer(
    name="degarble",
    help="Find which layer and which component of a low-precision model run went wrong, and why.",
    epilog="Exit status: 0 agrees, 1 differs, 2 refused or undecided.",
    cls=_Program,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"degarble {VERSION}\n")
        raise typer.Exit


@app.callback()
def _read_globals(
    context: typer.Context,
    json_wanted: Json = False,
    quiet: Quiet = False,
    cluster: Cluster = None,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version and stop."
        ),
    ] = False,
) -> None:
    session: CliSession = context.obj
    session.terminal = Terminal(json_wanted=json_wanted, quiet=quiet, cluster=cluster)


def main(arguments: Sequence[str]) -> int:
    """Run one command line and give its exit status."""
    with interruptible():
        return _status_of(arguments)


def _status_of(arguments: Sequence[str]) -> int:
    environment = Environment.read()
    session = CliSession()
    try:
        try:
            status = dispatch(app, arguments, session)
        except DegarbleError as error:
            wanted = session.terminal.json_wanted or asks_for_json(session, arguments)
            status = tell_refusal(error, json_wanted=wanted)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich leaves with SystemExit where a pipe is closed
        # Trap: Python flushes stdout once more while it ends, and would complain about the pipe.
        _silence(sys.stdout)
        status = EXIT_PIPE_CLOSED
    except KeyboardInterrupt:
        sys.stderr.write(INTERRUPTED_MESSAGE)
        status = EXIT_INTERRUPTED
    except OSError as error:
        if error.errno not in _NO_ROOM:
            return tell_crash(error, arguments, environment)
        status = _tell_lost_output(error)
    except Exception as error:  # noqa: BLE001  whatever it is, it is our mistake, told as such
        status = tell_crash(error, arguments, environment)
    return status


def _tell_lost_output(error: OSError) -> int:
    """Refuse an output that takes no more: a full disk behind `>`, and not a mistake of ours."""
    try:
        told = UnwritablePath(
            "output", error.strerror, "a place with room for the results", "Make room there."
        )
        tell_refusal(told, json_wanted=False)
    except OSError:  # nobody can be told anything; the status still says so
        _silence(sys.stderr)
    _silence(sys.stdout)
    return EXIT_REFUSED


def _silence(stream: TextIO) -> None:
    """Send what Python still holds for `stream` nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _streams() -> None:
    """Make stdout and stderr take any text, also where they are closed or not UTF-8."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller, as in `degarble ... >&-`
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "w"), encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def run() -> NoReturn:
    """Console entry point."""
    _streams()
    if _COMPLETION in os.environ:  # the shell asks for words
        typer.main.get_command(app)(prog_name="degarble", complete_var=_COMPLETION)
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
