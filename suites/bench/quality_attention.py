"""What attention loses: by caches and weights, by kernels and by the twin; and by NVFP4 products.

`attention-quality`: inputs are those of the trained V4 model on held-out documents: the rows that
its caches hold, and, layer by layer, the input of attention in its BF16 run. Each row has the
cosine with BF16 of the twin, which is the most that the formats allow, and of our kernels on the
same inputs. A column between them shows how far the twin itself moves with float32 sums, because
codes on a rounding edge fall to either side.

`nvfp4-products`: queries and keys both NVFP4. Inputs are those of each attention of the trained
small V4 on a held-out document, and random ones of V4-Pro's shape (8 tokens, 128 heads, 1152 keys):
Gaussian, queries near a key each or near none (flat); with 8 of 512 channels 20 times as large in
keys and queries; and that rotated by a Hadamard matrix, which changes no logit. Queries are normed
as V4 norms heads. Columns are cosines of logits, of shares, of outputs with exact values, of
outputs with the values of the cache, and of our kernel's outputs.
Shape letters: T tokens, H heads, L width, R rows of keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.backends.cutedsl.backend import CONVENTIONS, use_kernels
from degarble.harness.backends.cutedsl.kernels import KernelsOnGpu
from degarble.harness.cli.values import settings_here
from degarble.kernels.attention import problem as facts
from degarble.kernels.attention.problem import AttentionProblem, KeyList
from degarble.kernels.primitives.kv_problem import ENTRIES, Pages, WriteProblem
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.modules import module_of
from degarble.references import attention, elementary
from degarble.references import numerics as rounding
from degarble.references.binding import BoundModel
from degarble.references.model import ModelV4, Sequence, TokenBatch
from degarble.references.numerics import HeadNorm, KeyValueCache, Numerics
from degarble.references.tiny import figures
from degarble.references.tiny.language import document
from degarble.suites.bench import gpu
from degarble.suites.bench.quality_linears import cosine
from degarble.suites.bench.runner import Bench, Part, Table, Target
from degarble.suites.bench.small_models import FOLDER, Model
from degarble.suites.kernels import cache_checks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from degarble.harness.backends.cutedsl.kernels import Kernels
    from degarble.harness.model.types import Block

BELOW = 1e-5
THEIRS = {  # the third field report: figures against BF16, inputs unknown
    "rows, fp8 cache": "0.9997", "rows, nvfp4 cache": "0.9943", "rows, exact cache": "exact",
    "BF16 weights, fp8 cache": "0.9997", "NVFP4 weights, exact cache": "0.981 to 0.995",
}  # fmt: skip
TYPES = {0: "window only", 4: "ratio 4 with indexer", 128: "ratio 128"}
CACHES = ("exact", "fp8", "nvfp4")
RECIPES = {"BF16 weights": "bf16", "NVFP4 weights": "nvfp4-full"}


@dataclass(frozen=True)
class QualityRow:
    """One comparison: cosines against BF16 of the twin, of it in float32, and of the kernels."""

    what: str
    layer: str
    twin: float
    single: float
    kernels: float | None = None

    def line(self) -> tuple[str, ...]:
        ours = "not run" if self.kernels is None else f"{self.kernels:.7f}"
        theirs = THEIRS.get(self.what, "")
        return self.what, self.layer, theirs, f"{self.twin:.7f}", f"{self.single:.7f}", ours

    def targets(self) -> Iterator[Target]:
        """Kernels may lose no more than the formats do."""
        if self.kernels is not None:
            claim = f"{self.what}, {self.layer}: kernels less the twin"
            yield Target(claim, self.kernels - self.twin, -BELOW)


class Quality:
    """The trained model under every recipe, and what its BF16 run fed into each attention."""

    def __init__(self, documents: int, kernels: Kernels | None) -> None:
        self._kernels = kernels
        self._models = {name: Model(FOLDER / "v4", recipe) for name, recipe in RECIPES.items()}
        seeds = range(figures.HELD_OUT, figures.HELD_OUT + documents)
        self.ids = [torch.tensor(document(seed).ids) for seed in seeds]
        self.fed: dict[str, Tensor] = {}
        self.rows: list[Tensor] = []
        plain = self.bound("BF16 weights", "exact")
        plain.observer = self._keep
        with torch.inference_mode():
            sequences = [Sequence() for _ in self.ids]
            ModelV4(plain, plain.config).forward(sequences, self.ids)
        self.blocks: tuple[Block, ...] = plain.config.layers

    def _keep(
        self, component: str, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
    ) -> None:
        if component.endswith("attn.norm"):
            self.fed[component.removesuffix("norm")] = outputs["out"]
        elif component.endswith(("attn.kv_write", "compressor.write")):
            self.rows.append(inputs["x"])

    def bound(self, weights: str, cache: str, sums: torch.dtype = torch.float64) -> BoundModel:
        """A fresh binding of the model with a cache; sums between two roundings in a dtype."""
        model = self._models[weights]
        made = Numerics.bf16() if model.recipe.name == "bf16" else Numerics.twin()
        exact = replace(made, work=sums, products=sums)
        numerics = exact.with_switches(**CONVENTIONS, kv_cache=KeyValueCache(cache))
        recipe = None if model.recipe.name == "bf16" else model.recipe
        return BoundModel(model.config, numerics, model.weights, recipe)

    def all(self, weights: str, cache: str) -> list[BoundModel]:
        """The twin, the twin with float32 sums, and the kernels where there are some."""
        models = [self.bound(weights, cache), self.bound(weights, cache, torch.float32)]
        if self._kernels is not None:
            models.append(self.bound(weights, cache))
            use_kernels(models[-1], self._models[weights].recipe, self._kernels)
        return models

    def of_rows(self, cache: str, *, drawn: bool) -> QualityRow:
        """Rows through a cache: those of all layers, or Gaussian ones."""
        plain = torch.cat(self.rows)
        if drawn:
            generator = torch.Generator().manual_seed(figures.HELD_OUT)
            plain = torch.randn(plain.shape, generator=generator).to(plain.dtype)
        found = [
            cosine(bound("layers.0.attn.kv_write", x=plain)["out"], plain)
            for bound in self.all("BF16 weights", cache)
        ]
        kind = f"{len(plain):,} rows, {'Gaussian' if drawn else 'of the model'}"
        return QualityRow(f"rows, {cache} cache", kind, *found)

    def of_layer(self, weights: str, cache: str, block: Block) -> QualityRow:
        """One attention, from its normed input to o_b's output, against BF16's on that input."""
        definition = self._attended(self.bound("BF16 weights", "exact"), block)
        found = [
            cosine(self._attended(bound, block), definition) for bound in self.all(weights, cache)
        ]
        name = f"{block.prefix.removeprefix('layers.')}: {TYPES[block.ratio]}"
        return QualityRow(f"{weights}, {cache} cache", name, *found)

    def _attended(self, bound: BoundModel, block: Block) -> Tensor:
        model = ModelV4(bound, bound.config)
        step = TokenBatch.from_sequences([0] * len(self.ids), self.ids)
        states = [Sequence().block(block.prefix, bound.numerics.work, None) for _ in self.ids]
        x = self.fed[f"{block.prefix}.attn."]
        return model._attention(block, x, step, states)


def rows_of(quality: Quality) -> list[QualityRow]:
    """All comparisons."""
    rows = [quality.of_rows(cache, drawn=drawn) for drawn in (False, True) for cache in CACHES]
    for weights in RECIPES:
        for cache in CACHES:
            rows += [quality.of_layer(weights, cache, block) for block in quality.blocks]
    return rows


# ---- NVFP4 products ------------------------------------------------------------------------------

WIDTH, HEADS, KEYS, TOKENS = 512, 128, 1152, 8  # DeepSeek-V4-Pro, a step of eight queries
CHANNELS, LARGER = 8, 20.0  # of 512, and by how much
TOWARDS = 0.35  # a query's share of one of its keys, so that attention has a peak
KINDS = {
    "fp8 keys": ("fp8", "bf16"),
    "nvfp4 keys, 64 values BF16": ("nvfp4", "bf16"),
    "nvfp4 keys": ("nvfp4-v41", "bf16"),
    "nvfp4 keys and queries": ("nvfp4-v41", facts.EXPERIMENT),
}


@dataclass(frozen=True)
class Inputs:
    """One attention: queries [T, H, L], keys [R, L], which a token sees [T, R], sinks [H]."""

    name: str
    q: Tensor
    keys: Tensor
    seen: Tensor
    sink: Tensor


@dataclass(frozen=True)
class ProductRow:
    """Cosines against BF16 of one kind of rounding."""

    inputs: str
    kind: str
    cosines: tuple[float, ...]

    def line(self) -> tuple[str, ...]:
        return self.inputs, self.kind, *(f"{each:.5f}" for each in self.cosines)


def through(rows: Tensor, entry: str) -> Tensor:
    """Rows as a cache gives them back."""
    of = ENTRIES[entry]
    made = cache_checks.decoded(*cache_checks.coded(rows.flatten(0, -2), of), of)
    return made.reshape(rows.shape)


def logits_of(inputs: Inputs, q: Tensor, keys: Tensor) -> Tensor:
    """Logits in float64 of what is seen, -inf elsewhere."""
    made: Tensor = torch.einsum("thl,rl->thr", q.double(), keys.double()) * WIDTH**-0.5
    return made.masked_fill(~inputs.seen[:, None], -torch.inf)


def shares_of(inputs: Inputs, logits: Tensor) -> Tensor:
    """Shares of keys in float64; the sink takes part in the sum alone."""
    sink = inputs.sink.double()[None, :, None].expand(*logits.shape[:2], 1)
    return torch.softmax(torch.cat((logits, sink), -1), -1)[..., :-1]


def output_of(shares: Tensor, values: Tensor) -> Tensor:
    """The weighed values in float64."""
    return torch.einsum("thr,rl->thl", shares, values.double())


def compared(inputs: Inputs, *, kernels: bool) -> list[ProductRow]:
    """A row a kind of rounding."""
    plain = logits_of(inputs, inputs.q, inputs.keys)
    exact, seen = shares_of(inputs, plain), plain.isfinite()
    wanted = output_of(exact, inputs.keys)
    made = []
    for kind, (entry, products) in KINDS.items():
        keys, q = through(inputs.keys, entry), inputs.q
        if products == facts.EXPERIMENT:
            q = rounding.through_nvfp4_row(q).bfloat16()
        logits = logits_of(inputs, q, keys)
        shares = shares_of(inputs, logits)
        found = [cosine(logits[seen], plain[seen]), cosine(shares, exact)]
        found += [cosine(output_of(shares, values), wanted) for values in (inputs.keys, keys)]
        if kernels:
            found.append(cosine(by_kernel(inputs, entry, products).cpu(), wanted))
        made.append(ProductRow(inputs.name, kind, tuple(found)))
    return made


def by_kernel(inputs: Inputs, entry: str, products: str) -> Tensor:
    """Outputs of our kernel from a cache of these entries."""
    writing, attending = (
        import_module(module_of(name)) for name in ("simt_kv_write", "sm90_sparse_attention")
    )
    count, width = inputs.keys.shape[0], inputs.seen.shape[1]
    pages = Pages(entry, 64, -(-count // 64))
    written, settings = WriteProblem(count, pages, source="row"), CompileSettings()
    cache = writing.empty_cache(written, torch.device(gpu.DEVICE))
    slots = torch.arange(count, device=gpu.DEVICE)
    rows = inputs.keys.to(gpu.DEVICE)
    writing.KERNEL.run(written, settings, values=rows, slots=slots, cache=cache)
    told = torch.where(inputs.seen.to(gpu.DEVICE), slots.int(), -1).contiguous()
    tokens, heads = inputs.q.shape[:2]
    problem = AttentionProblem(tokens, heads, KeyList(width, pages), products=products)
    given = {"q": inputs.q.to(gpu.DEVICE), "sink": inputs.sink.float().to(gpu.DEVICE)}
    made = attending.KERNEL.run(problem, settings, **given, window_slots=told, window_cache=cache)
    out: Tensor = made["out"]
    return out


def drawn(name: str) -> Inputs:
    """Inputs of V4-Pro's shape; `name` says of which kind."""
    generator = torch.Generator().manual_seed(figures.HELD_OUT)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    gains = torch.ones(WIDTH)
    if "outliers" in name:
        gains[torch.randperm(WIDTH, generator=generator)[:CHANNELS]] = LARGER
    keys = _normed(normal(KEYS, WIDTH) * gains)
    towards = keys[torch.randint(KEYS, (TOKENS, HEADS), generator=generator)]
    share = 0.0 if "flat" in name else TOWARDS
    q = _normed(_normed(normal(TOKENS, HEADS, WIDTH) * gains) * (1 - share) + towards * share)
    sink = normal(HEADS)
    if "rotated" in name:
        q, keys = elementary.hadamard(q), elementary.hadamard(keys)
    seen = torch.ones(TOKENS, KEYS, dtype=torch.bool)
    return Inputs(name, q.bfloat16(), keys.bfloat16(), seen, sink)


