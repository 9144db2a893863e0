"""Embedding, norms, RoPE and mHC of a model by our row kernels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.backends.cutedsl.kernels import NoKernelError, own
from degarble.kernels.primitives.kv_problem import (
    GEOMETRIES,
    PLAIN,
    ROTATED,
    WIDTH,
    Pages,
    ReadProblem,
    WriteProblem,
)
from degarble.kernels.rows.mhc_problem import STREAMS, MhcMixProblem, ProjectProblem, split_weight
from degarble.kernels.rows.problem import (
    EmbedProblem,
    InverseRopeProblem,
    NormProblem,
    QNormRopeProblem,
    ResidualProblem,
)

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.backends.cutedsl.kernels import (
        ComponentCallWork,
        ComponentPart,
        Compute,
        Outputs,
    )
    from degarble.harness.model.types import Rope


# --------------------------------------------------------------------------------------------------
# RoPE tables for the attention kernels: 32 cosines and 32 sines of every position.
#
# Angles are computed in float64 from the model's rope alone: a frequency per pair, blended by YaRN
# if the rope names it, times the position; each cosine and sine is rounded once to float32. Nothing
# is imported from the references, which have their own formula. Tables grow by doubling and are
# cached.

_FEWEST = 1024  # positions of a table
_RAMP = 1e-3  # the width of YaRN's ramp where it has none, as the official code has it


class RopeTables:
    """Tables by rope, grown to the largest requested position."""

    def __init__(self) -> None:
        self._tables: dict[Rope, Tensor] = {}

    def covering(self, rope: Rope, positions: Tensor) -> Tensor:
        """Return a table [P, 2 * pairs] that covers all of these positions, on their device."""
        last = int(positions.max()) if positions.numel() else 0
        known = self._tables.get(rope)
        if known is None or len(known) <= last or known.device != positions.device:
            count = max(_FEWEST, 1 << last.bit_length())
            known = self._tables[rope] = table_of(rope, count).to(positions.device)
        return known


def table_of(rope: Rope, positions: int) -> Tensor:
    """Return cosines, then sines, of positions from 0 on."""
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies(rope)
    return (torch.cat((angle.cos(), angle.sin()), dim=1) * rope.scale).float()


def frequencies(rope: Rope) -> Tensor:
    """Return the angle of each pair at position 1."""
    pairs = rope.dims // 2
    base = torch.tensor([rope.theta ** (-i / pairs) for i in range(pairs)], dtype=torch.float64)
    yarn = rope.yarn
    if yarn is None:
        return base
    bounds = [
        pairs * math.log(yarn.original_max_position_embeddings / (2.0 * math.pi * turns))
        / math.log(rope.theta)
        for turns in (yarn.beta_fast, yarn.beta_slow)
    ]  # fmt: skip
    if yarn.truncate:
        bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
    low, high = max(bounds[0], 0), min(bounds[1], rope.dims - 1)
    ramp = (torch.arange(pairs, dtype=torch.float64) - low) / (high - low or _RAMP)
    slowed = ramp.clamp(0.0, 1.0)
    return base * (1.0 - slowed + slowed / yarn.factor)


# --------------------------------------------------------------------------------------------------
# Run row-wise components by our kernels: embedding, norms, head RoPE, cache rows.
#
# A step that a kernel fuses with its neighbour is computed alone here, so that a capture has it: a
# cache row is written into pages in the format that the model's arithmetic names, and read back.
# V3.2's queries and keys are rotated by the inverse-RoPE kernel with negated sines, in rows of 512
# whose leading values are zeros and discarded: the result is bit for bit that of the narrower row.
#
# Shape letters: T tokens, H heads, d head width, L width of a row (512).

NORM_WEIGHTS = {"bf16": torch.bfloat16, "fp32": torch.float32}
_ENTRY_OF_CACHE = {"exact": "bf16", "fp8": "fp8", "nvfp4": "nvfp4"}
_PAGE = 64  # entries
TURNS = RopeTables()


def embed(part: ComponentPart) -> Compute:
    """Return the compute function that gathers rows of the embedding table."""
    vocabulary, columns = part.shapes[part.name]
    EmbedProblem(1, vocabulary, columns)

    def compute(work: ComponentCallWork) -> Outputs:
        ids = own(work.inputs["tokens"].to(torch.int64))
        problem = EmbedProblem(ids.shape[0], vocabulary, columns)
        table = work.weights.bf16(part.name)
        return {"out": work.run("simt_embed", problem, ids=ids, table=table)[0]}

    return compute


def norm(part: ComponentPart) -> Compute:
    """Return the compute function of an RMSNorm with weight."""
    kind = norm_weight(part, part.name)
    NormProblem(1, part.shapes[part.name][0], part.facts.norm_epsilon(part.name), kind)

    def compute(work: ComponentCallWork) -> Outputs:
        return {"out": _normed(part, work, work.bf16(), kind)}

    return compute


def residual_norm(part: ComponentPart) -> Compute:
    """Return V3.2's norm, fused with the residual sum except in the first layer."""
    kind, switches = norm_weight(part, part.name), part.facts.numerics.switches
    columns, epsilon = part.shapes[part.name][0], part.config.rms_norm_eps
    told = (columns, epsilon, kind, switches.residual_rounded_before_norm)
    ResidualProblem(1, *told)

    def compute(work: ComponentCallWork) -> Outputs:
        x = work.bf16()
        if "residual" not in work.inputs:
            return {"out": _normed(part, work, x, kind), "residual": x}
        out, total = work.run(
            "simt_residual_norm", ResidualProblem(len(x), *told), values=x,
            residual=work.bf16("residual"),
            weight=work.weights.plain(part.name, NORM_WEIGHTS[kind]),
        )  # fmt: skip
        return {"out": out, "residual": total}

    return compute


