"""Option types that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

CheckpointPath = Annotated[
    Path, typer.Argument(metavar="CKPT", help="Checkpoint: a directory with safetensors files.")
]
CapturePath = Annotated[
    Path, typer.Argument(metavar="CAPTURE", help="Recorded tensors of one run.")
]
ReportFolder = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Write the checkpoint's page into DIR.")
]
Backend = Annotated[
    str,
    typer.Option(metavar="NAME", help="torch, cutedsl, vllm, or module:factory for own kernels."),
]
Partial = Annotated[
    bool,
    typer.Option("--partial", help="Judge what there is of a capture whose run was killed."),
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Refuse where any component would fall to torch."),
]
Convention = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="Arithmetic that the candidate follows, such as head_norm=once; may be repeated.",
    ),
]
Prompt = Annotated[str | None, typer.Option(metavar="TEXT", help="The prompt itself.")]
Prompts = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A file with one prompt a line.")
]