def _normed(x: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt()


def captured(tokens: int) -> list[Inputs]:
    """What the trained model feeds into each attention, its own BF16 run."""
    model = Model(FOLDER / "v4", "bf16")
    numerics = Numerics.bf16(head_norm=HeadNorm.ONCE)
    found: list[Inputs] = []
    ids = torch.tensor(document(figures.HELD_OUT).ids[:tokens])

    def keep(component: str, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        del outputs
        if component.endswith("attn.attend"):
            found.append(_captured(bound, component, inputs))

    bound = BoundModel(model.config, numerics, model.weights, None)
    bound.observer = keep
    with torch.inference_mode():
        ModelV4(bound, bound.config).forward([Sequence()], [ids])
    return found


def _captured(bound: BoundModel, name: str, inputs: Mapping[str, Tensor]) -> Inputs:
    component, _ = bound.bound_to(name)
    assert component.block is not None, "attention belongs to a layer"
    positions, ratio = inputs["positions"], getattr(component.block, "ratio", 0)
    window = inputs["window"]
    near: int = bound.config.sliding_window
    seen = attention.window_rows(positions, 0, len(window), near)
    keys = window
    if ratio:
        entries = inputs["compressed"]
        far = torch.arange(len(entries)) < (positions[:, None] + 1) // ratio
        if "chosen" in inputs:
            index, listed = attention.listed_rows(inputs["chosen"], len(entries))
            entries = entries[index]
            far = far[:, : len(entries)] if listed is None else listed
        keys, seen = torch.cat((window, entries)), torch.cat((seen, far), 1)
    (sink,) = (weight.values(torch.float64) for weight in bound.weights_of(name).values())
    label = f"trained small V4, {name.removesuffix('.attn.attend')}"
    return Inputs(label, inputs["q"].bfloat16(), keys.bfloat16(), seen, sink)


def rotated(inputs: Inputs) -> Inputs:
    """Queries and keys turned by a Hadamard matrix, each rounded to BF16 again."""
    q, keys = (elementary.hadamard(x.float()).bfloat16() for x in (inputs.q, inputs.keys))
    return replace(inputs, name=f"{inputs.name}, rotated", q=q, keys=keys)


DRAWN = (
    "V4-Pro, Gaussian",
    "V4-Pro, Gaussian, flat",
    "V4-Pro, outliers",
    "V4-Pro, outliers, rotated",
)


def attention_quality(options: Any) -> Iterator[Part]:
    kernels = None if options.cpu else KernelsOnGpu(settings_here())
    with torch.inference_mode():
        rows = rows_of(Quality(options.documents, kernels))
    header = (
        "what", "layer", "their report", "the twin", "with float32 sums", "our kernels"
    )  # fmt: skip
    yield Table("Attention against BF16", header, tuple(row.line() for row in rows))
    for row in rows:
        yield from row.targets()


def nvfp4_products(options: Any) -> Iterator[Part]:
    header = ("inputs", "rounded", "logits", "shares", "outputs, exact values", "outputs")
    every = [drawn(name) for name in DRAWN]
    for inputs in captured(options.tokens):
        every += [inputs, rotated(inputs)]
    rows = [row.line() for each in every for row in compared(each, kernels=options.kernels)]
    header += ("our kernel",) * options.kernels
    yield Table("Cosines with BF16", header, tuple(rows))


BENCHES = {
    "attention-quality": Bench(
        "cosines of attention with BF16: the twin and our kernels; --cpu: the twin alone",
        attention_quality, needs=lambda options: "" if options.cpu else "gpu",
        options={"documents": 4, "cpu": False},
    ),
    "nvfp4-products": Bench(
        "what attention loses where queries and keys are both NVFP4", nvfp4_products,
        needs=lambda options: "gpu" if options.kernels else "",
        options={"tokens": 384, "kernels": False},
    ),
}  # fmt: skip
