"""What a small model knows through our kernels, beside the twin: a script that prints a table.

    python -m degarble.suites.bench.bench_decoder_text [--family F] [--documents N] [--twin N]

Held-out documents are read and continued in two ways: by the decoder's graph, all documents in one
batch and a token a step, and by the twin on the CPU with the kernels' conventions. Shares of right
answers have Wilson's interval at 95 %. Kernels are within noise of the twin if, for each kind of
answer, each share lies in the other's interval; perplexity is printed too. `--twin N --documents 0`
needs no GPU.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.backends.cutedsl.backend import CONVENTIONS
from degarble.harness.backends.cutedsl.kernels import KernelsOnGpu
from degarble.harness.backends.graph.decoder import Decoder, DecoderSpeaker
from degarble.harness.base.errors import DegarbleError
from degarble.harness.cli.values import settings_here
from degarble.harness.inference.generation import Continuation, Generation, Limits, Sampling
from degarble.harness.inference.model import LogitsModel
from degarble.references.binding import BoundModel
from degarble.references.model import Sequence
from degarble.references.numerics import Numerics
from degarble.references.tiny import figures, language
from degarble.references.tiny.language import document, sentence
from degarble.suites.bench.bench_tiny import FOLDER, Model

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


FAMILIES = ("v4", "v32")
RECIPES = ("nvfp4-experts", "nvfp4-full")
KINDS = {
    "far recall": figures.FAR, "near recall": (figures.NEAR,), "sums": ("sum",),
    "copies": ("copy",),
}  # fmt: skip
TEXT_TOKENS, TEMPERATURE, ROOM = 128, 0.7, 512


@dataclass(frozen=True)
class Found:
    """What one way of computing knows."""

    who: str
    score: figures.ProbeScore
    sentences: tuple[int, int]

    def row(self) -> str:
        """One line of the table."""
        parts = [f"{self.score.perplexity:.4f}"] + [self.share(kind) for kind in KINDS]
        good, every = self.sentences
        spoken = f"{100 * good / every:.1f} % of {every}" if every else "not spoken"
        return f"| {self.who} | {' | '.join(parts)} | {spoken} |"

    def share(self, kind: str) -> str:
        """A share with its interval and the number of questions."""
        low, high = self.score.interval(*KINDS[kind])
        asked = sum(self.score.asked[each] for each in KINDS[kind])
        share = 100 * self.score.share(*KINDS[kind])
        return f"{share:.1f} % [{100 * low:.1f}, {100 * high:.1f}] of {asked}"

    def apart_from(self, other: Found) -> list[str]:
        """Kinds of questions of which neither share lies in the other's interval."""
        return [
            kind
            for kind, parts in KINDS.items()
            if any(self.score.asked[each] for each in parts)
            if not _inside(self.score, other.score, parts)
            and not _inside(other.score, self.score, parts)
        ]


def _inside(score: figures.ProbeScore, of: figures.ProbeScore, parts: tuple[str, ...]) -> bool:
    low, high = of.interval(*parts)
    return low <= score.share(*parts) <= high


def bound_of(model: Model) -> BoundModel:
    """The model in the twin's arithmetic, with the conventions of our kernels."""
    told = replace(Numerics.twin(), work=torch.float64, products=torch.float64)
    numerics = told.with_switches(**CONVENTIONS)
    return BoundModel(model.config, numerics, model.weights, model.recipe)


def read_together(decoder: Decoder, documents: list[list[int]]) -> list[Tensor]:
    """Logits [T, V] of documents that lie in the lanes, a token a step."""
    lanes = decoder.stepping.room.lanes
    kept: list[list[Tensor]] = [[] for _ in documents]
    for position in range(max(map(len, documents))):
        ids: list[int | None] = [
            each[position] if position < len(each) else None for each in documents
        ]
        ids += [None] * (lanes - len(ids))
        decoder.feed(ids, [position] * lanes)
        logits = decoder.run()[1].cpu()
        for place, each in enumerate(ids[: len(documents)]):
            if each is not None:
                kept[place].append(logits[place])
    return [torch.stack(rows) for rows in kept]


