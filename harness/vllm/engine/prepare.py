"""What an engine is asked, and what the references answer: checkpoints, texts, questions.

    python -m degarble.harness.vllm.engine.prepare DIR [--only NAME]

Writes the trained small V4 by recipe (input scales from four held-out documents), the references'
greedy texts with vLLM's conventions, and questions whose answers the references are sure of. How
sure is enough follows from the references: how far logits move if one rounding moves. Trap: few
calibration tokens. Scales of nine tokens clip, and then every rounding matters.

An interrupted run leaves no folder.
Shape letters: T tokens, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import DegarbleError, InvalidArgument, WorkerLost
from degarble.harness.checkpoint.view.quantisation_configs import CONFIG
from degarble.harness.inference.generation import Continuation, Generation, Limits
from degarble.harness.inference.model import open_model
from degarble.harness.report.files import require_folder
from degarble.harness.vllm.capture import stated_conventions
from degarble.harness.vllm.engine.steps import Answers, ReferenceText
from degarble.harness.vllm.installed import NAME
from degarble.references import tiny
from degarble.references.model import Sequence
from degarble.references.numerics import HeadNorm
from degarble.references.tiny import figures, language
from degarble.references.tiny.language import document

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Many

    from torch import Tensor

    from degarble.harness.inference.model import LogitsModel
    from degarble.references.tiny.language import Document

SOURCE = Path(tiny.__file__).parent / "v1" / "v4"
CALIBRATION = 4  # documents
_QUANTISED = {
    "experts": ("ffn.experts.*",),
    "full": ("ffn.experts.*", "attn.wq_a", "attn.wkv", "attn.wq_b", "attn.wo_b",
             "ffn.shared_experts.*"),
}  # fmt: skip
CHECKPOINTS = ("bf16", *_QUANTISED)
# vLLM 0.26's own class of config refuses these of the tiny model's config.json.
_NOT_FOR_026 = (
    "compress_rates", "layer_types", "mlp_layer_types", "partial_rotary_factor", "rope_parameters"
)  # fmt: skip
LENGTHS = (40, 90, 130, 180, 40, 60, 129, 100, 701, 1201)  # of the texts' prompts
NEW, TOP = 48, 16  # tokens of a text; logits that are kept of a place
QUESTIONS = 64
DOCUMENTS = tuple(figures.HELD_OUT + number for number in range(4))  # their seeds
# Conventions that move one rounding each, and nothing else.
MOVED: Many[Mapping[str, Any]] = (
    {"head_norm": HeadNorm.EACH_STEP}, {"pooling_in_storage_dtype": True}
)  # fmt: skip


def write_checkpoint(name: str, folder: Path, amax: Path) -> Path:
    """Write one of CHECKPOINTS in the form that vLLM reads."""
    if name not in _QUANTISED:
        shutil.copytree(SOURCE, folder)
        (folder / "manifest.json").unlink()  # its config.json is another now
    else:
        rules = [
            {"match": f"layers.*.{each}", "weight": "NVFP4", "activation": "NVFP4"}
            for each in _QUANTISED[name]
        ]
        recipe = folder.with_suffix(".yaml")  # YAML reads JSON
        recipe.write_text(json.dumps({"name": name, "rules": rules}), encoding="utf-8")
        _run("quantise", SOURCE, folder, "--recipe", recipe, "--calibration", amax)
        recipe.unlink()
        (folder / "manifest.json").unlink()
    path = folder / CONFIG
    config = json.loads(path.read_text(encoding="utf-8"))
    kept = {key: value for key, value in config.items() if key not in _NOT_FOR_026}
    path.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    return folder


def calibrate(folder: Path) -> Path:
    """Record input ranges over documents that no training saw and no question asks."""
    prompts = folder / "calibration.jsonl"
    lines = [
        language.decode(document(figures.HELD_OUT - 1 - each).ids[1:])
        for each in range(CALIBRATION)
    ]
    prompts.write_text("".join(f"{json.dumps(each)}\n" for each in lines), encoding="utf-8")
    amax = folder / "amax"
    _run("capture", SOURCE, "--amax-only", "--out", amax, "--prompts", prompts)
    prompts.unlink()
    return amax


def _run(*line: object) -> None:
    given = [sys.executable, "-m", "degarble.harness.cli.main", *map(str, line), "--quiet"]
    done = subprocess.run(given, check=False)  # noqa: S603  our own command
    if done.returncode:
        raise WorkerLost(
            f"degarble {line[0]}", f"status {done.returncode}", "status 0",
            "It says above what it lacked.",
        )  # fmt: skip


def answers(checkpoint: Path) -> Answers:
    """Let the references speak, and see how sure they are."""
    plain = stated_conventions(NAME)
    with open_model(checkpoint, switches=plain) as model:
        logits_model = model.logits_model
        continuations = [
            Continuation(document(figures.HELD_OUT + 100 + n).ids[:length])
            for n, length in enumerate(LENGTHS)
        ]
        Generation(logits_model, None, None, Limits(NEW)).run(continuations)
        rows = [
            forced(logits_model, continuation.prompt, continuation.ids)
            for continuation in continuations
        ]
        read = [(told, _read(logits_model, told)) for told in map(document, DOCUMENTS)]
    moves, steady = 0.0, NEW * len(continuations)
    for other in MOVED:
        with open_model(checkpoint, switches={**plain, **other}) as model:
            again = [
                forced(model.logits_model, continuation.prompt, continuation.ids)
                for continuation in continuations
            ]
        moves = max(moves, *(moved(a, b) for a, b in zip(rows, again, strict=True)))
        same = (_stays(a, b) for a, b in zip(rows, again, strict=True))
        steady = min(steady, sum(same))
    sure = [question for told, rows_TV in read for question in questions(told, rows_TV, moves)]
    step = max(1, len(sure) // QUESTIONS)
    texts = [
        _text(continuation.prompt, continuation.ids, row)
        for continuation, row in zip(continuations, rows, strict=True)
    ]
    return Answers(texts, sure[::step][:QUESTIONS], moves, steady)


def forced(model: LogitsModel, prompt: list[int], ids: list[int]) -> Tensor:
    """Return logits [T, V] in front of each of `ids`."""
    hidden = model.hidden([Sequence()], [torch.tensor(prompt + ids)])
    return model.logits(hidden[len(prompt) - 1 : -1]).float()


def moved(rows_TV: Tensor, again_TV: Tensor) -> float:
    """Return how far the largest logits move against the first of them, at most."""
    best = rows_TV.topk(TOP, -1).indices
    before, after = rows_TV.gather(-1, best), again_TV.gather(-1, best)
    apart = (after - after[:, :1]) - (before - before[:, :1])
    return float(apart.abs().max())


def _stays(rows_TV: Tensor, again_TV: Tensor) -> int:
    return int((rows_TV.argmax(-1) == again_TV.argmax(-1)).sum())


def _text(prompt: list[int], ids: list[int], rows_TV: Tensor) -> ReferenceText:
    top = rows_TV.topk(TOP, -1)
    logits = [[round(each, 4) for each in row] for row in top.values.tolist()]
    return ReferenceText(prompt, ids, top.indices.tolist(), logits)


def _read(model: LogitsModel, told: Document) -> Tensor:
    return forced(model, told.ids[:1], told.ids[1:])


def questions(told: Document, rows_TV: Tensor, moves: float) -> list[ReferenceText]:
    """Return a document's questions, each with all ids from its answer on that are sure."""
    top = rows_TV.topk(2, -1)
    sure = (top.values[:, 0] - top.values[:, 1] > moves).tolist()
    likeliest, found = top.indices[:, 0].tolist(), []
    for probe in told.probes:
        end = probe.position
        while end < len(told.ids) and sure[end - 1] and likeliest[end - 1] == told.ids[end]:
            end += 1
        if end > probe.position:
            ids, rows = told.ids[probe.position : end], rows_TV[probe.position - 1 : end - 1]
            found.append(_text(told.ids[: probe.position], ids, rows))
    return found


