"""How near attention comes to BF16, by kernels and by the twin: the original stack's table anew.

    python -m degarble.suites.bench.bench_attention_quality [--documents N] [--cpu]

Inputs are those of the trained V4 model on held-out documents: the rows that its caches hold, and,
layer by layer, the input of attention in its BF16 run. Each row has the cosine against BF16 of the
twin, which is the most that the formats allow, and of our kernels on the same inputs. Kernels may
be at most 1e-5 below the twin. A column between them shows how far the twin itself moves with
float32 sums, because codes on a rounding edge fall to either side. `--cpu` leaves kernels out.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.backends.cutedsl.backend import CONVENTIONS, use_kernels
from degarble.harness.backends.cutedsl.kernels import KernelsOnGpu
from degarble.harness.base.errors import DegarbleError
from degarble.harness.cli.values import settings_here
from degarble.references.binding import BoundModel
from degarble.references.model import ModelV4, Sequence, TokenBatch
from degarble.references.numerics import KeyValueCache, Numerics
from degarble.references.tiny import figures
from degarble.references.tiny.language import document
from degarble.suites.bench.bench_tiny import FOLDER, Model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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
class Row:
    """One comparison: cosines against BF16 of the twin, of it in float32, and of the kernels."""

    what: str
    layer: str
    twin: float
    single: float
    kernels: float | None = None

    @property
    def missed(self) -> bool:
        """Whether kernels lose more than the formats do."""
        return self.kernels is not None and not self.kernels >= self.twin - BELOW

    def line(self) -> str:
        """One line of the table."""
        ours = "not run" if self.kernels is None else f"{self.kernels:.7f}"
        theirs = THEIRS.get(self.what, "")
        twins = f"{self.twin:.7f} | {self.single:.7f}"
        return f"| {self.what} | {self.layer} | {theirs} | {twins} | {ours} |"


def cosine(a: Tensor, b: Tensor) -> float:
    """Of all numbers at once, in float64; 1 for equal ones."""
    one, two = a.double().flatten().cpu(), b.double().flatten().cpu()
    return 1.0 if torch.equal(one, two) else float(one @ two / (one.norm() * two.norm()))


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
            ModelV4(plain, plain.config).forward(sequences, self.ids)  # type: ignore[arg-type]
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
        made = [self.bound(weights, cache), self.bound(weights, cache, torch.float32)]
        if self._kernels is not None:
            made.append(self.bound(weights, cache))
            use_kernels(made[-1], self._models[weights].recipe, self._kernels)
        return made

    def of_rows(self, cache: str, *, drawn: bool) -> Row:
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
        return Row(f"rows, {cache} cache", kind, *found)

    def of_layer(self, weights: str, cache: str, block: Block) -> Row:
        """One attention, from its normed input to o_b's output, against BF16's on that input."""
        definition = self._attended(self.bound("BF16 weights", "exact"), block)
        found = [
            cosine(self._attended(bound, block), definition) for bound in self.all(weights, cache)
        ]
        name = f"{block.prefix.removeprefix('layers.')}: {TYPES[block.ratio]}"
        return Row(f"{weights}, {cache} cache", name, *found)

    def _attended(self, bound: BoundModel, block: Block) -> Tensor:
        model = ModelV4(bound, bound.config)  # type: ignore[arg-type]
        step = TokenBatch.of([0] * len(self.ids), self.ids)
        states = [Sequence().block(block.prefix, bound.numerics.work, None) for _ in self.ids]
        x = self.fed[f"{block.prefix}.attn."]
        return model._attention(block, x, step, states)


def rows_of(quality: Quality) -> list[Row]:
    """All comparisons."""
    made = [quality.of_rows(cache, drawn=drawn) for drawn in (False, True) for cache in CACHES]
    for weights in RECIPES:
        for cache in CACHES:
            made += [quality.of_layer(weights, cache, block) for block in quality.blocks]
    return made


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; status 1 where kernels lose too much, 2 where they cannot run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--documents", type=int, default=4, help="of 1,280 tokens each")
    parser.add_argument("--cpu", action="store_true", help="the twin alone")
    asked = parser.parse_args(arguments)
    try:
        kernels = None if asked.cpu else KernelsOnGpu(settings_here())
    except DegarbleError as error:
        print(f"REFUSED: {error}", file=sys.stderr)  # noqa: T201  a script
        return error.exit_status
    with torch.inference_mode():
        rows = rows_of(Quality(asked.documents, kernels))
    told: Callable[[Any], None] = _say
    told("| what | layer | their report | the twin | with float32 sums | our kernels |")
    told("|---|---|---|---|---|---|")
    for row in rows:
        told(row.line())
    missed = [f"{row.what}, {row.layer}" for row in rows if row.missed]
    told(f"\nbelow the twin by more than {BELOW:g}: {'; '.join(missed) or 'nothing'}")
    return int(bool(missed))


def _say(text: Any) -> None:
    print(text, flush=True)  # noqa: T201  a script


if __name__ == "__main__":
    sys.exit(main())
