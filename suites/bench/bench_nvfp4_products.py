"""What attention loses where queries and keys are both NVFP4: a table of cosines against BF16.

    python -m degarble.suites.bench.bench_nvfp4_products [--tokens T] [--kernels]

Inputs are those of each attention of the trained small V4 on a held-out document, and random ones
of V4-Pro's shape (8 tokens, 128 heads, 1152 keys): Gaussian, queries near a key each or near none
(flat); with 8 of 512 channels 20 times as large in keys and queries; and that rotated by a Hadamard
matrix, which changes no logit. Queries are normed as V4 norms heads. Columns are cosines of logits,
of shares, of outputs with exact values, of outputs with the values of the cache; with `--kernels`,
on a GPU, also of our kernel's outputs.
Shape letters: T tokens, H heads, L width, R rows of keys.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import DegarbleError
from degarble.kernels.attention import problem as facts
from degarble.kernels.attention.problem import AttentionProblem, KeyList
from degarble.kernels.primitives.kv_problem import ENTRIES, Pages, WriteProblem
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.modules import module_of
from degarble.kernels.runtime.targets import target_of_device
from degarble.references import attention, elementary
from degarble.references import numerics as rounding
from degarble.references.binding import BoundModel
from degarble.references.model import ModelV4, Sequence
from degarble.references.numerics import HeadNorm, Numerics
from degarble.references.tiny import figures
from degarble.references.tiny.language import document
from degarble.suites.bench.bench_tiny import FOLDER, Model
from degarble.suites.kernels import cache_checks

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Several

    from torch import Tensor

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
class Row:
    """Cosines against BF16 of one kind of rounding."""

    inputs: str
    kind: str
    cosines: tuple[float, ...]

    def line(self) -> str:
        """One line of the table."""
        return f"| {self.inputs} | {self.kind} | {' | '.join(f'{c:.5f}' for c in self.cosines)} |"


def cosine(a: Tensor, b: Tensor) -> float:
    """Of all numbers at once, in float64."""
    one, two = a.double().flatten(), b.double().flatten()
    return float(one @ two / (one.norm() * two.norm()))


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


def compared(inputs: Inputs, *, kernels: bool) -> list[Row]:
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
        made.append(Row(inputs.name, kind, tuple(found)))
    return made


def by_kernel(inputs: Inputs, entry: str, products: str) -> Tensor:
    """Outputs of our kernel from a cache of these entries."""
    writing, attending = (
        import_module(module_of(name)) for name in ("simt_kv_write", "sm90_sparse_attention")
    )
    count, width = inputs.keys.shape[0], inputs.seen.shape[1]
    pages = Pages(entry, 64, -(-count // 64))
    written, settings = WriteProblem(count, pages, source="row"), CompileSettings()
    cache = writing.empty_cache(written, torch.device("cuda"))
    slots = torch.arange(count, device="cuda")
    rows = inputs.keys.cuda()
    writing.KERNEL.run(written, settings, values=rows, slots=slots, cache=cache)
    told = torch.where(inputs.seen.cuda(), slots.int(), -1).contiguous()
    tokens, heads = inputs.q.shape[:2]
    problem = AttentionProblem(tokens, heads, KeyList(width, pages), products=products)
    made = attending.KERNEL.run(
        problem, settings, q=inputs.q.cuda(), sink=inputs.sink.float().cuda(), window_slots=told,
        window_cache=cache,
    )  # fmt: skip
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
        ModelV4(bound, bound.config).forward([Sequence()], [ids])  # type: ignore[arg-type]
    return found


def _captured(bound: BoundModel, name: str, inputs: Mapping[str, Tensor]) -> Inputs:
    component, _ = bound.bound_to(name)
    assert component.block is not None, "attention belongs to a layer"
    positions, ratio = inputs["positions"], getattr(component.block, "ratio", 0)
    window = inputs["window"]
    near: int = bound.config.sliding_window  # type: ignore[union-attr]
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


def main(arguments: Several[str] | None = None) -> int:
    """Print the table; status 2 where kernels are asked for and cannot run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=384, help="of the document")
    parser.add_argument("--kernels", action="store_true", help="our kernel's outputs as well")
    asked = parser.parse_args(arguments)
    try:
        if asked.kernels:
            target_of_device()
    except DegarbleError as error:
        print(f"REFUSED: {error}", file=sys.stderr)  # noqa: T201  a script
        return error.exit_status
    columns = ["inputs", "rounded", "logits", "shares", "outputs, exact values", "outputs"]
    columns += ["our kernel"] * asked.kernels
    _say(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    every = [drawn(name) for name in DRAWN]
    for inputs in captured(asked.tokens):
        every += [inputs, rotated(inputs)]
    for inputs in every:
        for row in compared(inputs, kernels=asked.kernels):
            _say(row.line())
    return 0


def _say(text: Any) -> None:
    print(text, flush=True)  # noqa: T201  a script


if __name__ == "__main__":
    sys.exit(main())