def norm_weight(part: ComponentPart, name: str) -> str:
    """Return the dtype in which a kernel reads a norm's weight."""
    return "fp32" if part.dtypes[name] == "F32" else "bf16"


def _normed(part: ComponentPart, work: ComponentCallWork, x: Tensor, kind: str) -> Tensor:
    weight = work.weights.plain(part.name, NORM_WEIGHTS[kind])
    problem = NormProblem(x.shape[0], x.shape[1], part.facts.norm_epsilon(part.name), kind)
    return work.run("simt_rmsnorm", problem, values=x, weight=weight)[0]


def rope_of(part: ComponentPart, width: int) -> Rope:
    """Return the block's rope; raise NoKernelError for a row geometry that kernels lack."""
    block = part.component.block
    assert block is not None, "only blocks rotate"
    rope: Rope = part.config.rope(block)
    if width not in GEOMETRIES or rope.dims != ROTATED:
        known = " or ".join(map(str, GEOMETRIES))
        raise NoKernelError(
            f"rows of {width} with {rope.dims} turned; kernels have {known} with 64"
        )
    return rope


def query_heads(part: ComponentPart) -> Compute:
    """Return V4's query heads: weightless norm and rotation."""
    rope, heads = rope_of(part, part.config.head_dim), part.config.num_attention_heads
    QNormRopeProblem(1, heads, 1, part.config.rms_norm_eps)

    def compute(work: ComponentCallWork) -> Outputs:
        x, positions = work.bf16(), own(work.inputs["positions"])
        turns = TURNS.covering(rope, positions)
        problem = QNormRopeProblem(x.shape[0], heads, turns.shape[0], part.config.rms_norm_eps)
        rows = x.reshape(x.shape[0], heads, WIDTH)
        tensors = work.run("simt_qnorm_rope", problem, heads=rows, turns=turns, positions=positions)
        return {"out": tensors[0]}

    return compute


def inverse_rope(part: ComponentPart) -> Compute:
    """Rotate attention's output back, and concatenate heads."""
    rope, heads = rope_of(part, part.config.head_dim), part.config.num_attention_heads
    InverseRopeProblem(1, heads, 1)

    def compute(work: ComponentCallWork) -> Outputs:
        x, positions = work.bf16(), own(work.inputs["positions"])
        turns = TURNS.covering(rope, positions)
        problem = InverseRopeProblem(x.shape[0], heads, turns.shape[0])
        (made,) = work.run("simt_inverse_rope", problem, heads=x, turns=turns, positions=positions)
        return {"out": made.flatten(1)}

    return compute


def rope(part: ComponentPart) -> Compute:
    """Rotate the last values of V3.2's query heads and shared key, in rows of 512."""
    c = part.config
    rope, heads = rope_of(part, WIDTH), c.num_attention_heads
    InverseRopeProblem(1, heads, 1)

    def compute(work: ComponentCallWork) -> Outputs:
        q, positions = work.bf16("q"), own(work.inputs["positions"])
        table = TURNS.covering(rope, positions)
        half = table.shape[1] // 2
        # Negated sines turn the inverse rotation into the forward one.
        forth = own(torch.cat((table[:, :half], -table[:, half:]), dim=1))

        def turned(x_THd: Tensor) -> Tensor:
            rows = x_THd.new_zeros(*x_THd.shape[:2], WIDTH)
            rows[..., PLAIN:] = x_THd[..., -ROTATED:]
            problem = InverseRopeProblem(rows.shape[0], rows.shape[1], forth.shape[0])
            (made,) = work.run(
                "simt_inverse_rope", problem, heads=rows, turns=forth, positions=positions
            )
            return torch.cat((x_THd[..., :-ROTATED], made[..., PLAIN:]), dim=-1)

        key = work.bf16("key")
        return {
            "q": turned(q.reshape(q.shape[0], heads, -1)),
            "key": turned(key.unsqueeze(1)).squeeze(1),
        }

    return compute


