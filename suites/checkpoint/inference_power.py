"""How often each inference of the audit is right, undecided or wrong: the figures of its note.

`python -m degarble.suites.checkpoint.inference_power [TRIALS]` prints one Markdown table. Every
trial draws its own weights (Student's t with six degrees of freedom, rows of unlike gain); the
seed is the number of the trial, so the table is the same on every machine. No suite by itself; what
the suites hold fast is in test_inference_layout.py, test_inference_order.py and
test_inference_dialect.py.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.checkpoint.audit.statistics.inference import (
    LINEAR,
    Kinship,
    ReferenceProfile,
    candidates,
    infer_layout,
    infer_order,
    logs_of,
)
from degarble.harness.formats.dialects import CANONICAL, COMPRESSED_TENSORS, MODELOPT, TORCHAO
from degarble.harness.formats.layouts import SWIZZLE_128X4, to_layout
from degarble.harness.formats.number_formats import NVFP4
from degarble.harness.formats.quantise import quantise
from degarble.harness.formats.weight import Weight
from degarble.suites.checkpoint.audit.statistics.test_inference import energies, packed_as, traces
from degarble.suites.checkpoint.number_cases import channels, generator, matrix

if TYPE_CHECKING:
    from collections.abc import Iterator

TRIALS = 40
_OPEN = " (undecided is right)"
PRODUCED = {
    "modelopt": MODELOPT,
    "canonical, flashinfer or vllm": CANONICAL,
    "torchao": TORCHAO,
    "compressed_tensors": COMPRESSED_TENSORS,
}


class Line(NamedTuple):
    """One question and how often it was answered how."""

    question: str
    right: int
    undecided: int
    wrong: int


def _counted(question: str, answers: list[str | None], wanted: str | None) -> Line:
    found = Counter(
        "right" if answer == wanted else "undecided" if answer is None else "wrong"
        for answer in answers
    )
    return Line(question, found["right"], found["undecided"], found["wrong"])


def layouts(trials: int) -> Iterator[Line]:
    """Block scales in order, swizzled, and in an order that nobody knows."""
    for shape in ((128, 256), (128, 1024), (512, 1024)):
        answers: dict[str, list[str | None]] = {LINEAR: [], "128x4": [], "shuffled": []}
        for seed in range(trials):
            weight = Weight.of(quantise(matrix(seed, *shape), NVFP4, MODELOPT))
            assert weight.block_scale is not None
            scales = weight.block_scale.clone()
            moved = torch.randperm(shape[0], generator=generator(seed))
            for name, stored in (
                (LINEAR, scales),
                ("128x4", to_layout(scales, SWIZZLE_128X4).reshape(scales.shape)),
                ("shuffled", scales[moved]),
            ):
                weight.block_scale = stored
                answers[name].append(infer_layout(weight).value)
        for name, answer in answers.items():
            wanted = None if name == "shuffled" else name
            text = f"scale layout, {shape[0]} x {shape[1]}, {name}{'' if wanted else _OPEN}"
            yield _counted(text, answer, wanted)


def orders(trials: int) -> Iterator[Line]:
    """Halves of bytes swapped, beside an unpacked matrix on the same input."""
    for width in (1024, 3072, 7168):
        for spread in (0.05, 0.1, 0.2):
            answers: list[str | None] = []
            for seed in range(trials):
                gains = torch.exp(spread * torch.randn(width, generator=generator(seed)))
                known = ReferenceProfile(Kinship.SIBLING, logs_of(energies(seed + 1000, gains, 64)))
                packed = packed_as("high_even", energies(seed + 2000, gains))
                answers.append(infer_order(packed, [known]).value)
            text = f"packing order swapped, {width} columns that differ by {spread:.0%}"
            yield _counted(text, answers, "high_even")
    for kinship in (Kinship.NORM, Kinship.PRODUCER):
        answers = []
        for seed in range(trials):
            other = ReferenceProfile(kinship, logs_of(channels(seed + 1000, 3072, 0.5).numpy()))
            answers.append(infer_order(energies(seed, channels(seed, 3072, 0.5)), [other]).value)
        text = f"packing order beside an unrelated profile, {kinship.name.lower()}{_OPEN}"
        yield _counted(text, answers, None)


def dialects(trials: int) -> Iterator[Line]:
    """Who wrote a group of tensors, without any block of zeros in them."""
    for tensors in (6, 12, 24):
        answers: list[str | None] = []
        for seed in range(max(1, trials // 4)):
            for name, dialect in PRODUCED.items():
                left = candidates(traces(100 * seed, dialect, zeros=False, tensors=tensors))
                text = left[0] if len(left) == 1 else None
                answers.append("right" if text == name else None if name in left else "wrong")
        yield _counted(f"dialect of {tensors} tensors, four producers", answers, "right")


def main(*arguments: str) -> None:
    """Print the table."""
    trials = int(arguments[0]) if arguments else TRIALS
    torch.set_num_threads(1)
    lines = ["| question | right | undecided | wrong |", "| --- | --- | --- | --- |"]
    for part in (layouts, orders, dialects):
        lines += [
            f"| {line.question} | {line.right} | {line.undecided} | {line.wrong} |"
            for line in part(trials)
        ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