def spoken(speaker: LogitsModel, texts: int) -> tuple[int, int]:
    """Let a model go on from sentences at low temperature: grammatical ones, and all."""
    rng = random.Random(figures.HELD_OUT)
    speeches = [Continuation([language.BOS, *language.encode(sentence(rng))]) for _ in range(texts)]
    for seed, speech in enumerate(speeches):  # draws of its own for each text
        speech.sampler = Sampling(TEMPERATURE, 1.0, seed).sampler()
    Generation(speaker, None, None, Limits(TEXT_TOKENS)).run(speeches)
    return figures.grammatical(language.decode(each.ids) for each in speeches)


def by_kernels(model: Model, documents: int, texts: int) -> Found:
    """Through the decoder's graph."""
    bound, kernels = bound_of(model), KernelsOnGpu(settings_here())
    seeds = range(figures.HELD_OUT, figures.HELD_OUT + documents)
    ids = [document(seed).ids for seed in seeds]
    with torch.inference_mode():
        decoder = Decoder.of(kernels, bound, model.recipe, documents, max(map(len, ids)))
        decoder.capture()
        begin = time.perf_counter()
        made = dict(zip(map(tuple, ids), read_together(decoder, ids), strict=True))
        seconds = time.perf_counter() - begin
        _say(f"{sum(map(len, ids)):,} tokens read by kernels in {seconds:.1f} s")
        told = figures.score((document(seed) for seed in seeds), lambda each: made[tuple(each)])
        aloud = Decoder.of(kernels, bound, model.recipe, texts, ROOM)
        aloud.capture()
        return Found("kernels", told, spoken(DecoderSpeaker(bound, aloud), texts))


def by_twin(model: Model, documents: int, texts: int) -> Found:
    """Through the references."""
    speaker = LogitsModel(bound_of(model))

    def made(ids: list[int]) -> Tensor:
        return speaker.logits(speaker.hidden([Sequence()], [torch.tensor(ids)]))

    seeds = range(figures.HELD_OUT, figures.HELD_OUT + documents)
    told = figures.score((document(seed) for seed in seeds), made)
    return Found("twin", told, spoken(speaker, texts))


def table(recipe: str, found: list[Found]) -> list[str]:
    """Print what is known under a recipe; what is out of noise."""
    _say(f"\n**{recipe}**\n\n| by | perplexity | {' | '.join(KINDS)} | sentences |")
    _say(f"|{'---|' * (len(KINDS) + 3)}")
    for each in found:
        _say(each.row())
    if len(found) < 2:
        return []
    return [f"{recipe}: {kind}" for kind in found[0].apart_from(found[1])]


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; status 1 where kernels are out of noise, 2 where none can run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", choices=FAMILIES, default=FAMILIES[0])
    parser.add_argument("--documents", type=int, default=64, help="that kernels read")
    parser.add_argument("--twin", type=int, default=4, help="documents that the twin reads")
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--recipe", choices=RECIPES, action="append")
    asked = parser.parse_args(arguments)
    ways: list[tuple[Callable[[Model, int, int], Found], int]] = [
        (by_kernels, asked.documents), (by_twin, asked.twin),
    ]  # fmt: skip
    missed: list[str] = []
    try:
        for recipe in asked.recipe or RECIPES:
            model = Model(FOLDER / asked.family, recipe)
            found = [way(model, count, asked.texts) for way, count in ways if count]
            missed += table(recipe, found)
    except DegarbleError as error:
        print(f"REFUSED: {error}", file=sys.stderr)  # noqa: T201  a script
        return error.exit_status
    _say(f"\nout of noise: {', '.join(missed) or 'nothing'}")
    return int(bool(missed))


def _say(text: Any) -> None:
    print(text, flush=True)  # noqa: T201  a script


if __name__ == "__main__":
    sys.exit(main())
