"""The entry point: parse arguments, run one command, turn errors into messages and exit statuses.

Exit statuses: 0 AGREES, 1 DIFFERS or UNSTABLE, 2 REFUSED or UNDECIDED, 70 for an internal error,
130 after Ctrl-C, 141 if the reader of a pipe went away (128 + signal, as shells count). Neither
torch nor rich is imported until a command needs it.
"""

import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn, TextIO

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
from degarble.harness.cli.commands import (
    checkpoints,
    doctor,
    history,
    inference,
    judging,
    museum,
    probing,
)
from degarble.harness.cli.imports import EXIT_INTERRUPTED, INTERRUPTED_MESSAGE, interruptible
from degarble.harness.cli.terminal import Environment, Terminal, tell_crash, tell_refusal

EXIT_PIPE_CLOSED = 141
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO)

app = typer.Typer(
    name="degarble",
    help="Find which layer and which component of a low-precision model run went wrong, and why.",
    epilog="Exit status: 0 agrees, 1 differs, 2 refused or undecided.",
    cls=Group,
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


for add in (  # in the order of the help
    doctor.add,
    museum.add_demo,
    judging.add,
    checkpoints.add_audit,
    checkpoints.add_rewriting,
    inference.add_generate,
    inference.add_serve,
    probing.add,
    museum.add_faults,
    history.add,
):
    add(app)


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
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
