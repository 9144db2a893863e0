"""Command line of `degarble probe`: check a server from outside."""

import json
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from degarble.harness.base.errors import InvalidArgument, UnreadableFile
from degarble.harness.base.files import read_small_file, regular_file
from degarble.harness.cli import values
from degarble.harness.cli.command import command
from degarble.harness.cli.terminal import Terminal
from degarble.harness.cli.values import Prompts
from degarble.harness.report.files import is_stream, require_folder

ROUNDINGS = ("fp32", "fp16", "bf16", "fp8", "fp4")
_LONGEST_TOKEN = 8192
_LARGEST_PROMPTS = 16 << 20
_SHOWN = 100  # characters of a line that cannot be read
_FEWEST = 4  # prompts that a probe can tell anything from


@dataclass(frozen=True)
class ProbeArguments:
    """Options of `degarble probe`."""

    url: Annotated[
        str, typer.Argument(metavar="URL", help="Address of the server: http://HOST:PORT.")
    ]
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The model in requests.", show_default="the first that is listed"
        ),
    ] = None
    against: Annotated[
        str | None,
        typer.Option(
            metavar="URL|CKPT", help="Compare with another server, or with a checkpoint run here."
        ),
    ] = None
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Send the token in FILE.")
    ] = None
    against_token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The token of the other server.")
    ] = None
    prompts: Prompts = None
    rounding: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(ROUNDINGS),
            help="Rounding of activations, where it is known.",
            show_default="bf16, and fp8 between prefill and decoding",
        ),
    ] = None
    max_prompt_tokens: Annotated[
        int, typer.Option(metavar="N", help="Tokens of the longest prompt.")
    ] = 2048
    requests: Annotated[int, typer.Option(metavar="N", help="Requests at most.")] = 400
    rate: Annotated[float, typer.Option(metavar="N", help="Requests a second.")] = 20.0
    time_limit: Annotated[float, typer.Option(metavar="SECONDS", help="Of the whole probe.")] = (
        600.0
    )
    request_time: Annotated[float, typer.Option(metavar="SECONDS", help="Of one request.")] = 60.0
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write page and requests into DIR.")
    ] = None


def add(app: typer.Typer) -> None:
    """Add the command to `app`."""
    command(app, "probe", ProbeArguments)(probe)


def probe(options: ProbeArguments, terminal: Terminal) -> int:
    """Check the numbers of any server with OpenAI's interface, from outside.

    Asks for the same distributions in several ways: again, in a batch, cached, in pieces, streamed.
    """
    texts = _require(options)
    token = _token("--token-file", options.token_file)
    other_token = _token("--against-token-file", options.against_token_file)
    from degarble.harness.probe import probe as run  # noqa: PLC0415  start-up time
    from degarble.harness.probe.client import Client, RequestLimits  # noqa: PLC0415
    from degarble.harness.probe.report import probe_document, probe_text  # noqa: PLC0415
    from degarble.harness.probe.session import DEFAULT, GIVEN, ProbeOptions  # noqa: PLC0415

    limits = RequestLimits(options.requests, options.rate, options.time_limit, options.request_time)
    client = Client(options.url, token, limits)
    prompts = DEFAULT if options.prompts is None else GIVEN
    wanted = ProbeOptions(texts, options.rounding, options.max_prompt_tokens, prompts=prompts)
    with ExitStack() as stack:
        step = stack.enter_context(_shown(terminal, client))
        beside = _beside(options, (other_token, limits), stack, step)
        result = run.probe(client, wanted, options.model, step, beside)
    folder = _folder(options, terminal)
    document = probe_document(result, folder)
    # Shown first: a disk that is full by now loses files, and not the result.
    terminal.say(probe_text(result, folder, width=terminal.width, colour=terminal.colour))
    if folder is not None:
        from degarble.harness.probe.report import write_requests  # noqa: PLC0415  as above

        document["requests"] = [str(file) for file in write_requests(result, folder)]
    if options.report is not None:
        document["report"] = _page(options, result, folder)
        terminal.say(f"Open the report: {document['report']}")
    terminal.emit(document)
    if result.interrupted:  # what was gathered is written
        raise KeyboardInterrupt
    return result.verdict.exit_status


def _require(options: ProbeArguments) -> tuple[str | tuple[int, ...], ...]:
    """Refuse what can be refused before anything is asked; return the prompts."""
    values.existing("--token-file", options.token_file)
    values.existing("--against-token-file", options.against_token_file)
    values.existing("--prompts", options.prompts)
    values.one_of("--rounding", options.rounding, ROUNDINGS)
    values.within("--max-prompt-tokens", options.max_prompt_tokens, 128, 1 << 17)
    values.within("--requests", options.requests, 20, 10_000)
    values.within("--rate", options.rate, 0.1, 1000)
    values.within("--time-limit", options.time_limit, 1, 1 << 17)
    values.within("--request-time", options.request_time, 1, 1 << 17)
    if options.report is not None:
        require_folder("--report", options.report)
    if options.against is not None and not _is_url(options.against):
        values.existing("--against", Path(options.against))
    if options.against_token_file is not None and not _is_url(options.against or ""):
        raise InvalidArgument(
            "--against-token-file", str(options.against_token_file), "--against URL",
            "Leave it out: a checkpoint needs no token.",
        )  # fmt: skip
    if options.prompts is None:
        from degarble.harness.probe.passages import PASSAGES  # noqa: PLC0415  only here

        return PASSAGES
    return read_prompts(options.prompts)


