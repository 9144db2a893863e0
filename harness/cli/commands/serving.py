"""Command line of `degarble serve`: serve a model over HTTP."""

import os
import sys
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

import typer

from degarble.harness.base.errors import (
    EXIT_AGREES,
    InvalidArgument,
    MissingDependency,
)
from degarble.harness.base.files import regular_file
from degarble.harness.cli import values
from degarble.harness.cli.command import command
from degarble.harness.cli.commands.talking import ARITHMETICS
from degarble.harness.cli.options import CheckpointPath
from degarble.harness.cli.terminal import Terminal
from degarble.harness.report.files import require_folder

TOKEN_VARIABLE = "DEGARBLE_SERVE_TOKEN"  # noqa: S105  the name of a variable
_SHORTEST_TOKEN, _LONGEST_TOKEN = 16, 512
_LARGEST_PORT = (1 << 16) - 1


@dataclass(frozen=True)
class ServeOptions:
    """Options of `degarble serve`."""

    checkpoint: CheckpointPath
    host: Annotated[
        str, typer.Option(metavar="HOST", help="Listen there; beyond this machine with a token.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(metavar="PORT", help="0 takes any that is free.")] = 8000
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The model's name in requests.", show_default="CKPT's folder"
        ),
    ] = None
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help=f"Ask for the token in FILE, or for the one in {TOKEN_VARIABLE}."
        ),
    ] = None
    without_token: Annotated[
        bool, typer.Option("--without-token", help="Answer anybody who reaches HOST.")
    ] = False
    max_prompt_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of one prompt.")] = (
        8192
    )
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="New tokens of one choice.")] = (
        1024
    )
    max_sequences: Annotated[
        int, typer.Option(metavar="N", help="Choices that run or wait; then status 429.")
    ] = 256
    max_memory: Annotated[
        float, typer.Option(metavar="GIB", help="Of all requests together; then status 429.")
    ] = 4.0
    time_limit: Annotated[
        float, typer.Option(metavar="SECONDS", help="Of one request, waiting included.")
    ] = 600.0
    captures: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Let requests to /capture write captures of others into DIR."
        ),
    ] = None
    numerics: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(ARITHMETICS),
            help="Arithmetic of the reference.",
            show_default="twin where activations are quantised, else bf16",
        ),
    ] = None


def add(app: typer.Typer) -> None:
    """Add the command to `app`."""
    command(app, "serve", ServeOptions)(serve)


def serve(options: ServeOptions, terminal: Terminal) -> int:
    """Answer over HTTP as OpenAI's API does: models, completions, chats; health, metrics.

    Runs the references on the CPU, for small checkpoints and debugging. Ctrl-C or SIGTERM ends it.
    """
    _require(options)
    token = _token(options, os.environ.get(TOKEN_VARIABLE))
    _require_packages()
    # Imports torch, which --help and --version do without.
    from degarble.harness.serve.messages import Bounds  # noqa: PLC0415  as above
    from degarble.harness.serve.serving import Serving, serve  # noqa: PLC0415

    bounds = Bounds(
        prompt_tokens=options.max_prompt_tokens,
        new_tokens=options.max_new_tokens,
        sequences=options.max_sequences,
        memory_bytes=int(options.max_memory * (1 << 30)),
        seconds=options.time_limit,
    )
    how = Serving(
        options.checkpoint,
        options.host,
        options.port,
        options.name,
        token,
        options.without_token,
        options.numerics,
        bounds,
        options.captures,
    )

    def say(found: dict[str, str]) -> None:
        terminal.say(f"{found['model']} ({found['mark']}) at {found['url']}; Ctrl-C ends it")
        if not _is_loopback(options.host) and not terminal.quiet:
            asked = "anybody" if token is None else "whoever has the token"
            terminal.err().print(f"open beyond this machine, to {asked}", markup=False)
        terminal.emit({"verdict": None, "origins": [], "cosines": [], **found})
        sys.stdout.flush()

    serve(how, say)
    return EXIT_AGREES


def _require(options: ServeOptions) -> None:
    """Refuse what can be refused before anything is loaded."""
    values.existing("CKPT", options.checkpoint)
    values.existing("--token-file", options.token_file)
    values.within("--port", options.port, 0, _LARGEST_PORT)
    values.within("--max-prompt-tokens", options.max_prompt_tokens, 1, 1 << 20)
    values.within("--max-new-tokens", options.max_new_tokens, 1, 1 << 20)
    values.within("--max-sequences", options.max_sequences, 1, 1 << 16)
    values.within("--max-memory", options.max_memory, 1 / 16, 1 << 20)
    values.within("--time-limit", options.time_limit, 1, 1 << 20)
    values.one_of("--numerics", options.numerics, ARITHMETICS)
    if options.captures is not None:
        require_folder("--captures", options.captures)
        if options.without_token and not _is_loopback(options.host):
            raise InvalidArgument(
                "--captures", str(options.captures), "a token, or the loopback address",
                "Captures hold what others asked: leave --without-token out.",
            )  # fmt: skip
    if options.name is not None and not (options.name and options.name.isprintable()):
        raise InvalidArgument("--name", options.name, "a printable name", "Give another one.")


def _token(options: ServeOptions, variable: str | None) -> str | None:
    """Find the token that requests have to bring; it is never shown, not even when it is wrong."""
    said = {
        "--token-file": options.token_file is not None,
        TOKEN_VARIABLE: variable is not None,
        "--without-token": options.without_token,
    }
    given = [name for name, wanted in said.items() if wanted]
    if len(given) > 1:
        raise InvalidArgument(
            " and ".join(given), "given together", "one of them", "Leave the others out."
        )
    token = variable  # an empty one is refused below: it would let anybody in without a word
    if options.token_file is not None:
        token = _from_file(options.token_file)
    if token is None:
        if not (options.without_token or _is_loopback(options.host)):
            raise InvalidArgument(
                "--host", options.host, "a token, beyond this machine's own loopback address",
                f"Set {TOKEN_VARIABLE}, or give --token-file; --without-token lets anybody in.",
            )  # fmt: skip
        return None
    fits = _SHORTEST_TOKEN <= len(token) <= _LONGEST_TOKEN
    if not (fits and token.isascii() and token.isprintable() and " " not in token):
        raise InvalidArgument(
            given[0], f"{len(token)} characters",
            f"{_SHORTEST_TOKEN} to {_LONGEST_TOKEN} printable ASCII characters without a space",
            "Make one, as with: openssl rand -hex 32.",
        )  # fmt: skip
    return token


def _from_file(path: Path) -> str:
    with regular_file(path) as (descriptor, _):
        return os.read(descriptor, _LONGEST_TOKEN + 3).decode("ascii", "replace").strip()


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _require_packages() -> None:
    from importlib.util import find_spec  # noqa: PLC0415  only here

    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise MissingDependency(
            " and ".join(missing), "absent", "the packages of the extra `server`",
            "pip install 'degarble[server]'",
        )  # fmt: skip
