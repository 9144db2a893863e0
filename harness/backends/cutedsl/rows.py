"""Run row-wise components by our kernels: embedding, norms, head RoPE, cache rows.

A step that a kernel fuses with its neighbour is computed alone here, so that a capture has it: a
cache row is written into pages in the format that the model's arithmetic names, and read back.
V3.2's queries and keys are rotated by the inverse-RoPE kernel with negated sines, in rows of 512
whose leading values are zeros and discarded: the result is bit for bit that of the narrower row.

Shape letters: T tokens, H heads, d head width, L width of a row (512).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.backends.cutedsl.parts import NoKernelError, own
from degarble.harness.backends.cutedsl.rope_tables import Turns
from degarble.kernels.primitives.kv_problem import (
    GEOMETRIES,
    PLAIN,
    ROTATED,
    WIDTH,
    Pages,
    ReadProblem,
    WriteProblem,
)
from degarble.kernels.rows.problem import (
    BackProblem,
    EmbedProblem,
    HeadsProblem,
    NormProblem,
    ResidualProblem,
)

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.backends.cutedsl.parts import Compute, Outputs, Part, Work
    from degarble.harness.model.types import Rope

NORM_WEIGHTS = {"bf16": torch.bfloat16, "fp32": torch.float32}
_ENTRY_OF_CACHE = {"exact": "bf16", "fp8": "fp8", "nvfp4": "nvfp4"}
_PAGE = 64  # entries
TURNS = Turns()


def embed(part: Part) -> Compute:
    """Return the compute function that gathers rows of the embedding table."""
    vocabulary, columns = part.shapes[part.name]
    EmbedProblem(1, vocabulary, columns)

    def compute(work: Work) -> Outputs:
        ids = own(work.inputs["tokens"].to(torch.int64))
        problem = EmbedProblem(ids.shape[0], vocabulary, columns)
        table = work.weights.bf16(part.name)
        return {"out": work.run("simt_embed", problem, ids=ids, table=table)[0]}

    return compute


def norm(part: Part) -> Compute:
    """Return the compute function of an RMSNorm with weight."""
    kind = norm_weight(part, part.name)
    NormProblem(1, part.shapes[part.name][0], part.facts.norm_epsilon(part.name), kind)

    def compute(work: Work) -> Outputs:
        return {"out": _normed(part, work, work.bf16(), kind)}

    return compute


def residual_norm(part: Part) -> Compute:
    """Return V3.2's norm, fused with the residual sum except in the first layer."""
    kind, switches = norm_weight(part, part.name), part.facts.numerics.switches
    columns, epsilon = part.shapes[part.name][0], part.config.rms_norm_eps
    told = (columns, epsilon, kind, switches.residual_rounded_before_norm)
    ResidualProblem(1, *told)

    def compute(work: Work) -> Outputs:
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


def norm_weight(part: Part, name: str) -> str:
    """Return the dtype in which a kernel reads a norm's weight."""
    return "fp32" if part.dtypes[name] == "F32" else "bf16"


def _normed(part: Part, work: Work, x: Tensor, kind: str) -> Tensor:
    weight = work.weights.plain(part.name, NORM_WEIGHTS[kind])
    problem = NormProblem(x.shape[0], x.shape[1], part.facts.norm_epsilon(part.name), kind)
    return work.run("simt_rmsnorm", problem, values=x, weight=weight)[0]


def rope_of(part: Part, width: int) -> Rope:
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


def query_heads(part: Part) -> Compute:
    """Return V4's query heads: weightless norm and rotation."""
    rope, heads = rope_of(part, part.config.head_dim), part.config.num_attention_heads
    HeadsProblem(1, heads, 1, part.config.rms_norm_eps)

    def compute(work: Work) -> Outputs:
        x, positions = work.bf16(), own(work.inputs["positions"])
        turns = TURNS.reaching(rope, positions)
        problem = HeadsProblem(x.shape[0], heads, turns.shape[0], part.config.rms_norm_eps)
        rows = x.reshape(x.shape[0], heads, WIDTH)
        made = work.run("simt_qnorm_rope", problem, heads=rows, turns=turns, positions=positions)
        return {"out": made[0]}

    return compute


