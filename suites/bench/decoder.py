"""A decoding step of one layer, and each kernel's share of it.

Layers have true widths and random weights. Four sets have their own attention and memories; experts
are shared, and each set's tokens choose others. The whole step is one CUDA graph over the sets in
turn, so that the cache holds nothing of it; every launch is a graph of its own in the same way.
Numbers are compared by suites/backends/graph.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.backends.cutedsl.kernels import KernelsOnGpu
from degarble.harness.backends.cutedsl.linears import LinearKernel
from degarble.harness.backends.graph import weights as records
from degarble.harness.backends.graph.decoder import PIECE
from degarble.harness.backends.graph.layers import V4Steps, V32Steps
from degarble.harness.backends.graph.matrices import (
    FEW_ROWS,
    PRODUCTS,
    TILES,
    CodedGroups,
    DenseGroups,
    Experts,
    Matrix,
    alone_for_few_rows,
    for_few_rows,
)
from degarble.harness.backends.graph.steps import MemorySize, latent_memory_of, memory_of
from degarble.harness.cli.values import settings_here
from degarble.harness.formats.layouts import SWIZZLE_128X4
from degarble.harness.model.config.config import V3_2, V4_FLASH, V4_PRO
from degarble.harness.model.types import MlpType
from degarble.kernels.cache.problem import WINDOW
from degarble.kernels.gemm.problem import GemmProblem
from degarble.kernels.rows.mhc_problem import split_weight
from degarble.references.numerics import Switches
from degarble.suites.bench import gpu
from degarble.suites.bench.gpu import normal, octets
from degarble.suites.bench.runner import (
    US_MEDIAN,
    Arm,
    Bench,
    Column,
    Comparison,
    Part,
    time_over,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from degarble.harness.model.config.config import V4Config
    from degarble.harness.model.types import Block
    from degarble.suites.bench.runner import Readings

MODELS = {"V4-Flash": V4_FLASH, "V4-Pro": V4_PRO}
SETS = 4
CONTEXT = 8192
TYPES = {0: "window only", 4: "ratio 4, indexer", 128: "ratio 128"}
TYPES_V32 = {MlpType.DENSE: "dense", MlpType.SCORED: "experts"}
ENTRY, ENTRY_V32 = "fp8", "fp8-v32-ue8m0"  # 656 bytes
NVFP4, FP8 = RECIPES = ("nvfp4-full", "nvfp4-experts")  # of attention and the shared expert
WHOLE = "whole step"


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


# ---- random weights ------------------------------------------------------------------------------


def bf16(*shape: int) -> Tensor:
    """Weights of a linear, so that outputs are about as large as inputs."""
    drawn: Tensor = normal(*shape) * float(shape[-1] ** -0.5)
    return drawn


def float32(*shape: int) -> Tensor:
    """Parameters around zero."""
    drawn: Tensor = gpu.floats(*shape) * 0.1
    return drawn


def norm(width: int, dtype: torch.dtype = torch.bfloat16) -> records.NormWeight:
    return records.NormWeight(torch.ones(width, device=gpu.DEVICE, dtype=dtype))


def filled(shape: Sequence[int], value: float) -> Tensor:
    return torch.full(tuple(shape), value, device=gpu.DEVICE)


def codes(*shape: int) -> Any:
    return octets(*shape, low=0, high=256)


def scales(*shape: int) -> Any:
    """E4M3 scales from 0.5 to 2."""
    return octets(*shape, low=0x30, high=0x40)


def plain(outputs: int, inner: int) -> Matrix:
    problem = GemmProblem(1, outputs, inner)
    return Matrix(LinearKernel("sm90_gemm_bf16", problem), {"b": bf16(outputs, inner)})


def nvfp4(outputs: int, inner: int) -> Matrix:
    """A matrix of random codes."""
    operands = {
        "b": codes(outputs, inner // 2),
        "b_scales": scales(SWIZZLE_128X4.storage_size(outputs, inner // 16)),
        "b_decode_scale": filled((1,), 0.3 * inner**-0.5),
    }
    problem = GemmProblem(1, outputs, inner, "nvfp4", "e4m3")
    return Matrix(LinearKernel("sm90_gemm_nvfp4", problem), operands, filled((1,), 2e-3))


def fp8(outputs: int, inner: int, scale_format: str = "ue8m0") -> Matrix:
    """A matrix of random codes, with exponents as scales, or with float32 ones as V3.2 has them."""
    problem = GemmProblem(1, outputs, inner, "fp8_block", scale_format)
    tiles, exponent = (-(-outputs // 128), -(-inner // 128)), -(inner.bit_length() // 2)
    of_tiles = filled(tiles, 2.0**exponent)
    if scale_format == "ue8m0":
        of_tiles = torch.full_like(of_tiles, 127 + exponent, dtype=torch.uint8)
    operands = {"b": normal(outputs, inner, dtype=torch.float8_e4m3fn), "b_scales": of_tiles}
    return Matrix(LinearKernel("sm90_gemm_fp8_block", problem), operands)


def fp8_v32(outputs: int, inner: int) -> Matrix:
    return fp8(outputs, inner, "float32")


def experts(hidden: int, width: int, count: int) -> Experts:
    """Experts of random codes."""
    made: dict[str, Tensor] = {}
    for name, leading, n, k in (
        ("w13", (count, 2), width, hidden), ("w2", (count,), hidden, width),
    ):  # fmt: skip
        made[f"{name}_codes"] = codes(*leading, n, k // 2)
        made[f"{name}_scales"] = scales(*leading, SWIZZLE_128X4.storage_size(n, k // 16))
        made[f"{name}_decode_scale"] = filled(leading, 0.3 * k**-0.5)
        made[f"{name}_input_scale"] = filled((count,), 2e-3)
    return Experts(made)


# ---- a V4 layer ----------------------------------------------------------------------------------


def every_expert(hidden: int, width: int, count: int) -> Experts:
    """Return experts, and one more: the shared one, where it is computed with them."""
    return replace(experts(hidden, width, count + 1), with_shared=True)


def mixing(config: V4Config, products: int) -> records.MhcLayout:
    """mHC's parameters."""
    fn = float32(products, config.hc_mult * config.hidden_size) * 0.1
    split = split_weight(fn.cpu()).to(gpu.DEVICE)
    return records.MhcLayout(split, float32(products), float32(1 if products == 4 else 3))


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
    kernel, whole = fp8(config.o_lora_rank, inner).kernel, fp8(count * config.o_lora_rank, inner)
    part = (whole.operands["b"], whole.operands["b_scales"])
    return CodedGroups(kernel, (part,), count, whole=True)


