"""What the small models know: by recipe, with parts taken away, with faults, and by our kernels.

The runs of `tiny` produce the README's headline table: held-out documents and sampled text, for the
model as stored (BF16), as `nvfp4-experts` and as `nvfp4-full` in the twin's arithmetic. Input
scales come from one separate document. Each ablation and fault is a change of the bound model.
These are counts of right answers, not times, so other load on the machine does not matter. Shares
of right answers have Wilson's interval at 95 %.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.backends.cutedsl.backend import CONVENTIONS
from degarble.harness.backends.cutedsl.kernels import KernelsOnGpu
from degarble.harness.backends.graph.decoder import Decoder, DecoderLogitsModel
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.cli.values import settings_here
from degarble.harness.inference.generation import Continuation, Generation, Limits, Sampling
from degarble.harness.inference.model import LogitsModel
from degarble.harness.model.recipes import BF16, Recipe, Rule, recipe_named
from degarble.references.binding import BoundModel
from degarble.references.model import Sequence
from degarble.references.numerics import Numerics
from degarble.references.tiny import figures, language
from degarble.references.tiny.language import document, sentence
from degarble.references.weights import InputAmax, quantised_weights
from degarble.suites.bench.runner import Bench, Part, Table, Target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.formats.weight import Weight
    from degarble.harness.model.config.config import Config

FOLDER = Path(__file__).resolve().parents[2] / "references" / "tiny" / "v1"
RECIPES = ("bf16", "nvfp4-experts", "nvfp4-full")
DOCUMENTS = 4
DOCUMENTS_CUT = 16  # for recall that ought to be chance: few right answers, so many questions
TEXTS, TEXT_TOKENS = 16, 128
_ABREAST = 4
_TEMPERATURE = 0.7
_WANTED = {"sentences": 0.99, "far recall": 0.95}


class Model:
    """One checkpoint under one recipe; every call makes a fresh binding, so patches do not stay."""

    def __init__(self, folder: Path, recipe: str) -> None:
        with Checkpoint.open(folder) as checkpoint:
            assert checkpoint.model is not None, "a small model has a config"
            self.config: Config = checkpoint.model
            plain = {name: checkpoint.weights[name] for name in checkpoint.weights}
            for weight in plain.values():
                weight.values(torch.float64)  # read while the file is open
        self.recipe = _nvfp4_alone(recipe_named(recipe, self.config))
        self.weights: Mapping[str, Weight] = plain
        self.numerics = Numerics.bf16()
        if recipe != "bf16":
            amax = InputAmax(self.config)
            _logits(BoundModel(self.config, _held(Numerics.bf16()), plain, None, amax))(
                _calibration()
            )
            self.weights = quantised_weights(
                plain, self.config, self.recipe, input_amax=amax.largest
            )
            self.numerics = Numerics.twin()

    def bound(self, weights: Mapping[str, Weight] | None = None) -> BoundModel:
        """A fresh binding, of these weights or of others."""
        recipe = self.recipe if self.recipe.name != "bf16" else None
        return BoundModel(self.config, _held(self.numerics), weights or self.weights, recipe)


def _nvfp4_alone(recipe: Recipe) -> Recipe:
    """The recipe without FP8: its blocks of 128 do not divide these models' widths."""
    plain = (
        rule if rule.weight in ("NVFP4", BF16) else Rule(rule.match, BF16) for rule in recipe.rules
    )
    return Recipe(recipe.name, tuple(plain))


def _held(numerics: Numerics) -> Numerics:
    """Products in float64: the twin is exact arithmetic on quantised operands."""
    return replace(numerics, work=torch.float64, products=torch.float64)


def _calibration() -> list[int]:
    return document(figures.HELD_OUT - 1).ids


def _logits(bound: BoundModel) -> Callable[[list[int]], Tensor]:
    model = LogitsModel(bound)

    def made(ids: list[int]) -> Tensor:
        return model.logits(model.hidden([Sequence()], [torch.tensor(ids)]))

    return made


def scored(bound: BoundModel, documents: int = DOCUMENTS) -> figures.ProbeScore:
    """Judge by held-out documents."""
    seeds = range(figures.HELD_OUT, figures.HELD_OUT + documents)
    return figures.score((document(seed) for seed in seeds), _logits(bound))


def spoken(bound: BoundModel, texts: int = TEXTS, tokens: int = TEXT_TOKENS) -> tuple[int, int]:
    """Let the model go on from one sentence at low temperature: grammatical ones, and all."""
    rng = random.Random(figures.HELD_OUT)
    begun = [sentence(rng) for _ in range(texts)]
    continuations = [Continuation([language.BOS, *language.encode(each)]) for each in begun]
    for seed in range(0, texts, _ABREAST):  # one seed gives all that run together the same draws
        sampling = Sampling(_TEMPERATURE, 1.0, seed)
        together = continuations[seed : seed + _ABREAST]
        Generation(LogitsModel(bound), None, sampling, Limits(tokens)).run(together)
    return figures.grammatical(language.decode(speech.ids) for speech in continuations)


