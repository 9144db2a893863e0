"""Command line of `degarble generate` and `serve`: run a model."""

import os
import sys
from dataclasses import dataclass
from functools import partial
from io import TextIOWrapper
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any

import typer

from degarble.harness.base.errors import EXIT_AGREES, InvalidArgument, MissingDependency, Refused
from degarble.harness.base.files import regular_file
from degarble.harness.cli import values
from degarble.harness.cli.command import command
from degarble.harness.cli.terminal import Terminal, first_pass, tell_refusal
from degarble.harness.cli.values import (
    Backend,
    CheckpointPath,
    Prompt,
    Prompts,
    Strict,
    settings_here,
)
from degarble.harness.report.files import require_folder
from degarble.harness.report.number_text import number, visible

# --------------------------------------------------------------------------------------------------
# Command line of `degarble generate`: generate text with a model.

ARITHMETICS = ("definition", "bf16", "twin")
EFFORTS = ("low", "high", "max")
_EMPTY: dict[str, Any] = {"verdict": None, "origins": [], "cosines": []}


Numerics = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(ARITHMETICS),
        help="Arithmetic of the reference.",
        show_default="twin where activations are quantised, else bf16",
    ),
]


@dataclass(frozen=True)
class GenerateOptions:
    """Options of `degarble generate`."""

    checkpoint: CheckpointPath
    backend: Backend = "torch"
    strict: Strict = False
    graph: Annotated[
        bool, typer.Option("--graph", help="With cutedsl: whole layers, one CUDA graph a token.")
    ] = False
    prompt: Prompt = None
    prompts: Prompts = None
    interactive: Annotated[bool, typer.Option("--interactive", help="Talk turn by turn.")] = False
    perplexity: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Generate nothing; report how likely the text of FILE is."
        ),
    ] = None
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", metavar="N", help="Stop after N tokens.")
    ] = 128
    temperature: Annotated[
        float, typer.Option(metavar="T", help="0 takes the likeliest token each time.")
    ] = 0.0
    top_p: Annotated[
        float, typer.Option("--top-p", metavar="P", help="Keep the likeliest share P of tokens.")
    ] = 1.0
    seed: Annotated[int, typer.Option(metavar="S", help="Seed of the sampling.")] = 0
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End where TEXT would come; may be repeated."),
    ] = None
    chat: Annotated[
        bool, typer.Option("--chat", help="Prompts are what a user says, in the official encoding.")
    ] = False
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System message of a chat.")
    ] = None
    tools: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Functions that a chat may call.")
    ] = None
    thinking: Annotated[
        bool, typer.Option("--thinking", help="Let the model think before it answers in a chat.")
    ] = False
    effort: Annotated[
        str | None,
        typer.Option(metavar="|".join(EFFORTS), help="How much effort V4 spends on thinking."),
    ] = None
    numerics: Numerics = None


