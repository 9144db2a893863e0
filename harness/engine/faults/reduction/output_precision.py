"""M40: an accumulator or an output has too small a format, or is rounded by another rule.

Partial sums are stored in FP16 before the scale (vllm issue 37135: infinite), partial sums over K
are kept in BF16, an output passes through E4M3, or is truncated instead of rounded. Each of these
alone looks like noise; sums over rows and tiles show that it is too large.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.activation_regions import length_of_difference
from degarble.harness.engine.faults.model_faults import (
    ModelFault,
    Way,
    from_ways,
)
from degarble.harness.engine.faults.rebinding import (
    decoded,
    facts_of,
    unrounded,
    unrounded_output,
    with_facts,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import Scene, Sight

    Tensors = Mapping[str, Tensor]
    Round = Callable[[Tensor], Tensor]

_LINEARS = (
    "attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wkv_a", "attn.wkv_b", "attn.wo", "attn.wo_a",
    "attn.wo_b", "attn.indexer.wq_b", "attn.indexer.wk", "ffn.shared.w13", "ffn.shared.w2",
    "ffn.w13", "ffn.w2", "ffn.experts.w13", "ffn.experts.w2",
)  # fmt: skip
_ROUNDED = (*_LINEARS, "attn.attend", "attn.norm", "attn.q_norm", "ffn.norm", "ffn.moe_sum")
_BLOCK = 64  # of K
_MOST_PARTS = 32  # that a sum is cut into, or a diagnosis would take minutes


def _finer(scene: Scene, change: Round) -> Any:
    """Apply `change` to the unrounded output, then store it."""
    fine = with_facts(scene, unrounded_output)

    def apply(call: Any) -> Any:
        exact = fine(call)

        def faulty(inputs: Tensors, weights: Mapping[str, Any]) -> Any:
            known = call(inputs, weights)
            made = change(exact(inputs, weights)["out"].double())
            return {**known, "out": made.to(known["out"].dtype)}

        return faulty

    return apply


def _cut(x: Tensor) -> Tensor:
    """Truncate to BF16, towards zero."""
    codes = x.float().contiguous().view(torch.int32) & -65536
    return codes.view(torch.float32).double()


def _up(x: Tensor) -> Tensor:
    """Round up to the next BF16; half away from zero instead of half to even has no effect."""
    codes = (x.float().contiguous().view(torch.int32) + 65535) & -65536
    return codes.view(torch.float32).double()


def _through(dtype: torch.dtype, scale: float, x: Tensor) -> Tensor:
    if dtype is torch.float8_e4m3fn:
        return (x / scale).clamp(-448, 448).to(dtype).double() * scale
    return (x / scale).to(dtype).double() * scale


def _coarse_ways(scene: Scene) -> Iterator[Way]:
    for words, change in (
        ("an output that was E4M3 on its way", partial(_through, torch.float8_e4m3fn, 1.0)),
        ("an output that was E5M2 on its way", partial(_through, torch.float8_e5m2, 1.0)),
        ("an output cut off towards zero", _cut),
        ("an output rounded away from zero", _up),
    ):
        yield Way(words, _finer(scene, change))


def _small_ways(scene: Scene) -> Iterator[Way]:
    """Yield sums kept in FP16 before the scales are multiplied."""
    for words, power in (
        ("sums in FP16 in front of a scale of 2^-20", 2.0**-20),
        ("sums in FP16 in front of a scale of 2^-14", 2.0**-14),
        ("outputs below 2^-10 lost in FP16 behind a scale of 2^14", 2.0**14),
    ):
        yield Way(words, _finer(scene, partial(_through, torch.float16, power)))
    yield Way("sums in FP16 in front of the tensor scale", _before_the_scale(scene))


def _before_the_scale(scene: Scene) -> Any:
    """Round the sum as it is before its tensor scales are multiplied."""
    fine = with_facts(scene, unrounded)

    def apply(call: Any) -> Any:
        exact = fine(call)

        def faulty(inputs: Tensors, weights: Mapping[str, Any]) -> Any:
            known = call(inputs, weights)
            scale = 1.0
            for weight in weights.values():
                if weight.tensor_scale is not None:
                    scale = float(weight.tensor_scale.double().abs().max())
            given = inputs.get("tensor_scale")
            if given is not None:
                scale *= float(given.double().abs().max())
            made = _through(torch.float16, scale, exact(inputs, weights)["out"].double())
            return {**known, "out": made.to(known["out"].dtype)}

        return faulty

    return apply


def _kept(scene: Scene, dtype: torch.dtype, block: int | None) -> Any:
    """Add partial sums over blocks of K to a sum that is stored in `dtype`."""
    fine = with_facts(scene, unrounded)

    def apply(call: Any) -> Any:
        exact = fine(call)

        def faulty(inputs: Tensors, weights: Mapping[str, Any]) -> Any:
            known = call(inputs, weights)
            total = torch.zeros(known["out"].shape, dtype=torch.float64)
            facts = facts_of(exact)
            width = max(weight.shape[1] for weight in weights.values())
            size = max(block or -(-width // 2), -(-width // _MOST_PARTS))
            for begin in range(0, width, size):
                some = decoded(facts, inputs, weights, partial(_alone, begin, begin + size))
                total = (total + exact(some, weights)["out"].double()).to(dtype).double()
            return {**known, "out": total.to(known["out"].dtype)}

        return faulty

    return apply


def _alone(begin: int, end: int, x: Tensor) -> Tensor:
    """Return the input with all but some columns set to zero."""
    made = torch.zeros_like(x)
    made[..., begin:end] = x[..., begin:end]
    return made


def _sum_ways(scene: Scene) -> Iterator[Way]:
    for block in (_BLOCK, _BLOCK // 2):
        words = f"sums kept in BF16 from one {block} of K to the next"
        yield Way(words, _kept(scene, torch.bfloat16, block), {"k": block})
    yield Way("the two halves of K stored in BF16 and added", _kept(scene, torch.bfloat16, None))


def _if_near(
    ways: Callable[[Scene], Iterator[Way]], most: float
) -> Callable[[Scene, Sight], Iterator[Way]]:
    """Propose only if the difference is at most `most`, as rounding is; partial sums are costly."""

    def signature(scene: Scene, sight: Sight) -> Iterator[Way]:
        if length_of_difference(sight) <= most:
            yield from ways(scene)

    return signature


MODEL_FAULTS = (
    ModelFault(
        id="M40.coarse_output",
        title="An output passes through a coarser format, or is cut off",
        effect="noise beyond one rounding; small values, or all of them, lean to one side",
        remedy="Round once, to nearest even, to the dtype that is stored.",
        sits=lambda scene: scene.role in _ROUNDED,
        ways=_coarse_ways,
        signature=_if_near(_coarse_ways, 0.5),
    ),
    ModelFault(
        id="M40.small_accumulator",
        title="A sum is stored in FP16 in front of its scale",
        effect="large sums become infinite, or small ones vanish",
        remedy="Multiply by the scales in fp32 and convert last.",
        sits=lambda scene: scene.role in _LINEARS,
        ways=_small_ways,
        signature=from_ways(_small_ways),
    ),
    ModelFault(
        id="M40.short_sums",
        title="Partial sums over K are stored in 16 bits",
        effect="noise that grows with K",
        remedy="Keep accumulators and split-K workspaces in fp32.",
        sits=lambda scene: scene.role in _LINEARS,
        ways=_sum_ways,
        signature=_if_near(_sum_ways, 0.3),
    ),
)