def attention(config: V4Config, block: Block, recipe: str) -> records.AttentionWeights:
    """Attention of a layer's type; compressors and indexer are BF16."""
    linear = fp8 if recipe == FP8 else nvfp4
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.q_lora_rank
    out, indexer = config.o_groups * config.o_lora_rank, None
    if block.ratio == 4:
        indexer = records.Indexing(
            plain(config.index_n_heads * 128, rank), bf16(config.index_n_heads, hidden),
            compressing(config, block.ratio, 128),
        )  # fmt: skip
    return records.AttentionWeights(
        mixing(config, 24), norm(hidden), linear(rank, hidden), norm(rank),
        linear(heads * 512, rank), linear(512, hidden), norm(512), float32(heads),
        groups_of(config, coded=recipe == FP8), linear(hidden, out),
        compressing(config, block.ratio, 512) if block.ratio else None, indexer,
    )  # fmt: skip


def routed_to(config: Any, every: Experts) -> records.RoutedWeights:
    """A router that spreads tokens over all experts, as trained ones do: its bias is zero."""
    count = config.n_routed_experts
    return records.RoutedWeights(bf16(count, config.hidden_size), filled((count,), 0.0), every)


def layer(config: V4Config, block: Block, every: Experts, recipe: str) -> records.LayerWeights:
    """A layer of random weights; routed experts are those of all sets."""
    hidden = config.hidden_size
    width = config.moe_intermediate_size
    shared: Any = experts(hidden, width, 1)
    if recipe == FP8:
        shared = fp8(2 * width, hidden), fp8(hidden, width)
    routed = routed_to(config, every)
    ffn = records.FfnWeights(mixing(config, 24), norm(hidden), routed, shared)
    return records.LayerWeights(block, config.rope(block), attention(config, block, recipe), ffn)


# ---- a V3.2 layer --------------------------------------------------------------------------------


def attention_v32(config: Any, recipe: str) -> records.LatentWeights:
    linear, out = (fp8_v32, fp8_v32) if recipe == FP8 else (plain, nvfp4)
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.q_lora_rank
    nope, value = config.qk_nope_head_dim, config.v_head_dim
    indexing = records.KeyIndexing(
        linear(config.index_n_heads * 128, rank), linear(128, hidden), float32(128) + 1,
        float32(128), bf16(config.index_n_heads, hidden), 8192**-0.5,
    )  # fmt: skip
    return records.LatentWeights(
        norm_v32(hidden), linear(rank, hidden), norm_v32(rank), linear(heads * (nope + 64), rank),
        linear(576, hidden), norm_v32(512), bf16(heads * 512, nope),
        bf16(heads * value, 512), out(hidden, heads * value), indexing,
    )  # fmt: skip


