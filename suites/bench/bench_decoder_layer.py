"""A decoding step of one V4 layer on a Hopper GPU, and each kernel's share: a script of tables.

    python -m degarble.suites.bench.bench_decoder_layer [--model M] [--recipe R] [--lanes B ...]

Layers have true widths and random weights, one of each type: experts NVFP4; compressors, indexer
and router BF16; attention and shared expert NVFP4 (wo_a BF16) or FP8, as the recipe says. Four sets
have their own attention, compressors and memories; experts are shared, and each set's tokens choose
others. The whole step is one CUDA graph over the sets in turn, so that the cache holds nothing of
it. Every launch is a graph of its own in the same way. The gap between the sum of launches and the
step is printed. Numbers are compared by suites/backends/graph.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.backends.cutedsl.kernels import KernelsOnGpu, require_gpu
from degarble.harness.backends.cutedsl.linears import LinearKernel
from degarble.harness.backends.graph import weights as records
from degarble.harness.backends.graph.layers import V4Steps
from degarble.harness.backends.graph.matrices import CodedGroups, DenseGroups, Experts, Matrix
from degarble.harness.backends.graph.steps import MemorySize, memory_of
from degarble.harness.base.errors import DegarbleError
from degarble.harness.cli.values import settings_here
from degarble.harness.formats.layouts import SWIZZLE_128X4
from degarble.harness.model.config.config import V4_FLASH, V4_PRO
from degarble.kernels.gemm.problem import GemmProblem
from degarble.kernels.rows.mhc_problem import split_weight
from degarble.references.numerics import Switches
from degarble.suites.bench.bench_quantise_kernel import Figure, captured, timed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from degarble.harness.model.config.config import V4Config
    from degarble.harness.model.types import Block

MODELS = {"V4-Flash": V4_FLASH, "V4-Pro": V4_PRO}
SETS = 4
CONTEXT = 8192
TYPES = {0: "window only", 4: "ratio 4, indexer", 128: "ratio 128"}
DEVICE = "cuda"
NVFP4, FP8 = RECIPES = ("nvfp4-full", "nvfp4-experts")  # of attention and the shared expert


class Remembering(KernelsOnGpu):
    """Kernels that remember what they were handed, so that each launch can be made again."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.calls: list[tuple[str, Any, dict[str, Any]]] = []

    def _run(self, kernel: str, problem: Any, tensors: Any) -> tuple[Tensor, ...]:
        self.calls.append((kernel, problem, dict(tensors)))
        made: tuple[Tensor, ...] = super()._run(kernel, problem, tensors)
        return made

    def again(self, call: tuple[str, Any, dict[str, Any]]) -> Callable[[], object]:
        """Make a launch once more."""
        return lambda: KernelsOnGpu._run(self, *call)


# ---- random layers -------------------------------------------------------------------------------


def bf16(*shape: int) -> Tensor:
    """Weights of a linear, so that outputs are about as large as inputs."""
    drawn = torch.randn(shape, device=DEVICE).bfloat16()
    return drawn * float(shape[-1] ** -0.5)


def float32(*shape: int) -> Tensor:
    """Parameters around zero."""
    return torch.randn(shape, device=DEVICE) * 0.1


def norm(width: int) -> records.NormWeight:
    """A norm's weight."""
    return records.NormWeight(torch.ones(width, device=DEVICE, dtype=torch.bfloat16))


def codes(*shape: int) -> Tensor:
    """Any E2M1 codes."""
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)


def scales(*shape: int) -> Tensor:
    """E4M3 scales from 0.5 to 2."""
    return torch.randint(0x30, 0x40, shape, dtype=torch.uint8, device=DEVICE)