def add_generate(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    command(app, "generate", GenerateOptions)(generate)


def generate(options: GenerateOptions, terminal: Terminal) -> int:
    """Continue a prompt, answer in a chat, or score a text with a checkpoint of any layout.

    Runs the references on the CPU, or the kernels of --backend. Weights that do not fit into memory
    are streamed.
    """
    _require_generate(options, terminal)
    # Imports torch, which --help and --version do without.
    from degarble.harness.backends.registry import AskedBackend  # noqa: PLC0415
    from degarble.harness.generate import generate as run  # noqa: PLC0415
    from degarble.harness.generate.generate import open_text_generator  # noqa: PLC0415

    prompts: list[Any] = [options.prompt]
    if options.prompts is not None:
        prompts = run.prompts_from(options.prompts)
    manner = _manner(options, any(isinstance(prompt, list) for prompt in prompts))
    text = None
    if options.perplexity is not None:
        text = run.text_from("--perplexity", options.perplexity)
    lanes = len(prompts) if options.graph else 0
    backend = AskedBackend(options.backend, options.strict, settings_here(), lanes)
    with open_text_generator(options.checkpoint, options.numerics, backend) as (model, paired):
        generator = run.TextGenerator(model, manner, partial(_tell, terminal))
        said = _EMPTY | {"checkpoint": str(options.checkpoint), "numerics": model.arithmetic}
        if options.interactive:
            _converse(generator, terminal)
        elif text is not None:
            with first_pass(terminal, generator.model.streamed):
                found = generator.surprise(text)
            document = run.likelihood_document(found)
            told = f"perplexity {number(found.perplexity)}, loss {number(found.loss)} nats a token"
            terminal.say(f"{told}, {document['tokens']:,} tokens")
            terminal.emit(said | document)
        else:
            done = _speak(generator, prompts, terminal)
            terminal.emit(said | done.document() | {"backend": paired.document()})
        if not (terminal.json_wanted or terminal.quiet):
            for line in paired.lines():
                terminal.err().print(line, markup=False, soft_wrap=True)
    return EXIT_AGREES


def _require_generate(options: GenerateOptions, terminal: Terminal) -> None:
    """Refuse what can be refused before anything is loaded."""
    values.existing("CKPT", options.checkpoint)
    values.exactly_one(
        prompt=options.prompt,
        prompts=options.prompts,
        interactive=options.interactive,
        perplexity=options.perplexity,
    )
    values.backend("--backend", options.backend)
    values.strict(options.backend, wanted=options.strict)
    if options.graph and options.backend != "cutedsl":
        raise InvalidArgument(
            "--graph", f"--backend {options.backend}", "--backend cutedsl, which it captures",
            "Name it, or leave --graph out.",
        )  # fmt: skip
    values.existing("--prompts", options.prompts)
    values.existing("--perplexity", options.perplexity)
    values.existing("--tools", options.tools)
    values.within("--max-new-tokens", options.max_new_tokens, 1, float("inf"))
    values.within("--temperature", options.temperature, 0, float("inf"))
    values.within("--top-p", options.top_p, 0, 1)
    values.within("--seed", options.seed, 0, 2**63 - 1)
    values.one_of("--effort", options.effort, EFFORTS)
    if options.effort is not None and not options.thinking:
        raise InvalidArgument(
            "--effort", options.effort, "--thinking with it: effort is how much a model thinks",
            "Add --thinking, or leave --effort out.",
        )  # fmt: skip
    values.one_of("--numerics", options.numerics, ARITHMETICS)
    if options.interactive and (terminal.json_wanted or terminal.quiet):
        flag = "--json" if terminal.json_wanted else "--quiet"
        raise InvalidArgument(
            "--interactive", flag, "a conversation that is shown",
            f"Leave {flag} out, or use --prompts.",
        )  # fmt: skip


def _manner(options: GenerateOptions, conversations: bool) -> Any:
    """Make the record of how to speak; some options are of a chat alone."""
    from degarble.harness.chat.conversation import CHAT, THINKING, Style  # noqa: PLC0415  as above
    from degarble.harness.generate import generate as run  # noqa: PLC0415  imports torch
    from degarble.harness.inference.generation import (  # noqa: PLC0415
        Limits,
        Sampling,
    )

    given = (options.system, options.tools, options.effort)
    chat = options.chat or options.thinking or conversations or any(x is not None for x in given)
    return run.GenerationOptions(
        Sampling(options.temperature, options.top_p, options.seed),
        Limits(options.max_new_tokens, tuple(options.stop or ())),
        chat,
        Style(THINKING if options.thinking else CHAT, options.effort),
        options.system,
        () if options.tools is None else run.tools_from(options.tools),
    )


def _speak(talker: Any, prompts: list[Any], terminal: Terminal) -> Any:
    """Continue prompts; a single one is shown while it grows, several when they are done."""
    single, shown = len(prompts) == 1, not (terminal.json_wanted or terminal.quiet)

    with first_pass(terminal, talker.model.streamed) as first_pass_over:

        def on_text(_speech: object, piece: str) -> None:
            first_pass_over()
            if shown and single:
                sys.stdout.write(visible(piece))
                sys.stdout.flush()

        try:
            done = talker.speak(prompts, on_text)
        except KeyboardInterrupt:
            if shown and single:
                sys.stdout.write("\n")
                sys.stdout.flush()
            raise
    if single:
        terminal.say("")
    else:
        for place, speech in enumerate(done.speeches, 1):
            terminal.say(f"[{place}] {visible(speech.text)}")
    if shown:
        terminal.err().print(done.line(), markup=False)
    return done


def _converse(talker: Any, terminal: Terminal) -> None:
    """Read what a person says line by line, and answer; Ctrl-C ends an answer, Ctrl-D the talk."""
    from degarble.harness.generate.generate import Dialogue  # noqa: PLC0415  imports torch

    dialogue, asking = Dialogue(talker), sys.stdin.isatty()
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # one line is refused, not the talk
    while True:
        try:
            said = input("> " if asking else "")
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n" if asking else "")
            return
        if not said.strip():
            continue
        try:
            question = dialogue.add_user_message(_in_utf8(said))
        except Refused as error:
            tell_refusal(error, json_wanted=False)
            continue
        try:
            dialogue.answer(question, lambda _speech, piece: _show(piece))
        except KeyboardInterrupt:
            terminal.err().print("(interrupted)", markup=False)
        sys.stdout.write("\n")
        sys.stdout.flush()


def _in_utf8(said: str) -> str:
    try:
        said.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            "what was said", ascii(said), f"text in UTF-8 (character {error.start + 1} is none)",
            "Say it again.",
        ) from error  # fmt: skip
    return said


