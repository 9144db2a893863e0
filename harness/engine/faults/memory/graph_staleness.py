"""M36: a CUDA graph is replayed with the metadata or buffers of its capture.

Metadata that is allocated anew in every step is read at its address in the first step; a workspace
is not cleared between replays; an output is not written again (vllm issues 35175, 46329 and 44988).
The first call is exact. Stale values are recognised among those that the same place had in earlier
calls.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.model_faults import (
    ModelFault,
    Reach,
    Way,
    with_inputs,
    with_outputs,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import Scene, Sight

    Tensors = Mapping[str, Tensor]

_METADATA = ("positions", "chosen", "experts", "weights", "tokens")
_READERS = (
    "attn.q_head_norm_rope", "attn.kv_norm_rope", "attn.inverse_rope", "attn.rope",
    "attn.indexer.q", "attn.attend", "ffn.experts.w13", "ffn.experts.w2", "ffn.experts.combine",
)  # fmt: skip
_SPLIT = (
    "attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wkv_a", "attn.wo", "attn.wo_b", "attn.wo_a",
    "ffn.shared.w13", "ffn.shared.w2", "ffn.w13", "ffn.w2", "ffn.experts.combine", "ffn.gate",
)  # fmt: skip
_LATEST = 3  # earlier calls that are looked at


def _captured(name: str) -> Any:
    """Keep the first value of each shape, and pass it on in all later calls."""

    def apply(call: Any) -> Any:
        kept: dict[tuple[int, ...], Tensor] = {}

        def faulty(inputs: Tensors, weights: Mapping[str, Any]) -> Any:
            if name not in inputs:
                return call(inputs, weights)
            own = inputs[name]
            # By shape, as a serving engine captures one graph for each batch size.
            stale = kept.setdefault(tuple(own.shape), own.clone())
            return call({**inputs, name: stale}, weights)

        return faulty

    return apply


def _stale_ways(scene: Scene) -> Iterator[Way]:
    names = {each.name for each in scene.component.inputs}
    for name in _METADATA:
        # Trap: memory is cut by positions; with stale ones rows would be missing.
        if name in names and not (name == "positions" and scene.role == "attn.attend"):
            words = f"the {name} of the captured step in every later one"
            yield Way(words, _captured(name), {"input": name})


def _stale(scene: Scene, sight: Sight) -> Iterator[Way]:
    for way in _stale_ways(scene):
        name = str(way.where["input"])
        arrived, implied = sight.inputs.get(name), sight.implied.get(name)
        if arrived is None or implied is None or torch.equal(arrived, implied):
            continue
        for other in _latest(sight):
            old = other.inputs.get(name)
            if old is not None and torch.equal(old, arrived):
                words = f"the {name} of step {other.step}"
                change = with_inputs(partial(_given, name, old))
                yield Way(words, change, {"input": name, "step": other.step})
                break


def _latest(sight: Sight) -> list[Sight]:
    """Return the earlier calls, the captured one first."""
    return list(sight.earlier)


def _given(name: str, value: Tensor, inputs: Tensors) -> Tensors:
    return {**inputs, name: value}


def _carrying(change: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Change an output by that of the previous call of the same shape."""

    def apply(call: Any) -> Any:
        kept: dict[tuple[int, ...], Tensor] = {}

        def faulty(inputs: Tensors, weights: Mapping[str, Any]) -> Any:
            outputs = dict(call(inputs, weights))
            shape = tuple(outputs["out"].shape)
            if shape in kept:
                outputs["out"] = change(outputs["out"], kept[shape])
            kept[shape] = outputs["out"].clone()
            return outputs

        return faulty

    return apply


def _added(out: Tensor, before: Tensor) -> Tensor:
    return (out.double() + before.double()).to(out.dtype)


def _kept(_out: Tensor, before: Tensor) -> Tensor:
    return before.clone()


def _half_kept(out: Tensor, before: Tensor) -> Tensor:
    """Leave the second half of the columns as in the previous call."""
    half = out.shape[-1] // 2
    return torch.cat((out[..., :half], before[..., half:]), dim=-1)


_CARRIED = (
    ("a workspace that still holds the call before", _added),
    ("the output of the call before", _kept),
    ("the second half of columns of the call before", _half_kept),
)


def _carried_ways(_scene: Scene) -> Iterator[Way]:
    for words, change in _CARRIED:
        yield Way(words, _carrying(change))


def _carried(_scene: Scene, sight: Sight) -> Iterator[Way]:
    shape = sight.outputs["out"].shape
    same = [other for other in sight.earlier if other.outputs["out"].shape == shape]
    for other in same[::-1][:_LATEST]:
        for words, change in _CARRIED:
            made = with_outputs(partial(_changed, change, other.outputs["out"]))
            yield Way(f"{words}, of step {other.step}", made, {"step": other.step})


def _changed(
    change: Callable[[Tensor, Tensor], Tensor], before: Tensor, _inputs: Tensors, outputs: Tensors
) -> Tensors:
    if outputs["out"].shape != before.shape:
        return outputs
    return {**outputs, "out": change(outputs["out"], before)}


MODEL_FAULTS = (
    ModelFault(
        id="M36.metadata",
        title="A captured graph reads the metadata of the step that it was captured in",
        effect="the first step of a shape is exact; later ones take its positions or choices",
        remedy="Write metadata into persistent buffers that the graph knows.",
        sits=lambda scene: scene.role in _READERS,
        ways=_stale_ways,
        signature=_stale,
        reach=Reach.EDGE,
        per_call=True,
    ),
    ModelFault(
        id="M36.workspace",
        title="A workspace or an output of the call before is still there",
        effect="outputs hold what an earlier token produced",
        remedy="Clear workspaces inside the graph; write every output in every replay.",
        sits=lambda scene: scene.role in _SPLIT,
        ways=_carried_ways,
        signature=_carried,
        per_call=True,
    ),
)