def swapped_nibbles(weights: Mapping[str, Weight], name: str) -> dict[str, Weight]:
    """High and low half of every byte of one weight's codes exchanged."""
    weight = weights[name]
    assert weight.codes is not None, "only quantised weights have codes"
    codes = weight.codes.view(torch.uint8)
    swapped = ((codes << 4) | (codes >> 4)).view(weight.codes.dtype)
    return {**weights, name: replace(weight, codes=swapped, _decoded={})}


def never_loaded(weights: Mapping[str, Weight], name: str) -> dict[str, Weight]:
    """A parameter that stayed at zero."""
    weight = weights[name]
    if weight.codes is None:
        assert weight.value is not None, "a weight has codes or a value"
        return {**weights, name: replace(weight, value=torch.zeros_like(weight.value), _decoded={})}
    return {**weights, name: replace(weight, codes=torch.zeros_like(weight.codes), _decoded={})}


def not_turned_back(bound: BoundModel) -> BoundModel:
    """No inverse rotation of the attention's output, in any layer."""
    for name in list(bound.calls):
        if name.endswith("attn.inverse_rope"):
            bound.calls[name] = lambda inputs, _: {"out": inputs["x"]}
    return bound


def _experts(weights: Mapping[str, Weight], layer: int, part: str) -> list[str]:
    stem = f"layers.{layer}.ffn.experts."
    return [name for name in weights if name.startswith(stem) and name.endswith(part)]


def _faulty(model: Model) -> dict[str, BoundModel]:
    """The three faults of the headline table, each in an otherwise healthy `nvfp4-experts`."""
    swapped, unloaded = dict(model.weights), dict(model.weights)
    last = len(model.config.layers) - 1
    for name in _experts(model.weights, last, "w2"):
        swapped = swapped_nibbles(swapped, name)
    for name in _experts(model.weights, last, "w1"):
        unloaded = never_loaded(unloaded, name)
    found = {
        f"layer {last}, experts' w2: nibbles swapped": model.bound(swapped),
        f"layer {last}, experts' w1: never loaded": model.bound(unloaded),
    }
    if model.config.family == "deepseek_v4":
        found["attention: inverse rotation missing"] = not_turned_back(model.bound())
    else:
        wo = never_loaded(model.weights, f"layers.{last}.attn.wo")
        found[f"layer {last}, attn.wo: never loaded"] = model.bound(wo)
    return found


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _row(
    label: str, bound: BoundModel, *, speaks: bool
) -> tuple[tuple[str, ...], dict[str, float]]:
    return _row_of(label, bound, scored(bound), speaks=speaks)


def _row_of(
    label: str, bound: BoundModel, told: figures.ProbeScore, *, speaks: bool
) -> tuple[tuple[str, ...], dict[str, float]]:
    share = {
        "near recall": told.share(figures.NEAR),
        "far recall": told.share(*figures.FAR),
        "sums": told.share("sum"),
        "copies": told.share("copy"),
    }
    text = "not spoken"
    if speaks:
        good, all_ = spoken(bound)
        share["sentences"] = good / max(1, all_)
        text = f"{_percent(share['sentences'])} of {all_}"
    columns = ("far recall", "near recall", "sums", "copies")
    row = (label, f"{told.perplexity:.3f}", *(_percent(share[column]) for column in columns), text)
    return row, share


def _cut_row(recipe: str, told: figures.ProbeScore) -> tuple[str, ...]:
    """Far recall through the window alone, beside what guessing gives."""
    low, high = told.interval(*figures.FAR)
    shown = map(_percent, (told.share(*figures.FAR), low, high, told.chance(*figures.FAR)))
    return (recipe, str(sum(told.asked[each] for each in figures.FAR)), *shown)


def _of(name: str) -> tuple[tuple[Table, Table], list[Target]]:
    rows, targets, cuts = [], [], []
    for recipe in RECIPES:
        model = Model(FOLDER / name, recipe)
        row, share = _row(recipe, model.bound(), speaks=True)
        rows.append(row)
        if recipe == "bf16":
            targets += [
                Target(f"{name}, {what}", share[what], wanted) for what, wanted in _WANTED.items()
            ]
        cut = model.bound()
        figures.window_only(cut)
        score = scored(cut, DOCUMENTS_CUT)
        row, share = _row_of(f"{recipe}, window only", cut, score, speaks=False)
        rows.append(row)
        cuts.append(_cut_row(recipe, score))
        targets.append(
            Target(f"{name}, {recipe}: far recall, window only", share["far recall"], 0.10, False)
        )
        blind = model.bound()
        figures.random_choice(blind, 1)
        row, share = _row(f"{recipe}, random indexer", blind, speaks=False)
        rows.append(row)
        targets.append(
            Target(
                f"{name}, {recipe}: far recall, random indexer", share["far recall"], 0.60, False
            )
        )
        if recipe == "nvfp4-experts":
            rows += [_row(label, bad, speaks=True)[0] for label, bad in _faulty(model).items()]
    header = ("model", "perplexity", "far recall", "near recall", "sums", "copies", "sentences")
    asked = ("recipe", "questions", "right", "95 %, from", "to", "guessing among the answers")
    title = f"{name}: far recall through the window alone"
    both = (
        Table(f"references/tiny/v1/{name}", header, tuple(rows)),
        Table(title, asked, tuple(cuts)),
    )
    return both, targets