def norm_v32(width: int) -> records.NormWeight:
    """A norm's weight, float32 as checkpoints have it."""
    return norm(width, torch.float32)


def gated_v32(hidden: int, width: int, recipe: str) -> Experts | tuple[Matrix, ...]:
    """A dense layer's matrices, or the shared expert's."""
    if recipe == FP8:
        return fp8_v32(2 * width, hidden), fp8_v32(hidden, width)
    return experts(hidden, width, 1)


def layer_v32(config: Any, block: Block, every: Experts, recipe: str) -> records.LatentLayer:
    """A layer of random weights; routed experts are those of all sets."""
    hidden = config.hidden_size
    if block.mlp_type is MlpType.DENSE:
        gated = gated_v32(hidden, config.intermediate_size, recipe)
        ffn = records.MlpWeights(norm_v32(hidden), gated, None)
    else:
        routed = routed_to(config, every)
        shared = gated_v32(hidden, config.moe_intermediate_size, recipe)
        ffn = records.MlpWeights(norm_v32(hidden), shared, routed)
    return records.LatentLayer(block, config.rope(block), attention_v32(config, recipe), ffn)


def for_products(weights: Any, products: str) -> Any:
    """Return a layer's weights as a graph with these products has them; routed experts as are."""
    if products == TILES:
        return weights
    if isinstance(weights, Matrix):
        return for_few_rows(weights, "a matrix")
    if isinstance(weights, Experts):
        return alone_for_few_rows(weights, "an expert ")
    if isinstance(weights, tuple):
        return tuple(for_products(each, products) for each in weights)
    if not is_dataclass(weights) or isinstance(weights, type | records.RoutedWeights):
        return weights
    parts = {field.name: getattr(weights, field.name) for field in fields(weights)}
    changed = {name: for_products(part, products) for name, part in parts.items()}
    apart = {name: part for name, part in changed.items() if part is not parts[name]}
    return replace(weights, **apart) if apart else weights


# ---- a step --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One set: a layer, the launches that its step makes, and its weights."""

    run: Callable[..., object]  # of what layers share; without it, a layer computes that too
    calls: list[tuple[str, Any, dict[str, Any]]]
    weights: Any
    shared: Callable[[], Any]  # what layers of a step share


@dataclass(frozen=True)
class Given:
    """What all sets of all layers share."""

    kernels: Any
    config: Any
    every: Experts
    recipe: str
    entry: str  # of the caches
    context: int = CONTEXT
    products: str = TILES  # how NVFP4 is multiplied by NVFP4

    def recorded(self, run: Callable[..., object], weights: Any, shared: Callable[[], Any]) -> Step:
        self.kernels.calls = []
        run()
        calls, self.kernels.calls = self.kernels.calls, []  # what follows is none of this step's
        return Step(run, calls, weights, shared)


def steps_of(given: Given, block: Block, lanes: int) -> list[Step]:
    """Sets of a V4 layer at the end of a context that is full."""
    config, found = given.config, []
    room = MemorySize(lanes, given.context, config.sliding_window, given.entry)
    for _ in range(SETS):
        stepping = V4Steps(given.kernels, config, Switches(), room, given.products)
        weights = layer(config, block, given.every, given.recipe)
        weights = for_products(weights, given.products)
        indexes = weights.attn.indexer is not None
        memory = memory_of(room, block, indexes=indexes, device=gpu.DEVICE)
        for tensor in memory.tensors:
            _fill(tensor)
        stepping.lanes.positions.fill_(given.context - 1)
        stepping.lanes.owners.copy_(stepping.lanes.members)
        streams = normal(lanes, config.hc_mult, config.hidden_size)
        sees_all = (block.ratio,) if block.ratio and not indexes else ()

        lists = partial(stepping.lists, sees_all)
        # What a layer hands on is what the next one is given: streams, or what to spread on them.
        entering = stepping.layer(weights, memory, lists(), streams)

        def run(
            shared: Any = None, s: Any = stepping, w: Any = weights, m: Any = memory,
            x: Any = entering, every: Any = lists,
        ) -> object:  # fmt: skip
            return s.layer(w, m, shared or every(), x)

        found.append(given.recorded(run, weights, lists))
    return found


