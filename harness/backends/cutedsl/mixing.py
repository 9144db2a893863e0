"""Run mHC by our kernels: projection and mixing before a sublayer, spreading after it.

The projection's weight is stored as three BF16 parts whose sum it is. Products and squares go from
the projection kernel to the mixing kernel.

Shape letters: T tokens, S streams, D hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.backends.cutedsl.parts import NoKernelError
from degarble.kernels.rows.mhc_problem import STREAMS, MixProblem, ProjectProblem, split_weight

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.backends.cutedsl.parts import Compute, Outputs, Part, Work


def _problem(part: Part, tokens: int, kind: str) -> MixProblem:
    c = part.config
    if c.hc_mult != STREAMS:
        raise NoKernelError(f"{c.hc_mult} streams; the kernels have {STREAMS}")
    return MixProblem(tokens, c.hidden_size, kind, c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps)


def _mixed(part: Part, work: Work, kind: str) -> tuple[Tensor, ...]:
    by_end = {name.rpartition("_")[2]: name for name in part.shapes}
    streams = work.bf16("streams")
    split = work.weights.made(
        by_end["fn"],
        "three bf16",
        lambda weight: work.weights.there(split_weight(weight.values(torch.float32))),
    )
    base, scale = (work.weights.plain(by_end[end], torch.float32) for end in ("base", "scale"))
    layer = "head" if kind == "head" else "layer"
    projected = ProjectProblem(streams.shape[0], streams.shape[2], layer)
    products, squares = work.run("simt_mhc_project", projected, streams=streams, split=split)
    return work.run(
        "simt_mhc", _problem(part, streams.shape[0], kind), streams=streams, products=products,
        squares=squares, base=base, scale=scale,
    )  # fmt: skip


def pre(part: Part) -> Compute:
    """Return the sublayer's input, and the coefficients that spread its output."""
    _problem(part, 1, "all")
    ProjectProblem(1, part.config.hidden_size)

    def compute(work: Work) -> Outputs:
        out, post, mix = _mixed(part, work, "all")
        return {"out": out, "post": post, "mix": mix}

    return compute


def head(part: Part) -> Compute:
    """Collapse the streams before the head."""
    _problem(part, 1, "head")
    ProjectProblem(1, part.config.hidden_size, "head")

    def compute(work: Work) -> Outputs:
        return {"out": _mixed(part, work, "head")[0]}

    return compute


def post(part: Part) -> Compute:
    """Spread the sublayer's output over the streams."""
    _problem(part, 1, "post")

    def compute(work: Work) -> Outputs:
        streams = work.bf16("streams")
        (made,) = work.run(
            "simt_mhc", _problem(part, streams.shape[0], "post"), streams=streams,
            layer=work.bf16(), post=work.fp32("post"), mix=work.fp32("mix"),
        )  # fmt: skip
        return {"out": made}

    return compute