def tiny(_options: Any) -> Iterator[Part]:
    """Judge every small model."""
    for folder in sorted(path.parent for path in FOLDER.glob("*/config.json")):
        tables, targets = _of(folder.name)
        yield from tables
        yield from targets
    yield f"{DOCUMENTS} held-out documents of 1,280 tokens, {DOCUMENTS_CUT} for `window only`"
    yield "far recall is 129 to 1,024 tokens; an answer is one of a relation's 12 or 16 words"
    yield f"sentences of {TEXTS} texts of {TEXT_TOKENS} tokens at temperature {_TEMPERATURE}"
    yield "NVFP4 where the recipe says so, BF16 elsewhere; FP8 blocks do not divide these widths"
    yield "bf16 by the official rounding points; NVFP4 in the twin's exact arithmetic"


# ---- what a model knows through our kernels ------------------------------------------------------

FAMILIES = ("v4", "v32")
KINDS = {
    "far recall": figures.FAR, "near recall": (figures.NEAR,), "sums": ("sum",),
    "copies": ("copy",),
}  # fmt: skip
ROOM = 512


@dataclass(frozen=True)
class Found:
    """What one way of computing knows."""

    who: str
    score: figures.ProbeScore
    sentences: tuple[int, int]

    def row(self) -> tuple[str, ...]:
        good, every = self.sentences
        spoken = f"{100 * good / every:.1f} % of {every}" if every else "not spoken"
        shares = (self.share(kind) for kind in KINDS)
        return self.who, f"{self.score.perplexity:.4f}", *shares, spoken

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
            if any(self.score.asked[part] for part in parts)
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


def spoken_by(model: LogitsModel, texts: int) -> tuple[int, int]:
    """Let a model go on from sentences at low temperature: grammatical ones, and all."""
    rng = random.Random(figures.HELD_OUT)
    continuations = [
        Continuation([language.BOS, *language.encode(sentence(rng))]) for _ in range(texts)
    ]
    for seed, continuation in enumerate(continuations):  # draws of its own for each text
        continuation.sampler = Sampling(_TEMPERATURE, 1.0, seed).sampler()
    Generation(model, None, None, Limits(TEXT_TOKENS)).run(continuations)
    return figures.grammatical(language.decode(speech.ids) for speech in continuations)


def by_kernels(model: Model, documents: int, texts: int) -> Found:
    """Through the decoder's graph."""
    bound, kernels = bound_of(model), KernelsOnGpu(settings_here())
    seeds = range(figures.HELD_OUT, figures.HELD_OUT + documents)
    ids = [document(seed).ids for seed in seeds]
    with torch.inference_mode():
        decoder = Decoder.from_model(kernels, bound, model.recipe, documents, max(map(len, ids)))
        decoder.capture()
        made = dict(zip(map(tuple, ids), read_together(decoder, ids), strict=True))
        score = figures.score((document(seed) for seed in seeds), lambda each: made[tuple(each)])
        aloud = Decoder.from_model(kernels, bound, model.recipe, texts, ROOM)
        aloud.capture()
        return Found("kernels", score, spoken_by(DecoderLogitsModel(bound, aloud), texts))


def by_twin(model: Model, documents: int, texts: int) -> Found:
    """Through the references."""
    bound = bound_of(model)
    return Found("twin", scored(bound, documents), spoken_by(LogitsModel(bound), texts))


def decoder_text(options: Any) -> Iterator[Part]:
    """Held-out documents are read and continued by the decoder's graph and by the twin.

    Kernels are within noise of the twin if, for each kind of answer, each share lies in the other's
    interval. `--twin N --documents 0` needs no GPU.
    """
    ways = ((by_kernels, options.documents), (by_twin, options.twin))
    for recipe in [options.recipe] if options.recipe != "all" else RECIPES[1:]:
        model = Model(FOLDER / options.family, recipe)
        found = [way(model, count, options.texts) for way, count in ways if count]
        header = ("by", "perplexity", *KINDS, "sentences")
        yield Table(recipe, header, tuple(each.row() for each in found))
        if len(found) == 2:
            apart = found[0].apart_from(found[1])
            yield Target(f"{recipe}: kinds out of noise: {', '.join(apart) or 'none'}",
                         len(apart), 0, at_least=False)  # fmt: skip


BENCHES = {
    "tiny": Bench(
        "What the small models know", tiny, ("torch", "numpy"), page=True,
    ),
    "decoder-text": Bench(
        "what a small model knows through our kernels, beside the twin", decoder_text,
        needs=lambda options: "gpu" if options.documents else "",
        options={"family": FAMILIES, "documents": 64, "twin": 4, "texts": 32,
                 "recipe": ("all", *RECIPES[1:])},
    ),
}  # fmt: skip