def steps_of_v32(given: Given, block: Block, lanes: int, rows: int) -> list[Step]:
    """Sets of a V3.2 layer: rows of as many lanes, or of one prompt."""
    config, found = given.config, []
    room = MemorySize(lanes, given.context, 1, given.entry)
    for _ in range(SETS):
        stepping = V32Steps(given.kernels, config, Switches(), room, rows, given.products)
        weights = layer_v32(config, block, given.every, given.recipe)
        weights = for_products(weights, given.products)
        memory = latent_memory_of(room, gpu.DEVICE)
        for tensor in memory.tensors:
            _fill(tensor)
        alone = lanes == rows
        first = [given.context - 1] * rows if alone else range(given.context - rows, given.context)
        stepping.lanes.copy_step([7] * rows, list(first), range(rows) if alone else [0] * rows)
        pair = normal(rows, config.hidden_size), normal(rows, config.hidden_size)

        slots = partial(stepping.slots, WINDOW, 1, 1)
        # As above: what a layer hands on is what the next one is given.
        own = slots()[1]
        assert own is not None, "a window tells the rows' own slots"
        entering = stepping.layer(weights, memory, own, pair)

        def run(
            shared: Any = None, s: Any = stepping, w: Any = weights, m: Any = memory,
            given: Any = entering, every: Any = slots,
        ) -> object:  # fmt: skip
            return s.layer(w, m, (shared or every())[1], given)

        found.append(given.recorded(run, weights, slots))
    return found


def _fill(memory: Tensor) -> None:
    """Bytes that every format reads as small numbers."""
    if memory.dtype is torch.float32:
        memory.normal_()
    else:
        memory.copy_(octets(*memory.shape, high=0x3C))


# ---- the tables ----------------------------------------------------------------------------------

COLUMNS: tuple[Column, ...] = tuple(
    (name, lambda _reading: "") for name in ("kernel", "launches", "us", "of the sum")
)


def kernel_rows(names: Sequence[str], readings: Readings) -> list[tuple[str, ...]]:
    """Sum the launches of each kernel, and compare them with the whole step."""
    whole, *launches = readings.values()
    counts, spent = Counter(names), defaultdict[str, float](float)
    for reading, name in zip(launches, names, strict=True):
        spent[name] += reading.median * 1e6
    total, alone = whole.median * 1e6, sum(spent.values())
    rows: list[tuple[str, ...]] = [
        (name, str(counts[name]), f"{taken:.1f}", f"{taken / alone:.1%}")
        for name, taken in sorted(spent.items(), key=lambda each: -each[1])
    ]
    rows.append(("launches one by one", str(len(names)), f"{alone:.1f}", "100 %"))
    rows.append(("the whole step as a graph", "1", f"{total:.1f}", f"{total / alone:.1%}"))
    return rows


def step_table(
    title: str, kernels: Any, steps: Sequence[Step], notes: Callable[[Readings], list[str]]
) -> Comparison:
    """Time the whole step, then every launch of it."""
    names = [name for name, *_ in steps[0].calls]
    arms = [Arm(WHOLE, lambda number: steps[number].run, sets=len(steps))]
    for place, name in enumerate(names):

        def make(number: int, at: int = place) -> Callable[[], object]:
            again: Callable[[], object] = kernels.again(steps[number].calls[at])
            return again

        arms.append(Arm(f"{place} {name}", make, sets=len(steps)))
    return Comparison(
        title, [tuple(arms)], COLUMNS, rows=lambda found: kernel_rows(names, found), notes=notes
    )


def decoder(options: Any) -> Iterator[Part]:
    """Layers of each type at the end of 8,192 tokens."""
    config = replace(MODELS[options.model], num_hash_layers=0)
    sizes = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    of = Given(Remembering(settings_here()), config, every_expert(*sizes), options.recipe, ENTRY)
    given = replace(of, products=options.products)
    yield f"{options.model}, {options.recipe}, {options.products}, caches of FP8 entries"
    for lanes in options.lanes:
        spent: list[float] = []
        for ratio, count in sorted(Counter(each.ratio for each in config.layers).items()):
            block = [each for each in config.layers if each.ratio == ratio][-1]
            title = f"{TYPES[ratio]}, {lanes} tokens behind {CONTEXT - 1:,} each"
            steps = steps_of(given, block, lanes)
            yield step_table(title, given.kernels, steps, _added(spent, count))
            del steps
        yield f"all {len(config.layers)} layers for {lanes} tokens: {sum(spent) * 1e3:.2f} ms"