def latent_row(part: ComponentPart) -> Compute:
    """Norm and rotate V4's shared row, by writing it into pages of BF16 entries."""
    rope, kind = rope_of(part, part.config.head_dim), norm_weight(part, part.name)

    def compute(work: ComponentCallWork) -> Outputs:
        x, positions = work.bf16(), own(work.inputs["positions"])
        turns = TURNS.covering(rope, positions)
        more = {
            "weight": work.weights.plain(part.name, NORM_WEIGHTS[kind]),
            "turns": turns, "positions": positions,
        }  # fmt: skip
        fields = {
            "positions": turns.shape[0], "epsilon": part.config.rms_norm_eps, "weight": kind,
            "source": "latent",
        }  # fmt: skip
        return {"out": through_pages(work, x, "bf16", fields, more)}

    return compute


def cache_row(part: ComponentPart) -> Compute:
    """Write and read back rows, in the cache format that the model's arithmetic names."""
    rope_of(part, part.config.head_dim)
    kind = str(part.facts.numerics.switches.kv_cache)
    if part.facts.numerics.exact or kind not in _ENTRY_OF_CACHE:
        raise NoKernelError(f"no kernel writes {kind} entries of rows of 512")
    entry = _ENTRY_OF_CACHE[kind]

    def compute(work: ComponentCallWork) -> Outputs:
        fields = {"source": "row"}
        return {"out": through_pages(work, work.bf16(), entry, fields, {})}

    return compute


def through_pages(
    work: ComponentCallWork, x: Tensor, entry: str, fields: dict[str, Any], more: dict[str, Tensor]
) -> Tensor:
    """Write rows into fresh pages in reverse order of memory, and read them back in order."""
    count = x.shape[0]
    pages = Pages(entry, _PAGE, max(1, -(-count // _PAGE)), width=x.shape[1])
    cache = torch.zeros(pages.count, pages.stride, dtype=torch.uint8, device=x.device)
    slots = torch.arange(count - 1, -1, -1, device=x.device)
    written = WriteProblem(count, pages, **fields)
    work.run("simt_kv_write", written, values=x, slots=slots, cache=cache, **more)
    read = ReadProblem(count, pages)
    return work.run("simt_kv_read", read, indices=slots.to(torch.int32), cache=cache)[0]


# --------------------------------------------------------------------------------------------------
# Run mHC by our kernels: projection and mixing before a sublayer, spreading after it.
#
# The projection's weight is stored as three BF16 parts whose sum it is. Products and squares go
# from the projection kernel to the mixing kernel.
#
# Shape letters: T tokens, S streams, D hidden.


def _problem(part: ComponentPart, tokens: int, kind: str) -> MhcMixProblem:
    c = part.config
    if c.hc_mult != STREAMS:
        raise NoKernelError(f"{c.hc_mult} streams; the kernels have {STREAMS}")
    return MhcMixProblem(tokens, c.hidden_size, kind, c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps)


def _mixed(part: ComponentPart, work: ComponentCallWork, kind: str) -> tuple[Tensor, ...]:
    by_end = {name.rpartition("_")[2]: name for name in part.shapes}
    streams = work.bf16("streams")
    split = work.weights.derived(
        by_end["fn"],
        "three bf16",
        lambda weight: work.weights.on_device(split_weight(weight.values(torch.float32))),
    )
    base, scale = (work.weights.plain(by_end[end], torch.float32) for end in ("base", "scale"))
    layer = "head" if kind == "head" else "layer"
    projected = ProjectProblem(streams.shape[0], streams.shape[2], layer)
    products, squares = work.run("simt_mhc_project", projected, streams=streams, split=split)
    return work.run(
        "simt_mhc", _problem(part, streams.shape[0], kind), streams=streams, products=products,
        squares=squares, base=base, scale=scale,
    )  # fmt: skip


def pre(part: ComponentPart) -> Compute:
    """Return the sublayer's input, and the coefficients that spread its output."""
    _problem(part, 1, "all")
    ProjectProblem(1, part.config.hidden_size)

    def compute(work: ComponentCallWork) -> Outputs:
        post, mix, out = _mixed(part, work, "all")
        return {"out": out, "post": post, "mix": mix}

    return compute


def head(part: ComponentPart) -> Compute:
    """Collapse the streams before the head."""
    _problem(part, 1, "head")
    ProjectProblem(1, part.config.hidden_size, "head")

    def compute(work: ComponentCallWork) -> Outputs:
        return {"out": _mixed(part, work, "head")[0]}

    return compute


def post(part: ComponentPart) -> Compute:
    """Spread the sublayer's output over the streams."""
    _problem(part, 1, "post")

    def compute(work: ComponentCallWork) -> Outputs:
        streams = work.bf16("streams")
        (made,) = work.run(
            "simt_mhc", _problem(part, streams.shape[0], "post"), streams=streams,
            layer=work.bf16(), post=work.fp32("post"), mix=work.fp32("mix"),
        )  # fmt: skip
        return {"out": made}

    return compute