def nvfp4(outputs: int, inner: int) -> Matrix:
    """A matrix of random codes."""
    operands = {
        "b": codes(outputs, inner // 2),
        "b_scales": scales(SWIZZLE_128X4.storage_size(outputs, inner // 16)),
        "b_decode_scale": torch.full((1,), 0.3 * inner**-0.5, device=DEVICE),
    }
    problem = GemmProblem(1, outputs, inner, "nvfp4", "e4m3")
    scale = torch.full((1,), 2e-3, device=DEVICE)
    return Matrix(LinearKernel("sm90_gemm_nvfp4", problem), operands, scale)


def fp8(outputs: int, inner: int) -> Matrix:
    """A matrix of random codes with exponents as scales."""
    problem = GemmProblem(1, outputs, inner, "fp8_block", "ue8m0")
    tiles = (-(-outputs // 128), -(-inner // 128))
    exponents = torch.full(tiles, 127 - inner.bit_length() // 2, dtype=torch.uint8, device=DEVICE)
    numbers = torch.randn(outputs, inner, device=DEVICE).to(torch.float8_e4m3fn)
    return Matrix(
        LinearKernel("sm90_gemm_fp8_block", problem), {"b": numbers, "b_scales": exponents}
    )


def mixing(config: V4Config, products: int) -> records.MhcLayout:
    """mHC's parameters."""
    fn = float32(products, config.hc_mult * config.hidden_size) * 0.1
    return records.MhcLayout(
        split_weight(fn.cpu()).to(DEVICE), float32(products), float32(1 if products == 4 else 3)
    )


def experts(hidden: int, width: int, count: int) -> Experts:
    """Experts of random codes."""
    made: dict[str, Tensor] = {}
    for name, leading, n, k in (
        ("w13", (count, 2), width, hidden),
        ("w2", (count,), hidden, width),
    ):
        made[f"{name}_codes"] = codes(*leading, n, k // 2)
        made[f"{name}_scales"] = scales(*leading, SWIZZLE_128X4.storage_size(n, k // 16))
        made[f"{name}_decode_scale"] = torch.full(leading, 0.3 * k**-0.5, device=DEVICE)
        made[f"{name}_input_scale"] = torch.full((count,), 2e-3, device=DEVICE)
    return Experts(made)


def compressing(config: V4Config, ratio: int, width: int) -> records.Compressing:
    """A compressor of plain weights, as every official checkpoint has it."""
    columns = width * (2 if ratio == 4 else 1)
    joined = bf16(2 * columns, config.hidden_size)
    return records.Compressing(joined, (), float32(ratio, columns), norm(width))


def groups_of(config: V4Config, *, coded: bool) -> DenseGroups | CodedGroups:
    """wo_a, BF16 or FP8."""
    count, inner = config.o_groups, config.num_attention_heads * 512 // config.o_groups
    if not coded:
        return DenseGroups(bf16(count * config.o_lora_rank, inner), count, dense=False)
    way, whole = fp8(config.o_lora_rank, inner).way, fp8(count * config.o_lora_rank, inner)
    part = (whole.operands["b"], whole.operands["b_scales"])
    return CodedGroups(way, (part,), count, whole=True)


def attention(config: V4Config, block: Block, recipe: str) -> records.AttentionWeights:
    """Attention of a layer's type."""
    coded = recipe == FP8
    linear = fp8 if coded else nvfp4
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.q_lora_rank
    out = config.o_groups * config.o_lora_rank
    indexer = None
    if block.ratio == 4:
        wq_b = Matrix(
            LinearKernel("sm90_gemm_bf16", GemmProblem(1, config.index_n_heads * 128, rank)),
            {"b": bf16(config.index_n_heads * 128, rank)},
        )
        of_heads = bf16(config.index_n_heads, hidden)
        indexer = records.Indexing(wq_b, of_heads, compressing(config, block.ratio, 128))
    return records.AttentionWeights(
        mixing(config, 24), norm(hidden), linear(rank, hidden), norm(rank),
        linear(heads * 512, rank), linear(512, hidden), norm(512), float32(heads),
        groups_of(config, coded=coded), linear(hidden, out),
        compressing(config, block.ratio, 512) if block.ratio else None, indexer,
    )  # fmt: skip


def layer(
    config: V4Config, block: Block, shared_by_all: Experts, recipe: str
) -> records.LayerWeights:
    """A layer of random weights; routed experts are those of all sets."""
    hidden, count = config.hidden_size, config.n_routed_experts
    width = config.moe_intermediate_size
    shared: Any = experts(hidden, width, 1)
    if recipe == FP8:
        shared = fp8(2 * width, hidden), fp8(hidden, width)
    routed = records.RoutedWeights(bf16(count, hidden), float32(count), shared_by_all)
    ffn = records.FfnWeights(mixing(config, 24), norm(hidden), routed, shared)
    return records.LayerWeights(block, config.rope(block), attention(config, block, recipe), ffn)


# ---- a step --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One set: a layer, and the launches that its step makes."""

    run: Callable[[], object]
    calls: list[tuple[str, Any, dict[str, Any]]]


def steps_of(
    kernels: Remembering, config: V4Config, ratio: int, lanes: int, given: tuple[Experts, str]
) -> list[Step]:
    """Sets of a layer type, at the end of a context that is full; given are experts and recipe."""
    block = [each for each in config.layers if each.ratio == ratio][-1]
    room = MemorySize(lanes, CONTEXT, config.sliding_window, "fp8")
    found = []
    for _ in range(SETS):
        stepping = V4Steps(kernels, config, Switches(), room)
        weights = layer(config, block, *given)
        memory = memory_of(room, block, indexes=weights.attn.indexer is not None, device=DEVICE)
        for each in memory.tensors:
            _fill(each)
        stepping.lanes.positions.fill_(CONTEXT - 1)
        stepping.lanes.owners.copy_(stepping.lanes.members)
        streams = torch.randn(lanes, config.hc_mult, config.hidden_size, device=DEVICE).bfloat16()
        sees_all = (ratio,) if ratio and weights.attn.indexer is None else ()

        def run(s: Any = stepping, w: Any = weights, m: Any = memory, x: Any = streams) -> object:
            return s.layer(w, m, s.lists(sees_all), x)  # noqa: B023  the same for every set

        kernels.calls = []
        run()
        found.append(Step(run, kernels.calls))
    return found


def _fill(memory: Tensor) -> None:
    """Bytes that every format reads as small numbers."""
    if memory.dtype is torch.float32:
        memory.normal_()
    else:
        memory.copy_(torch.randint(0x20, 0x3C, memory.shape, dtype=torch.uint8, device=DEVICE))


def shares(
    kernels: Remembering, steps: Sequence[Step], rounds: int
) -> tuple[list[str], list[Figure]]:
    """Time the whole step, then every launch of it; names of the launches."""
    arms = [captured("whole step", 1, [each.run for each in steps])]
    names = [name for name, *_ in steps[0].calls]
    for place, name in enumerate(names):
        again = [kernels.again(each.calls[place]) for each in steps]
        arms.append(captured(f"{place} {name}", 1, again))
    return names, timed(arms, rounds)


def told(names: Sequence[str], figures: Sequence[Figure]) -> list[str]:
    """Lines of a table, from the figure of the whole step and those of its launches."""
    counts, spent = Counter(names), defaultdict[str, float](float)
    for figure, name in zip(figures[1:], names, strict=True):
        spent[name] += figure.median
    total, alone = figures[0].median, sum(spent.values())
    lines = ["| kernel | launches | us | of the sum |", "|---|---|---|---|"]
    for name, taken in sorted(spent.items(), key=lambda each: -each[1]):
        lines.append(f"| {name} | {counts[name]} | {taken:.1f} | {taken / alone:.1%} |")
    lines.append(f"| launches one by one | {len(names)} | {alone:.1f} | 100 % |")
    lines.append(f"| the whole step as a graph | 1 | {total:.1f} | {total / alone:.1%} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; status 2 where nothing can be measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="V4-Flash")
    parser.add_argument("--recipe", choices=RECIPES, default=NVFP4)
    parser.add_argument("--lanes", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--rounds", type=int, default=12)
    asked = parser.parse_args(arguments)
    try:
        require_gpu()
    except DegarbleError as error:
        print(f"REFUSED: {error}", file=sys.stderr)  # noqa: T201  a script
        return error.exit_status
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    say(f"{asked.model}, {asked.recipe}, caches of FP8 entries")
    config = replace(MODELS[asked.model], num_hash_layers=0)
    with torch.inference_mode():
        kernels = Remembering(settings_here())
        sizes = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
        given = experts(*sizes), asked.recipe
        for lanes in asked.lanes:
            spent = {}
            for ratio, count in sorted(Counter(each.ratio for each in config.layers).items()):
                steps = steps_of(kernels, config, ratio, lanes, given)
                names, figures = shares(kernels, steps, asked.rounds)
                spent[ratio] = count * figures[0].median
                say(f"\n**{TYPES[ratio]}, {lanes} tokens behind {CONTEXT - 1:,} each**\n")
                say("\n".join(told(names, figures)))
                del steps
                torch.cuda.empty_cache()
            total = sum(spent.values()) / 1e3
            say(f"\nall {len(config.layers)} layers for {lanes} tokens: {total:.2f} ms")
    return 0


def say(text: Any) -> None:
    """Print a line at once."""
    print(text, flush=True)  # noqa: T201  a script


if __name__ == "__main__":
    sys.exit(main())
