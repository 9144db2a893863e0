"""Quantise a checkpoint to ModelOpt's NVFP4 layout: plan the target, write shards, finish.

`plan_job` lists the target's tensors. `make_shard` writes one shard, in any process or on any
machine that reaches both folders. `finish_job` writes report and configs. `run_job` does it all.

Quantised activations need input scales, from a calibration or from a source that has them. Without
either the job raises an error, because an engine would run such a checkpoint with uninitialised
scales. `weight_only` leaves activations in BF16. The source must have every parameter (the drafter
excepted), in names that a layout spells, and no NVFP4 of another producer.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.base.errors import InvalidArgument, LayoutMismatch
from degarble.harness.base.input_files import read_small_file
from degarble.harness.checkpoint.read.file_access import SourceState
from degarble.harness.checkpoint.read.types import LARGEST_INDEX, shown
from degarble.harness.checkpoint.transform.configs_out import companions, config_files
from degarble.harness.checkpoint.transform.quantise.conversion_report import (
    REPORT,
    ShardFacts,
    report_bytes,
)
from degarble.harness.checkpoint.transform.quantise.producer import QuantisingProducer
from degarble.harness.checkpoint.transform.scale_search import ScaleRule
from degarble.harness.checkpoint.view.view import FINGERPRINT_COVERS, Checkpoint, fingerprint
from degarble.harness.checkpoint.write.disk import DISK, write_file
from degarble.harness.checkpoint.write.folder_overlap import require_apart
from degarble.harness.checkpoint.write.manifest import UNFINISHED, Manifest
from degarble.harness.checkpoint.write.plan import SHARD_BYTES, PlannedTensor, WritePlan
from degarble.harness.checkpoint.write.shard_writer import write_shard
from degarble.harness.checkpoint.write.writer import Ending, beginning, finish, make_shards
from degarble.harness.model.config.config import V4Config
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.parameters import parameters
from degarble.harness.model.recipes import (
    BF16,
    RECIPE_NAMES,
    Recipe,
    recipe_from_file,
    recipe_named,
)
from degarble.harness.model.tensors import slots

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from torch import Tensor

    from degarble.harness.checkpoint.transform.quantise.calibration import Calibration
    from degarble.harness.checkpoint.view.view import LogicalNames
    from degarble.harness.checkpoint.write.manifest import ShardRecord
    from degarble.harness.checkpoint.write.plan import ShardPlan
    from degarble.harness.checkpoint.write.worker_pool import Workers
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.layouts import Layout

GENERATION = "2"  # of the bytes below: raise it when the same job gives other ones
_NVFP4 = "NVFP4"
_NO_DRAFTER = "the recipe nvfp4-full says nothing of the drafter"


@dataclass(frozen=True)
class QuantiseJob:
    """All parameters that the bytes of the target depend on; it is pickled to other processes."""

    source: Path
    layout: Layout  # of the target, with its recipe
    scale_rule: ScaleRule = ScaleRule.AMAX
    lossless: bool = True  # take MXFP4 over exactly wherever its exponents allow
    calibration: Calibration | None = None


class Planned(NamedTuple):
    """The tensors that a job will write, and those of the source that it leaves out, with reasons.

    `unclaimed`: stored tensors that belong to no parameter of the model; nothing is made of them.
    """

    plan: WritePlan
    left_out: tuple[tuple[str, str], ...]
    unclaimed: tuple[str, ...] = ()
    state: SourceState | None = None  # of the source, before it was opened


@dataclass(frozen=True)
class _Kept:
    """The producer that this process uses, kept between shards."""

    by_key: dict[tuple[Path, str], QuantisingProducer] = field(default_factory=dict)


_KEPT = _Kept()


def recipe_for(name: str, config: Config) -> Recipe:
    """Return a built-in recipe, or read a custom one from a YAML file."""
    if name in RECIPE_NAMES or not name.endswith((".yaml", ".yml")):
        return recipe_named(name, config)
    return recipe_from_file(Path(name), config)


def weight_only(recipe: Recipe) -> Recipe:
    """Return the recipe with BF16 activations before NVFP4 weights."""
    rules = tuple(
        replace(rule, activation=BF16) if rule.activation == _NVFP4 else rule
        for rule in recipe.rules
    )
    return Recipe(recipe.name, rules)


def target_layout(config: Config, recipe: Recipe) -> Layout:
    """Return the names of a recipe's checkpoints: those of the release, which engines read.

    No loader reads V4 in transformers' own names: it stacks experts in its memory and has no
    names for single ones. V4 with NVFP4 throughout has no format for the drafter.
    """
    layout = layout_named("official", config).with_recipe(recipe)
    full = recipe.name == "nvfp4-full" and isinstance(config, V4Config)
    return replace(layout, no_drafter=_NO_DRAFTER) if full else layout


def plan_job(job: QuantiseJob, *, shard_bytes: int = SHARD_BYTES) -> Planned:
    """Plan the target; raise where the source lacks what the recipe needs."""
    state = SourceState.of(job.source)
    with Checkpoint.open(job.source) as source:
        config, names = source.model, source.names
        if config is None or names is None:
            raise LayoutMismatch(
                f"names of {shown(str(job.source))}",
                "a config or names that no layout spells",
                "a DeepSeek-V4 or V3.2 checkpoint in a known spelling, with its config.json",
                "Convert its names first; `degarble audit` tells which are unknown.",
            )
        left_out = _left_out(job, config, names.present)
        absent = {name for name, _ in left_out}
        chosen = [each for each in parameters(config) if each.name not in absent]
        tensors = [
            PlannedTensor(slot.tensor, str(slot.dtype), slot.shape, slot.parameter.name)
            for slot in slots(config, job.layout, chosen)
        ]
        plan = WritePlan.of(tensors, shard_bytes=shard_bytes, sources=_sources(job, source))
        QuantisingProducer(source, job).check(chosen)
        return Planned(plan, left_out, _unclaimed(source, names), state)


def _unclaimed(source: Checkpoint, names: LogicalNames) -> tuple[str, ...]:
    """Return the stored tensors that no parameter explains."""
    modules = {names.module_of(parameter) for parameter in names.present.values()}
    claimed = {e.name for module in modules for e in source.form(module).parts.values()}
    return tuple(sorted(source.entries.keys() - claimed))


def _left_out(
    job: QuantiseJob, config: Config, present: Collection[str]
) -> tuple[tuple[str, str], ...]:
    """Return the parameters that the target leaves out; a source may only lack a drafter."""
    left_out, missing = [], []
    for parameter in parameters(config):
        reason = job.layout.omits(parameter, config)
        if parameter.name not in present:
            if parameter.block and parameter.block.is_drafter:
                reason = reason or "the source has no drafter"
            else:
                missing.append(parameter.name)
        if reason:
            left_out.append((parameter.name, reason))
    if missing:
        raise InvalidArgument(
            f"parameters in {shown(str(job.source))}",
            f"{len(missing)} missing, such as {missing[0]}",
            "every parameter that the config implies",
            "Run `degarble audit` on it; a part of a model cannot be quantised.",
        )
    return tuple(left_out)


def make_shard(job: QuantiseJob, target: Path, shard: ShardPlan) -> ShardRecord:
    """Write one shard of a target that was begun, and its facts for the report next to it."""
    producer = _producer_of(job, shard.plan)
    producer.facts = ShardFacts()
    last = shard.tensors[-1].name

    def produce(tensor: PlannedTensor) -> Iterator[Tensor]:
        yield from producer(tensor)
        if tensor.name == last:  # durable before the shard appears, so a shard is never without
            write_file(_facts_file(target, shard), producer.facts.to_bytes(), DISK)

    try:
        return write_shard(target, shard, produce)
    except BaseException:
        _forget()  # the next run in this process opens the source anew: it may have been mended
        raise


def finish_job(job: QuantiseJob, target: Path, planned: Planned) -> Manifest:
    """Write report, configs and companions, and declare the checkpoint complete."""
    path = target / REPORT
    _require_unchanged(planned)
    with Checkpoint.open(job.source) as source:
        assert source.model is not None, "plan_job has asked"
        files = config_files(source.model, job.layout, source.config)
        copied, passed_over = companions(job.source, taken=files)
        if path.exists():
            files[REPORT] = read_small_file(path, LARGEST_INDEX)
        else:
            told = _told(job, planned) | {"files_not_copied": passed_over}
            facts = [_facts_of(job, target, shard) for shard in planned.plan.shards]
            files[REPORT] = report_bytes(told, facts)
    _require_unchanged(planned)  # configs and companions were read just now
    if not path.exists():
        write_file(path, files[REPORT], DISK)
    for shard in planned.plan.shards:
        _facts_file(target, shard).unlink(missing_ok=True)
    _forget()
    return finish(target, planned.plan, Ending({**copied, **files}))


def _require_unchanged(planned: Planned) -> None:
    if planned.state is not None:
        planned.state.require_unchanged()


def run_job(
    job: QuantiseJob,
    target: Path,
    *,
    workers: Workers = 1,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[ShardPlan, ShardRecord], None] | None = None,
    planned: Planned | None = None,
) -> Manifest:
    """Quantise everything, or resume an interrupted run."""
    require_apart(job.source, target)
    planned = planned or plan_job(job, shard_bytes=shard_bytes)
    work = partial(make_shard, job, target)
    with beginning(target, planned.plan):
        make_shards(target, planned.plan, work, workers, source=planned.state, progress=progress)
    return finish_job(job, target, planned)


def _producer_of(job: QuantiseJob, key: str) -> QuantisingProducer:
    """Return this process's producer; the source is opened once a process, not once a shard."""
    kept = job.source, key  # equal sources in two folders have one plan
    if kept not in _KEPT.by_key:
        _forget()
        _KEPT.by_key[kept] = QuantisingProducer(Checkpoint.open(job.source), job)
    return _KEPT.by_key[kept]


