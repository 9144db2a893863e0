"""Run `degarble capture` under torchrun: each rank holds its shards only, and rank 0 joins them.

The model is sharded by tensor parallelism as vLLM shards it (harness.model.sharding). Sums over
ranks run after the component that they belong to. The joined capture is judged like any other.

Shardings that leave a rank padding are rejected, because a padded tensor is no part of ours. So are
kernels in place of components: those are not sharded.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import distributed

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch
from degarble.harness.capture.capture import CaptureSettings, CaptureSummary, capture
from degarble.harness.capture.engine.maps import (
    TERM,
    WHOLE,
    CapturedRankShare,
    ComponentMap,
    TensorLocation,
    partial_share,
)
from degarble.harness.capture.engine.ranks import join_ranks
from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.files.writer import require_free
from degarble.harness.inference.processes import process_group
from degarble.harness.model.parameters import shape_letters
from degarble.harness.model.sharding import plan, sharding_styles
from degarble.harness.model.sites import Port, Site
from degarble.harness.report.files import require_folder
from degarble.references.sharded import ShardedModel, Teams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from degarble.harness.capture.capture import Watch
    from degarble.harness.capture.files.records import CapturedTensor
    from degarble.harness.inference.model import OpenModel
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.sharding import ShardingPlan
    from degarble.references.binding import BoundModel

_HEADS = 1  # dimension of what has one part a head: [T, H, D] and [T, H * D] alike
_LAST = -1


class _Cut(NamedTuple):
    """A rank's share of a component's tensors: slots along a dimension, or none if it has all."""

    inputs: int = 0
    outputs: int = 0
    dim: int = _LAST
    terms: tuple[Port, ...] = ()


_QUANTISED = _Cut(1, 1)
# Of a role what no line names is whole on every rank.
_CUTS: Mapping[str, _Cut] = {
    "attn.wq_b": _Cut(outputs=1),
    "attn.q_head_norm_rope": _Cut(1, 1, _HEADS),
    "attn.rope": _Cut(1, 1, _HEADS),
    "attn.attend": _Cut(1, 1, _HEADS),
    "attn.inverse_rope": _Cut(1, 1, _HEADS),
    "attn.wo_a.act_quant": _QUANTISED,
    "attn.wo_a": _QUANTISED,
    "attn.wo_b.act_quant": _QUANTISED,
    "attn.wo_b": _Cut(1),
    "attn.wo.act_quant": _QUANTISED,
    "attn.wo": _Cut(1),
    "ffn.w13": _Cut(outputs=2),
    "ffn.act": _Cut(2, 1),
    "ffn.w2.act_quant": _QUANTISED,
    "ffn.w2": _Cut(1),
    "ffn.shared.w13": _Cut(outputs=2),
    "ffn.shared.act": _Cut(2, 1),
    "ffn.shared.w2.act_quant": _QUANTISED,
    "ffn.shared.w2": _Cut(1),
    "ffn.experts.w13": _Cut(outputs=2),
    "ffn.experts.act_quant": _Cut(2, 1),
    "ffn.experts.w2": _Cut(1, terms=(Port.OUT,)),
    "ffn.experts.combine": _Cut(terms=(Port.IN,)),
}
_CARRIED = frozenset({"x", "q", "out", "codes", "block_scale"})  # not positions, weights, scalars


def capture_over_ranks(
    source: Path,
    prompts: list[Any],
    folder: Path,
    watch: Watch,
    capture_settings: CaptureSettings | None = None,
    report: Callable[[int], None] = lambda _nbytes: None,
) -> CaptureSummary:
    """Run prompts on all ranks together; `folder` receives the one capture that they make."""
    capture_settings = capture_settings or CaptureSettings()
    if capture_settings.foreign:
        raise InvalidArgument(
            capture_settings.foreign[0].split()[0],
            " ".join(capture_settings.foreign),
            "the references, over several ranks",
            "Start one process. Kernels of a running engine: `capture --backend vllm`.",
        )
    require_free(folder)
    require_folder("--out", folder)
    with process_group():
        rank, world = distributed.get_rank(), distributed.get_world_size()
        places = [folder.with_name(f".{folder.name}.rank-{n}") for n in range(world)]
        shutil.rmtree(places[rank], ignore_errors=True)  # of a run that was interrupted
        try:
            silent = report if rank == 0 else (lambda _nbytes: None)
            summary = capture(
                source, prompts, places[rank], watch, _sharded(capture_settings, world), silent
            )
            distributed.barrier()
            if rank == 0:
                first = Capture.open(places[0])
                join_ranks(places, rank_component_maps(first, world), folder, first.facts)
            distributed.barrier()
        finally:
            shutil.rmtree(places[rank], ignore_errors=True)
    return replace(summary, folder=folder, capture=Capture.open(folder))


def _sharded(capture_settings: CaptureSettings, world: int) -> CaptureSettings:
    def share(model: OpenModel) -> BoundModel:
        sharding_plan = plan_over(model.config, world)
        teams = Teams.from_plan(sharding_plan)
        assert teams is not None, "every rank is one of the plan's"
        numerics = model.logits_model.bound.numerics
        recipe = model.recipe if model.arithmetic == "twin" else None
        return ShardedModel(sharding_plan, teams, numerics, model.checkpoint.weights, recipe).bound

    return replace(capture_settings, share=share)


def plan_over(config: Config, world: int) -> ShardingPlan:
    """Return the sharding plan of a model for this number of ranks."""
    cuts = sharding_styles(config)["vllm"].values()
    block = max((cut.multiple for cut in cuts if cut.padded), default=1)
    width = shape_letters(config)["I"] if block > 1 else 0
    if width % (block * world):
        raise ShapeMismatch(
            "moe_intermediate_size", width,
            f"a multiple of {block} times {world} ranks: engines pad the shared expert otherwise",
            "Choose another number of ranks for this model.",
        )  # fmt: skip
    return plan(config, tp=world)


def rank_component_maps(first: Capture, world: int) -> Iterable[ComponentMap]:
    """Return where the tensors of rank 0's components lie in the unsharded ones."""
    inputs: dict[str, dict[str, TensorLocation]] = {}
    outputs: dict[str, dict[str, TensorLocation]] = {}
    for call in first.calls:  # later calls may bring what the first one had not: a state
        cut = _CUTS.get(Site(call.component, Port.OUT).role, _Cut())
        for port, kept, found in (
            (Port.IN, call.inputs, inputs), (Port.OUT, call.outputs, outputs)
        ):  # fmt: skip
            found.setdefault(call.component, {}).update(_locations(cut, port, kept, world))
    return [ComponentMap(name, inputs[name], outputs[name]) for name in inputs]


def _locations(
    cut: _Cut, port: Port, kept: Mapping[str, CapturedTensor], world: int
) -> dict[str, TensorLocation]:
    slots = cut.inputs if port is Port.IN else cut.outputs
    found = {}
    for name, tensor in kept.items():
        share: CapturedRankShare = WHOLE
        if name in _CARRIED and port in cut.terms:
            share = TERM
        elif name in _CARRIED and slots and len(tensor.shape) > 1:
            extent = tensor.shape[cut.dim] * world // slots
            share = partial_share(*[extent] * slots, dim=cut.dim)
        found[name] = TensorLocation(str(port), share=share)
    return found