def _tell(terminal: Terminal, text: str) -> None:
    """Tell a person something beside the text."""
    terminal.err().print(visible(text), markup=False, soft_wrap=True)


def _show(piece: str) -> None:
    sys.stdout.write(visible(piece))
    sys.stdout.flush()


# --------------------------------------------------------------------------------------------------
# Command line of `degarble serve`: serve a model over HTTP.

TOKEN_VARIABLE = "DEGARBLE_SERVE_TOKEN"  # noqa: S105  the name of a variable
_SHORTEST_TOKEN, _LONGEST_TOKEN = 16, 512
_LARGEST_PORT = (1 << 16) - 1


@dataclass(frozen=True)
class ServeOptions:
    """Options of `degarble serve`."""

    checkpoint: CheckpointPath
    host: Annotated[
        str,
        typer.Option(
            metavar="HOST", help="Address to listen on; outside this machine a token is needed."
        ),
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(metavar="PORT", help="0 chooses a free port.")] = 8000
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The model's name in requests.", show_default="CKPT's folder"
        ),
    ] = None
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help=f"Require the token in FILE, or the one in {TOKEN_VARIABLE}."
        ),
    ] = None
    without_token: Annotated[
        bool, typer.Option("--without-token", help="Answer everybody who can reach HOST.")
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
    numerics: Numerics = None


def add_serve(app: typer.Typer) -> None:
    """Add the command to `app`."""
    command(app, "serve", ServeOptions)(serve)


def serve(options: ServeOptions, terminal: Terminal) -> int:
    """Answer over HTTP as OpenAI's API does: models, completions, chats; health, metrics.

    Runs the references on the CPU, for small checkpoints and debugging. Ctrl-C or SIGTERM ends it.
    """
    _require_serve(options)
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
    serving = Serving(
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
            asked = "anybody" if token is None else "anyone with the token"
            terminal.err().print(f"open beyond this machine, to {asked}", markup=False)
        terminal.emit({"verdict": None, "origins": [], "cosines": [], **found})
        sys.stdout.flush()

    serve(serving, say)
    return EXIT_AGREES


def _require_serve(options: ServeOptions) -> None:
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
                "Captures contain other people's prompts: leave --without-token out.",
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