def _forget() -> None:
    for each in _KEPT.by_key.values():
        each.close()
    _KEPT.by_key.clear()


def _facts_file(target: Path, shard: ShardPlan) -> Path:
    return target / UNFINISHED / f"{shard.file}.facts"


def _facts_of(job: QuantiseJob, target: Path, shard: ShardPlan) -> ShardFacts:
    """Read the facts that make_shard wrote; compute them again if missing or changed."""
    path = _facts_file(target, shard)
    if path.exists():
        known = ShardFacts.from_bytes(read_small_file(path, LARGEST_INDEX))
        if known is not None:
            return known
    producer = _producer_of(job, shard.plan)
    producer.facts = ShardFacts()
    for tensor in shard.tensors:
        for _ in producer(tensor):
            pass
    return producer.facts


def _told(job: QuantiseJob, planned: Planned) -> dict[str, Any]:
    recipe = job.layout.recipe
    return {
        "source": job.source.name,
        "source_fingerprint": planned.plan.sources["source"],
        "source_fingerprint_covers": FINGERPRINT_COVERS,
        "recipe": recipe.name if isinstance(recipe, Recipe) else recipe,
        "scale_rule": str(job.scale_rule),
        "dialect": "modelopt",
        "calibration": planned.plan.sources["calibration"],
        "bytes": planned.plan.data_bytes,
        "tensors": planned.plan.tensors,
        "left_out": [{"parameter": name, "reason": reason} for name, reason in planned.left_out],
        "unclaimed": list(planned.unclaimed),
    }


def _sources(job: QuantiseJob, source: Checkpoint) -> dict[str, str]:
    """Return everything that the bytes depend on, for the plan."""
    calibration = job.calibration
    return {
        "quantise": GENERATION,
        "source": fingerprint(source),
        "layout": hashlib.sha256(repr(job.layout).encode()).hexdigest(),
        "scale_rule": str(job.scale_rule),
        "lossless": str(job.lossless),
        "calibration": "none" if calibration is None else calibration.fingerprint,
    }
