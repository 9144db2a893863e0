"""M03: matrices fused into one share one tensor scale, though each part has its own.

A loader that keeps the first, the largest or the smallest of several scales leaves the block scales
of the other parts as they are (vllm issues 47515 and 54974, TensorRT-LLM issues 14199 and 12240).
The other parts are wrong by the ratio of two scales, own over kept, which identifies the cause.
Without effect if all parts have one scale, as gate and up in ModelOpt's exports.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.faults.weight_faults import Words, has_tensor_scale, weight_fault
from degarble.harness.engine.faults.weight_regions import expert_of, matrices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import ModelFault, Scene
    from degarble.harness.engine.faults.weight_faults import Change, Kept
    from degarble.harness.formats.weight import Weight

    Keep = Callable[[Tensor], Tensor]

# Serving engines fuse these into one matrix: vLLM's fused_wqa_wkv.
_PARTNERS = {"attn.wq_a": ("attn.wkv", "attn.wkv_a"), "attn.wkv": ("attn.wq_a",)}
_PARTNERS["attn.wkv_a"] = ("attn.wq_a",)


def _fused_with(scene: Scene, name: str) -> Iterator[Weight]:
    """Return the weights that share one matrix with a weight, itself included, in order of rows."""
    if name in _PARTNERS:
        prefix = scene.name.removesuffix(scene.role)
        found = [scene.sibling(prefix + other) for other in _PARTNERS[name]]
        partners = [each.weights[each.role] for each in found if each is not None]
        first = name == "attn.wq_a"
        yield from ((scene.weights[name], *partners) if first else (*partners, scene.weights[name]))
        return
    number = expert_of(name)
    yield from (scene.weights[each] for each in matrices(scene) if expert_of(each) == number)


def _all_experts(scene: Scene, name: str) -> Iterator[Weight]:
    part = name.rpartition(".")[2]
    yield from (scene.weights[n] for n in matrices(scene) if n.rpartition(".")[2] == part)


def _kept_scale(group: Callable[[Scene, str], Iterator[Weight]], keep: Keep) -> Change:
    def change(scene: Scene, name: str, weight: Weight) -> Weight | None:
        if weight.tensor_scale is None or weight.tensor_scale.ndim:
            return None
        scales = [each.tensor_scale for each in group(scene, name)]
        known = torch.stack([each.reshape(()) for each in scales if each is not None])
        return replace(weight, tensor_scale=keep(known), _decoded={})

    return change


_KEPT: tuple[tuple[str, str, Keep], ...] = (
    ("first", "the first", lambda scales: scales[0]),
    ("largest", "the largest", lambda scales: scales.amax()),
    ("smallest", "the smallest", lambda scales: scales.amin()),
)


def _of_parts(kept: Kept) -> bool:
    fused = kept.name in _PARTNERS or kept.role.rpartition(".")[2] in {"w13", "proj"}
    return has_tensor_scale(kept) and fused


def _of_experts(kept: Kept) -> bool:
    return has_tensor_scale(kept) and kept.routed


def _fault(variant: str, which: str, keep: Keep, *, experts: bool) -> ModelFault:
    of = "experts" if experts else "fused parts"
    words = Words(
        f"M03.{'experts_' if experts else ''}{variant}",
        f"All {of} are decoded with {which} of their tensor scales",
        "each one is wrong by the ratio of two scales",
        "Keep one scale each, or quantise all of them with one; never choose among stored ones.",
        f"{which} tensor scale of all {of} on",
    )
    group = _all_experts if experts else _fused_with
    return weight_fault(words, _kept_scale(group, keep), _of_experts if experts else _of_parts)


MODEL_FAULTS = (
    *(_fault(variant, which, keep, experts=False) for variant, which, keep in _KEPT),
    *(_fault(variant, which, keep, experts=True) for variant, which, keep in _KEPT),
)
