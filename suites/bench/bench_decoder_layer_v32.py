"""A step of one V3.2 layer on a Hopper GPU, and each kernel's share: a script of tables.

    python -m degarble.suites.bench.bench_decoder_layer_v32 [--recipe R] [--lanes B ...] [--pieces]

Layers have true widths and random weights, a dense one and one of experts. They decode at the end
of 8,192 tokens; --pieces adds the step that takes 64 tokens of one prompt. Launches are recorded
and timed, and sets share weights, as in bench_decoder_layer. Numbers are compared by
suites/backends/graph.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.backends.cutedsl.kernels import require_gpu
from degarble.harness.backends.cutedsl.linears import LinearKernel
from degarble.harness.backends.graph import weights as records
from degarble.harness.backends.graph.decoder import PIECE
from degarble.harness.backends.graph.layers import V32Steps
from degarble.harness.backends.graph.matrices import Experts, Matrix
from degarble.harness.backends.graph.steps import MemorySize, latent_memory_of
from degarble.harness.backends.graph.weights import NormWeight, RoutedWeights
from degarble.harness.base.errors import DegarbleError
from degarble.harness.cli.values import settings_here
from degarble.harness.model.config.config import V3_2
from degarble.harness.model.types import MlpType
from degarble.kernels.cache.problem import WINDOW
from degarble.kernels.gemm.problem import GemmProblem
from degarble.references.numerics import Switches
from degarble.suites.bench import bench_decoder_layer as bench
from degarble.suites.bench.bench_decoder_layer import CONTEXT, DEVICE, FP8, NVFP4, RECIPES, SETS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from degarble.harness.model.types import Block

TYPES = {MlpType.DENSE: "dense", MlpType.SCORED: "experts"}
ENTRY = "fp8-v32-ue8m0"  # 656 bytes


def plain(outputs: int, inner: int) -> Matrix:
    """A BF16 matrix."""
    return Matrix(
        LinearKernel("sm90_gemm_bf16", GemmProblem(1, outputs, inner)),
        {"b": bench.bf16(outputs, inner)},
    )


def fp8(outputs: int, inner: int) -> Matrix:
    """A matrix of random codes with float32 scales, as V3.2 has them."""
    made = bench.fp8(outputs, inner)
    problem = GemmProblem(1, outputs, inner, "fp8_block", "float32")
    scales = torch.exp2(made.operands["b_scales"].float() - 127)
    return Matrix(LinearKernel(made.way.kernel, problem), {**made.operands, "b_scales": scales})


def attention(recipe: str) -> records.LatentWeights:
    """Attention of a layer."""
    c, linear = V3_2, fp8 if recipe == FP8 else plain
    hidden, heads, rank = c.hidden_size, c.num_attention_heads, c.q_lora_rank
    nope, value = c.qk_nope_head_dim, c.v_head_dim
    out = fp8 if recipe == FP8 else bench.nvfp4
    indexing = records.KeyIndexing(
        linear(c.index_n_heads * 128, rank), linear(128, hidden), bench.float32(128) + 1,
        bench.float32(128), bench.bf16(c.index_n_heads, hidden), 8192**-0.5,
    )  # fmt: skip
    return records.LatentWeights(
        norm(hidden), linear(rank, hidden), norm(rank), linear(heads * (nope + 64), rank),
        linear(576, hidden), norm(512), bench.bf16(heads * 512, nope),
        bench.bf16(heads * value, 512), out(hidden, heads * value), indexing,
    )  # fmt: skip


def norm(width: int) -> NormWeight:
    """A norm's weight, float32 as checkpoints have it."""
    return NormWeight(torch.ones(width, device=DEVICE))


def gated(recipe: str, width: int) -> Experts | tuple[Matrix, ...]:
    """A dense layer's matrices, or the shared expert's."""
    hidden = V3_2.hidden_size
    if recipe == FP8:
        return fp8(2 * width, hidden), fp8(hidden, width)
    return bench.experts(hidden, width, 1)


def layer(block: Block, every: Experts, recipe: str) -> records.LatentLayer:
    """A layer of random weights; routed experts are those of all sets."""
    c = V3_2
    if block.mlp_type is MlpType.DENSE:
        ffn = records.MlpWeights(norm(c.hidden_size), gated(recipe, c.intermediate_size), None)
    else:
        count = c.n_routed_experts
        routed = RoutedWeights(bench.bf16(count, c.hidden_size), bench.float32(count), every)
        shared = gated(recipe, c.moe_intermediate_size)
        ffn = records.MlpWeights(norm(c.hidden_size), shared, routed)
    return records.LatentLayer(block, c.rope(block), attention(recipe), ffn)


def steps_of(
    kernels: bench.Remembering, block: Block, size: tuple[int, int], given: tuple[Experts, str]
) -> list[bench.Step]:
    """Sets of a layer; size is lanes and rows, given are experts and recipe."""
    lanes, rows = size
    room, found = MemorySize(lanes, CONTEXT, 1, ENTRY), []
    for _ in range(SETS):
        stepping = V32Steps(kernels, V3_2, Switches(), room, rows)
        weights, memory = layer(block, *given), latent_memory_of(room, DEVICE)
        for each in memory.tensors:
            each.copy_(torch.randint(0x20, 0x3C, each.shape, dtype=torch.uint8, device=DEVICE))
        alone = lanes == rows
        first = [CONTEXT - 1] * rows if alone else range(CONTEXT - rows, CONTEXT)
        stepping.lanes.tell([7] * rows, list(first), range(rows) if alone else [0] * rows)
        x, residual = (
            torch.randn(rows, V3_2.hidden_size, device=DEVICE).bfloat16() for _ in range(2)
        )

        def run(
            s: Any = stepping, w: Any = weights, m: Any = memory, given: Any = (x, residual)
        ) -> object:
            return s.layer(w, m, s.slots(WINDOW, 1, 1)[1], given)

        kernels.calls = []
        run()
        found.append(bench.Step(run, kernels.calls))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; status 2 where nothing can be measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", choices=RECIPES, default=NVFP4)
    parser.add_argument("--lanes", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--pieces", action="store_true", help="64 tokens of one prompt as well")
    parser.add_argument("--rounds", type=int, default=12)
    asked = parser.parse_args(arguments)
    try:
        require_gpu()
    except DegarbleError as error:
        print(f"REFUSED: {error}", file=sys.stderr)  # noqa: T201  a script
        return error.exit_status
    bench.say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    bench.say(f"V3.2, {asked.recipe}, entries of 656 bytes")
    sizes = [(lanes, lanes) for lanes in asked.lanes] + [(1, PIECE)] * asked.pieces
    with torch.inference_mode():
        kernels = bench.Remembering(settings_here())
        c = V3_2
        every = bench.experts(c.hidden_size, c.moe_intermediate_size, c.n_routed_experts)
        for size in sizes:
            total, told = 0.0, f"{size[1]} tokens of {size[0]} sequences"
            for kind, name in TYPES.items():
                blocks = [each for each in c.layers if each.mlp_type is kind]
                steps = steps_of(kernels, blocks[-1], size, (every, asked.recipe))
                names, figures = bench.shares(kernels, steps, asked.rounds)
                total += len(blocks) * figures[0].median
                bench.say(f"\n**{name}, {told}, behind {CONTEXT - 1:,} each**\n")
                bench.say("\n".join(bench.told(names, figures)))
                del steps
                torch.cuda.empty_cache()
            bench.say(f"\nall {len(c.layers)} layers for {told}: {total / 1e3:.2f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