def read_prompts(path: Path) -> tuple[str | tuple[int, ...], ...]:
    """Read prompts: one a line, or, in a .jsonl file, a text or a list of token ids a line."""
    raw = read_small_file(path, _LARGEST_PROMPTS).decode("utf-8", "replace")
    lines = tuple(line for line in raw.split("\n") if line.strip())
    if len(lines) < _FEWEST:
        raise UnreadableFile(
            "--prompts", str(path), f"{_FEWEST} prompts at least, one a line",
            "Add lines, or leave --prompts out.",
        )  # fmt: skip
    if path.suffix != ".jsonl":
        return lines
    found = [_json_prompt(f"{path}: line {n}", line) for n, line in enumerate(lines, 1)]
    if len({type(prompt) for prompt in found}) > 1:
        raise InvalidArgument(
            "--prompts", f"{path}: texts and token ids", "prompts of one kind",
            "Write all as texts, or all as lists of token ids.",
        )  # fmt: skip
    return tuple(found)


def _json_prompt(place: str, line: str) -> str | tuple[int, ...]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, str) and found.strip():
        return found
    if isinstance(found, list) and found and all(type(n) is int and n >= 0 for n in found):
        return tuple(found)
    raise InvalidArgument(
        place, line[:_SHOWN], "a JSON text, or a list of token ids",
        "Write one JSON value a line, as in [1, 5, 9].",
    )  # fmt: skip


def _token(name: str, path: Path | None) -> str | None:
    """Read a token; it is never shown, not even where it is wrong."""
    if path is None:
        return None
    with regular_file(path) as (descriptor, _):
        token = os.read(descriptor, _LONGEST_TOKEN + 1).decode("ascii", "replace").strip()
    if not (0 < len(token) <= _LONGEST_TOKEN and token.isascii() and token.isprintable()):
        raise InvalidArgument(
            name, f"{len(token)} characters", "one line of printable ASCII",
            "Write the token alone into the file.",
        )  # fmt: skip
    return token


def _is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


@contextmanager
def _shown(terminal: Terminal, client: Any) -> Iterator[Callable[[str], None]]:
    """Show which check runs and how many requests were made; return what is called with each."""
    check = ""
    # No total is known: checks are left out, and a fault costs requests to confirm.
    with terminal.work("probe", 0) as progress:

        def asked(count: int) -> None:
            progress.step(f"{check}, request {count}")

        def told(name: str) -> None:
            nonlocal check
            check = name

        client.on_request = asked
        yield told


def _beside(
    options: ProbeArguments, other: tuple[str | None, Any], stack: ExitStack, told: Any
) -> Callable[[Any, Any], None] | None:
    """Return what compares with the other side, opened before anything is asked."""
    if options.against is None:
        return None
    # Imports torch for a checkpoint; --help and --version do without.
    from degarble.harness.probe import against as paired  # noqa: PLC0415

    if not _is_url(options.against):
        side: Any = stack.enter_context(paired.local_side(Path(options.against)))
    else:
        from degarble.harness.probe.client import Client  # noqa: PLC0415  as above
        from degarble.harness.probe.server import explore  # noqa: PLC0415  as above

        token, limits = other
        client = Client(options.against, token, limits)
        side = paired.ServerSide(explore(client, None, _require(options)[::-1]))
    return lambda session, keep: paired.against(session, side, told, keep)


def _folder(options: ProbeArguments, terminal: Terminal) -> Path | None:
    """Where the requests of findings are written: in the report's folder, else by the JSON file."""
    if options.report is not None:
        options.report.mkdir(parents=True, exist_ok=True)
        return options.report
    if terminal.json_file is not None and not is_stream(terminal.json_file):
        return terminal.json_file.resolve().parent
    return None


def _page(options: ProbeArguments, result: Any, folder: Path | None) -> str:
    """Write the page; give its place."""
    from degarble.harness.commands.report_folder import write_page  # noqa: PLC0415  as above
    from degarble.harness.probe.report import probe_page  # noqa: PLC0415  as above
    from degarble.harness.report.page import provenance  # noqa: PLC0415  as above

    assert options.report is not None, "called only with one"
    page = probe_page(result, provenance(_command(options)), folder)
    return str(write_page(options.report, page))


def _command(options: ProbeArguments) -> str:
    """Return the command with what decides about its result; no file of a token is named."""
    words = ["degarble", "probe", options.url]
    names = ("model", "against", "prompts", "rounding", "max_prompt_tokens", "requests")
    for name in names:
        value = getattr(options, name)
        if value != getattr(ProbeArguments, name, None):
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)