def inverse_rope(part: Part) -> Compute:
    """Rotate attention's output back, and concatenate heads."""
    rope, heads = rope_of(part, part.config.head_dim), part.config.num_attention_heads
    BackProblem(1, heads, 1)

    def compute(work: Work) -> Outputs:
        x, positions = work.bf16(), own(work.inputs["positions"])
        turns = TURNS.reaching(rope, positions)
        problem = BackProblem(x.shape[0], heads, turns.shape[0])
        (made,) = work.run("simt_inverse_rope", problem, heads=x, turns=turns, positions=positions)
        return {"out": made.flatten(1)}

    return compute


def rope(part: Part) -> Compute:
    """Rotate the last values of V3.2's query heads and shared key, in rows of 512."""
    c = part.config
    rope, heads = rope_of(part, WIDTH), c.num_attention_heads
    BackProblem(1, heads, 1)

    def compute(work: Work) -> Outputs:
        q, positions = work.bf16("q"), own(work.inputs["positions"])
        table = TURNS.reaching(rope, positions)
        half = table.shape[1] // 2
        # Negated sines turn the inverse rotation into the forward one.
        forth = own(torch.cat((table[:, :half], -table[:, half:]), dim=1))

        def turned(x_THd: Tensor) -> Tensor:
            rows = x_THd.new_zeros(*x_THd.shape[:2], WIDTH)
            rows[..., PLAIN:] = x_THd[..., -ROTATED:]
            problem = BackProblem(rows.shape[0], rows.shape[1], forth.shape[0])
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


def latent_row(part: Part) -> Compute:
    """Norm and rotate V4's shared row, by writing it into pages of BF16 entries."""
    rope, kind = rope_of(part, part.config.head_dim), norm_weight(part, part.name)

    def compute(work: Work) -> Outputs:
        x, positions = work.bf16(), own(work.inputs["positions"])
        turns = TURNS.reaching(rope, positions)
        more = {
            "weight": work.weights.plain(part.name, NORM_WEIGHTS[kind]),
            "turns": turns, "positions": positions,
        }  # fmt: skip
        told = {
            "positions": turns.shape[0], "epsilon": part.config.rms_norm_eps, "weight": kind,
            "source": "latent",
        }  # fmt: skip
        return {"out": through_pages(work, x, "bf16", told, more)}

    return compute


def cache_row(part: Part) -> Compute:
    """Write and read back rows, in the cache format that the model's arithmetic names."""
    rope_of(part, part.config.head_dim)
    kind = str(part.facts.numerics.switches.kv_cache)
    if part.facts.numerics.exact or kind not in _ENTRY_OF_CACHE:
        raise NoKernelError(f"no kernel writes {kind} entries of rows of 512")
    entry = _ENTRY_OF_CACHE[kind]

    def compute(work: Work) -> Outputs:
        told = {"source": "row"}
        return {"out": through_pages(work, work.bf16(), entry, told, {})}

    return compute


def through_pages(
    work: Work, x: Tensor, entry: str, told: dict[str, Any], more: dict[str, Tensor]
) -> Tensor:
    """Write rows into fresh pages in reverse order of memory, and read them back in order."""
    count = x.shape[0]
    pages = Pages(entry, _PAGE, max(1, -(-count // _PAGE)), width=x.shape[1])
    cache = torch.zeros(pages.count, pages.stride, dtype=torch.uint8, device=x.device)
    slots = torch.arange(count - 1, -1, -1, device=x.device)
    written = WriteProblem(count, pages, **told)
    work.run("simt_kv_write", written, values=x, slots=slots, cache=cache, **more)
    read = ReadProblem(count, pages)
    return work.run("simt_kv_read", read, indices=slots.to(torch.int32), cache=cache)[0]