def prepare(folder: Path, names: Many[str] = CHECKPOINTS) -> None:
    """Write checkpoints and answers."""
    if folder.exists():
        raise InvalidArgument("DIR", str(folder), "a folder that does not exist", "Remove it.")
    require_folder("DIR", folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as draft:
        made = Path(draft) / folder.name
        made.mkdir()
        _fill(made, tuple(dict.fromkeys(names)))
        made.rename(folder)


def _fill(folder: Path, names: Many[str]) -> None:
    amax = calibrate(folder)
    for name in names:
        found = answers(write_checkpoint(name, folder / name, amax))
        (folder / f"{name}.json").write_text(json.dumps(asdict(found)), encoding="utf-8")
        print(  # noqa: T201  a script
            f"{name}: {len(found.texts)} texts, {len(found.questions)} questions; a moved rounding"
            f" moves logits by {found.moves:.2f} at most, {found.steady} of"
            f" {NEW * len(found.texts)} ids stay",
            flush=True,
        )
    shutil.rmtree(amax)


def main(arguments: list[str] | None = None) -> int:
    """Prepare; status 2 where that is refused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=CHECKPOINTS, action="append")
    given = parser.parse_args(arguments)
    try:
        prepare(given.folder, given.only or CHECKPOINTS)
    except DegarbleError as error:
        print(f"REFUSED: {error}", file=sys.stderr)  # noqa: T201  a script
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