def decoder_v32(options: Any) -> Iterator[Part]:
    """A dense layer and one of experts; --pieces adds 64 tokens of one prompt."""
    sizes = V3_2.hidden_size, V3_2.moe_intermediate_size, V3_2.n_routed_experts
    of = Given(Remembering(settings_here()), V3_2, every_expert(*sizes), options.recipe, ENTRY_V32)
    given = replace(of, products=options.products)
    yield f"V3.2, {options.recipe}, {options.products}, entries of 656 bytes"
    for lanes, rows in [(n, n) for n in options.lanes] + [(1, PIECE)] * options.pieces:
        spent: list[float] = []
        text = f"{rows} tokens of {lanes} sequences"
        for kind, name in TYPES_V32.items():
            blocks = [block for block in V3_2.layers if block.mlp_type is kind]
            title = f"{name}, {text}, behind {CONTEXT - 1:,} each"
            steps = steps_of_v32(given if rows == lanes else of, blocks[-1], lanes, rows)
            yield step_table(title, given.kernels, steps, _added(spent, len(blocks)))
            del steps
        yield f"all {len(V3_2.layers)} layers for {text}: {sum(spent) * 1e3:.2f} ms"


def decoder_products(options: Any) -> Iterator[Part]:
    """Whole steps by tiles and as few rows in turns, for each type of layer and number of lanes."""
    is_v4 = options.model in MODELS
    config = replace(MODELS[options.model], num_hash_layers=0) if is_v4 else V3_2
    sizes = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    entry = ENTRY if is_v4 else ENTRY_V32
    plain = Given(Remembering(settings_here()), config, every_expert(*sizes), NVFP4, entry)
    yield f"{options.model}, {NVFP4}: one decides, for a graph of so many lanes"
    kind_of: Callable[[Block], Any] = (lambda b: b.ratio) if is_v4 else (lambda b: b.mlp_type)
    names: dict[Any, str] = {**TYPES, **TYPES_V32}
    for lanes in options.lanes:
        spent: dict[str, list[float]] = {name: [] for name in PRODUCTS}
        for kind, count in Counter(map(kind_of, config.layers)).items():
            block = [each for each in config.layers if kind_of(each) == kind][-1]
            steps = {
                name: _steps_of_any(replace(plain, products=name), block, lanes)
                for name in PRODUCTS
            }
            yield products_table(f"{names[kind]}, {lanes} tokens", steps, spent, count)
            del steps
        tiles, few = (sum(spent[name]) * 1e3 for name in PRODUCTS)
        chosen = FEW_ROWS if few < tiles else TILES
        yield (
            f"all {len(config.layers)} layers for {lanes} tokens: {TILES} {tiles:.2f} ms,"
            f" {FEW_ROWS} {few:.2f} ms; faster: {chosen}"
        )


def _steps_of_any(given: Given, block: Block, lanes: int) -> list[Step]:
    if given.config is V3_2:
        return steps_of_v32(given, block, lanes, lanes)
    return steps_of(given, block, lanes)


def products_table(
    title: str, steps: dict[str, list[Step]], spent: dict[str, list[float]], count: int
) -> Comparison:
    """Time the whole step of both choices in turns; add it to what all layers spend."""
    arms = tuple(
        Arm(name, partial(_run_of, of), sets=len(of)) for name, of in steps.items()
    )  # fmt: skip

    def notes(found: Readings) -> list[str]:
        for name in steps:
            spent[name].append(count * found[name].median)
        launched = (f"{name}: {len(of[0].calls)} launches" for name, of in steps.items())
        return [", ".join(launched)]

    columns = (US_MEDIAN, time_over(TILES, f"time / {TILES}"))
    return Comparison(title, [arms], columns, notes=notes, first="products")


def _run_of(steps: Sequence[Step], number: int) -> Callable[[], object]:
    return steps[number].run


def _added(spent: list[float], count: int) -> Callable[[Readings], list[str]]:
    """Add so many times the whole step to what was spent."""

    def notes(found: Readings) -> list[str]:
        spent.append(count * found[WHOLE].median)
        return []

    return notes


BENCHES = {
    "decoder": Bench(
        "a decoding step of one V4 layer, and each kernel's share of it", decoder, rounds=12,
        needs="gpu", options={
            "model": tuple(MODELS), "recipe": RECIPES, "products": PRODUCTS, "lanes": (1, 64),
        },
    ),
    "decoder-v32": Bench(
        "a step of one V3.2 layer, and each kernel's share of it", decoder_v32, rounds=12,
        needs="gpu",
        options={"recipe": RECIPES, "products": PRODUCTS, "lanes": (1, 64), "pieces": False},
    ),
    "decoder-products": Bench(
        "a decoding step by NVFP4 tiles and as few rows, one of which a graph is built for",
        decoder_products, rounds=12, needs="gpu",
        options={"model": (*MODELS, "V3.2"), "lanes": (1, 4, 16)},
    ),
}  # fmt: skip
