"""Run one conversion of the registry: plan it, produce tensors, write shards and configs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

from degarble.harness.base.errors import InvalidArgument, UnknownName, UnreadableFile
from degarble.harness.base.files import read_small_file
from degarble.harness.checkpoint.read.types import LARGEST_CONFIG, shown
from degarble.harness.checkpoint.transform.configs import CONVERSION, companion_files
from degarble.harness.checkpoint.transform.convert.deepgemm_wo_a import to_deepgemm_wo_a
from degarble.harness.checkpoint.transform.convert.formats import (
    to_bf16,
    to_fp8_block,
    to_nvfp4,
    to_nvfp4_lossless,
)
from degarble.harness.checkpoint.transform.convert.vllm import to_fused_compressor, to_vllm
from degarble.harness.checkpoint.transform.pipeline import Transform
from degarble.harness.checkpoint.transform.units import Conversion, ConversionOptions, TargetNames
from degarble.harness.checkpoint.view.view import fingerprints
from degarble.harness.checkpoint.write.plan import PlannedTensor
from degarble.harness.checkpoint.write.workers import run_each

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from degarble.harness.checkpoint.transform.units import Chunk, ConversionUnit
    from degarble.harness.checkpoint.write.manifest import Manifest, ShardRecord
    from degarble.harness.checkpoint.write.plan import ShardPlan
    from degarble.harness.checkpoint.write.workers import Workers
    from degarble.harness.checkpoint.write.writer import CompanionFiles


# --------------------------------------------------------------------------------------------------
# The registry: what `degarble convert --to` offers, with promise and options.

CONVERSIONS: Mapping[str, Conversion] = MappingProxyType(
    {
        each.name: each
        for each in (
            Conversion("bf16", "quantised linears decoded to BF16", ("only",), to_bf16),
            Conversion(
                "fp8-block",
                "linears in FP8, a decode scale for each 128x128 block",
                ("only", "scale"),
                to_fp8_block,
            ),
            Conversion(
                "nvfp4",
                "linears in NVFP4, weights alone (W4A16: no input scales)",
                ("only",),
                to_nvfp4,
            ),
            Conversion(
                "nvfp4-lossless",
                "MXFP4 linears as NVFP4, bit for bit, weights alone",
                ("only",),
                to_nvfp4_lossless,
                returns=True,
            ),
            Conversion(
                "deepgemm-wo-a",
                "wo_a in FP8 [g, r, d] with DeepGEMM's block scales",
                ("only", "gpu", "per", "direction"),
                to_deepgemm_wo_a,
                returns=True,
            ),
            Conversion(
                "fused-compressor",
                "each compressor's kv and gate projections in one BF16 tensor",
                ("only",),
                to_fused_compressor,
                returns=True,
            ),
            Conversion(
                "vllm",
                "vLLM's fused parameters, uncut (its loader splits them over ranks), experts as a"
                " backend's kernels read them",
                ("backend",),
                to_vllm,
                returns=True,
                whole=True,
            ),
        )
    }
)


def conversion_named(name: str) -> Conversion:
    """Return a conversion by name; an unknown name raises with the nearest known ones."""
    if name not in CONVERSIONS:
        raise UnknownName.among("conversion", name, CONVERSIONS)
    return CONVERSIONS[name]


# --------------------------------------------------------------------------------------------------
# Memory is a few panels of rows, whatever the size of the checkpoint. Tensors that no unit takes
# are copied; tensors left out are listed in conversion.json with the reason.
#
# A source whose files contradict each other, or two units that make one tensor, raise an error.

_FEW, _PARTS = 256, 64  # so few units are not worth a process; parts of more
GENERATION = "3"  # raise it when the same source and options give other bytes


@dataclass(frozen=True)
class ConversionJob(Transform):
    """A conversion of one source."""

    to: str
    options: ConversionOptions

    @property
    def conversion(self) -> Conversion:
        """The conversion, from the registry."""
        return conversion_named(self.to)

    @cached_property
    def names(self) -> TargetNames:
        """The names of the target's tensors; a whole layout of an engine has names of its own."""
        return TargetNames(None if self.conversion.whole else self.checkpoint.names, self.to)

    @cached_property
    def units(self) -> tuple[ConversionUnit, ...]:
        """The units of the conversion, in the source's order."""
        position = {name: place for place, name in enumerate(self.checkpoint.entries)}
        found = list(self.conversion.units(self.checkpoint, self.options, self.names))
        if not found:
            raise InvalidArgument(
                f"what {self.to} would convert in {shown(str(self.source))}",
                "nothing",
                f"something to do: {self.conversion.promise}",
                _already(self.options.only),
            )
        return tuple(
            sorted(
                found, key=lambda unit: min((position[name] for name in unit.sources), default=0)
            )
        )

    @cached_property
    def left_out(self) -> Mapping[str, str]:
        """The source tensors that are left out, with the reason."""
        return dict(pair for unit in self.units for pair in unit.left_out)

    @cached_property
    def copied(self) -> tuple[str, ...]:
        """The source tensors that no unit takes in or leaves out."""
        taken = {name for unit in self.units for name in unit.sources} | self.left_out.keys()
        return tuple(name for name in self.checkpoint.entries if name not in taken)

    def planned(self) -> tuple[PlannedTensor, ...]:
        """List the tensors of the target; converted ones stand at the place of their source."""
        making = [unit for unit in self.units if unit.tensors]
        # A unit's tensors take the place of its first source.
        first = {unit.sources[0]: unit for unit in making}
        assert len(first) == len(making), "units do not share a source"
        kept = set(self.copied)
        found: list[PlannedTensor] = []
        for name, entry in self.checkpoint.entries.items():
            if name in first:
                found.extend(first[name].tensors)
            elif name in kept:
                found.append(PlannedTensor(self.names.tensor(name), entry.dtype, entry.shape))
        return tuple(found)

    def plan_sources(self) -> dict[str, str]:
        """Return the conversion, its options and the fingerprints of the source."""
        facts = json.dumps(self.options.told(self.conversion.options), sort_keys=True)
        sources = {"conversion": f"{self.to} {GENERATION}", "options": facts}
        return sources | fingerprints(self.checkpoint)

    def produce(self, tensor: PlannedTensor) -> Iterator[Chunk]:
        """Yield the bytes of one planned tensor."""
        unit = self._makers.get(tensor.name)
        if unit is None:
            return self.checkpoint.chunks(self._origins.get(tensor.name, tensor.name))
        return unit.make(tensor)

    @cached_property
    def _origins(self) -> Mapping[str, str]:
        """Map the name of each copied tensor to its name in the source."""
        return {self.names.tensor(name): name for name in self.copied}

    @cached_property
    def _makers(self) -> Mapping[str, ConversionUnit]:
        return {tensor.name: unit for unit in self.units for tensor in unit.tensors}

    @cached_property
    def companions(self) -> CompanionFiles:
        """The files to write next to the shards."""
        return companion_files(self)

    def require(self, workers: Workers = 1) -> None:
        """Raise for what some unit cannot make, before anything is written."""
        asked = sum(unit.require is not None for unit in self.units)
        if not asked:
            return
        total = len(self.units)
        step = total if workers == 1 or asked < _FEW else -(-total // _PARTS)
        parts = [(begin, min(begin + step, total)) for begin in range(0, total, step)]
        for _ in run_each(self.require_of, parts, workers, "units {0[0]} to {0[1]}".format):
            pass

    def require_of(self, part: tuple[int, int]) -> None:
        """Raise for what the units of one part cannot make."""
        for unit in self.units[slice(*part)]:
            if unit.require:
                unit.require()


def _already(only: tuple[str, ...]) -> str:
    held = "Nothing needs to be done: the source holds it already"
    return f"{held}, or `only` should name other linears." if only else f"{held}."


def job_for(source: Path, to: str, given: Mapping[str, object] | None = None) -> ConversionJob:
    """Return a job from a conversion's name and its options."""
    conversion = conversion_named(to)
    return ConversionJob(source, to, ConversionOptions.of(given or {}, conversion.options, to))


def convert(
    source: Path,
    target: Path,
    to: str,
    given: Mapping[str, object] | None = None,
    *,
    workers: Workers = 1,
    progress: Callable[[ShardPlan, ShardRecord], None] | None = None,
) -> Manifest:
    """Convert the checkpoint at `source` into a new one at `target`."""
    return job_for(source, to, given).run(target, workers=workers, progress=progress)


def job_of(source: Path, target: Path) -> ConversionJob:
    """Return the job that wrote `target`, as its conversion.json describes it."""
    path = target / CONVERSION
    try:
        told = json.loads(read_small_file(path, LARGEST_CONFIG))
        to, given = told["to"], dict(told["options"])
        given = {key: tuple(v) if isinstance(v, list) else v for key, v in given.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableFile(
            shown(str(path)),
            f"{type(error).__name__}: {error}",
            "what a conversion writes",
            "Convert again: without it the promised names and values are unknown.",
        ) from error
    return job_for(source, to, given)
