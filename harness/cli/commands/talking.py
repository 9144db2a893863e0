"""`degarble generate` and `serve`: the model speaks."""

from dataclasses import dataclass
from typing import Annotated

import typer

from degarble.harness.cli import values
from degarble.harness.cli.command import NOT_BUILT, command
from degarble.harness.cli.options import CheckpointPath, Prompt, Prompts
from degarble.harness.cli.terminal import Terminal


@dataclass(frozen=True)
class GenerateOptions:
    """Options of `degarble generate`."""

    checkpoint: CheckpointPath
    prompt: Prompt = None
    prompts: Prompts = None
    interactive: Annotated[bool, typer.Option("--interactive", help="Talk turn by turn.")] = False
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


@dataclass(frozen=True)
class ServeOptions:
    """Options of `degarble serve`."""

    checkpoint: CheckpointPath


def add(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    command(app, "generate", GenerateOptions, panel=NOT_BUILT)(generate)
    command(app, "serve", ServeOptions, panel=NOT_BUILT)(serve)


def generate(options: GenerateOptions, _terminal: Terminal) -> int:
    """Let a checkpoint continue a prompt, through the references or own kernels."""
    values.existing("CKPT", options.checkpoint)
    values.exactly_one(
        prompt=options.prompt, prompts=options.prompts, interactive=options.interactive
    )
    values.existing("--prompts", options.prompts)
    values.within("--max-new-tokens", options.max_new_tokens, 1, float("inf"))
    values.within("--temperature", options.temperature, 0, float("inf"))
    values.within("--top-p", options.top_p, 0, 1)
    values.within("--seed", options.seed, 0, 2**63 - 1)
    raise values.not_built("generate", "running a model")


def serve(options: ServeOptions, _terminal: Terminal) -> int:
    """Answer over HTTP on this machine."""
    values.existing("CKPT", options.checkpoint)
    raise values.not_built("serve", "running a model")
