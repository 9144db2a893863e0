"""Conversions: the registry, the job that plans and produces tensors, its configs and record."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import (
    InvalidArgument,
    LayoutMismatch,
    UnknownName,
    UnreadableFile,
)
from degarble.harness.base.files import read_small_file
from degarble.harness.checkpoint.read.types import LARGEST_CONFIG, shown
from degarble.harness.checkpoint.transform.configs import (
    CONVERSION,
    StoredFormat,
    companions,
    declared,
    recipe_of,
    stored_formats,
)
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
from degarble.harness.checkpoint.view.consumers import consumer_of
from degarble.harness.checkpoint.view.quantisation_configs import (
    CONFIG,
    HF_QUANT_CONFIG,
    fused_in_vllm,
)
from degarble.harness.checkpoint.view.view import fingerprints
from degarble.harness.checkpoint.write.plan import PlannedTensor
from degarble.harness.checkpoint.write.workers import run_each
from degarble.harness.checkpoint.write.writer import CompanionFiles
from degarble.harness.formats.number_formats import FP8_128X128_F32
from degarble.harness.model.config.config import V4Config
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.recipes import BF16, recipe_named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from degarble.harness.checkpoint.transform.units import Chunk, ConversionUnit
    from degarble.harness.checkpoint.view.view import Checkpoint, LogicalNames
    from degarble.harness.checkpoint.write.manifest import Manifest, ShardRecord
    from degarble.harness.checkpoint.write.plan import ShardPlan
    from degarble.harness.checkpoint.write.workers import Workers
    from degarble.harness.model.layouts import Layout


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
        files = _configs(self)
        copied, passed_over = companions(self.checkpoint.root, taken={CONFIG})
        files |= copied
        files[CONVERSION] = _json(_record(self) | {"files_not_copied": passed_over})
        if self.conversion.returns:
            files[SOURCE] = _source(self.checkpoint)
        return CompanionFiles(files, {"conversion": self.to})

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


# --------------------------------------------------------------------------------------------------
# The record of a conversion.
#
# conversion.json records the conversion, its options, and what was left out and why.
# conversion_source.json is written where the conversion can be undone.

SOURCE = "conversion_source.json"
SCHEMA = 1
_NVFP4 = "NVFP4"


def formats_after(job: ConversionJob) -> dict[str, StoredFormat]:
    """Return the format of each linear of a known model after a conversion."""
    names = job.checkpoint.names
    assert names is not None, "a known model"
    formats = stored_formats(names)
    for unit in job.units:
        formats |= {name: StoredFormat(word, scaled=False) for name, word in unit.formats.items()}
    return formats


def _configs(job: ConversionJob) -> dict[str, bytes]:
    raw = dict(job.checkpoint.config)
    if not raw:
        return {}
    raw.pop("quantization_config", None)
    model, names = job.checkpoint.model, job.checkpoint.names
    if model is None or names is None:
        kept = job.checkpoint.quantisation.get(CONFIG)
        return {CONFIG: _json(raw | ({"quantization_config": kept} if kept and job.copied else {}))}
    layout = layout_named("vllm", model) if job.conversion.whole else job.names.layout
    assert layout is not None, "a known model has a layout"
    formats = formats_after(job)
    _require_one_way(job, formats)
    recipe = recipe_of(formats, names)
    if isinstance(model, V4Config) and _has_fp8_experts(formats):
        raw["expert_dtype"], model = "fp8", replace(model, expert_dtype="fp8")
    if layout.suffixes == "compressed-tensors" and job.conversion.name != "bf16":
        layout = replace(layout, suffixes="huggingface")
    stated, beside = declared(model, layout.with_recipe(recipe))
    if stated and stated.get("quant_method") == "fp8":
        plain = _left_plain(formats, names, layout)
        stated |= {"modules_to_not_convert": plain} if plain else {}
        if beside and plain:
            beside["quantization"] |= {"modules_to_not_convert": plain}
    files = {CONFIG: _json(raw | ({"quantization_config": stated} if stated else {}))}
    return files | ({HF_QUANT_CONFIG: _json(beside)} if beside else {})


def _left_plain(
    formats: Mapping[str, StoredFormat], names: LogicalNames, layout: Layout
) -> list[str]:
    """List all BF16 linears, if quant_method fp8 alone would claim another format for some."""
    released = recipe_named("official", names.config)
    plain, stacks = [], set()
    for name, stored in formats.items():
        parameter = names.present[name]
        if layout.omits(parameter, names.config):
            continue
        path = layout.path_of(parameter, names.config)
        if stored.weight == BF16:
            plain.append((parameter, path))
        elif parameter.expert is not None:
            stacks.add(_stack(path))
    if all(released.format_of(parameter).weight == BF16 for parameter, _ in plain):
        return []
    told = (
        path if parameter.expert is None or _stack(path) in stacks else _stack(path)
        for parameter, path in plain
    )
    ignored = list(dict.fromkeys(told))
    # Stored fused, members have no tensors of their own, and vLLM asks for the fused name.
    return [*ignored, *(fused_in_vllm(names.config, ignored) if layout.fusions else ())]


def _stack(path: str) -> str:
    return path.partition(".experts.")[0] + ".experts"


def _has_fp8_experts(formats: Mapping[str, StoredFormat]) -> bool:
    """Return whether the decoder's experts are FP8, which V4's config states in a separate key."""
    return any(
        ".experts." in name and name.startswith("layers.") and each.weight == FP8_128X128_F32.name
        for name, each in formats.items()
    )


def _require_one_way(job: ConversionJob, formats: Mapping[str, StoredFormat]) -> None:
    """Raise where some NVFP4 weights have quantised activations and others have not."""
    made = [n for unit in job.units for n, word in unit.formats.items() if word == _NVFP4]
    scaled = [n for n, each in formats.items() if each.weight == _NVFP4 and each.scaled]
    if made and scaled:
        raise LayoutMismatch(
            f"NVFP4 weights after {job.to}",
            f"{len(made)} without input scales, such as {made[0]}, beside {len(scaled)} with them",
            "one or the other: engines read one kind of NVFP4 out of a config",
            "Use `degarble quantise --calibration` for all of them, or decode the others to BF16.",
        )


def _record(job: ConversionJob) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "to": job.to,
        "promise": job.conversion.promise,
        "options": job.options.told(job.conversion.options),
        "source_layout": str(job.checkpoint.layout),
        "written_for": _written_for(job),
        "converted": len(job.units),
        "copied": len(job.copied),
        "left_out": dict(Counter(job.left_out.values())),
    }


def _written_for(job: ConversionJob) -> str:
    model = job.checkpoint.model
    return "" if model is None else consumer_of(job.to, model.family).what


def _source(checkpoint: Checkpoint) -> bytes:
    """Describe the source in full, so that `back` needs nothing else."""
    files = {}
    for name in (CONFIG, HF_QUANT_CONFIG):
        path = checkpoint.root / name
        if path.is_file():
            files[name] = read_small_file(path, LARGEST_CONFIG).decode()
    tensors = {each.name: [each.dtype, list(each.shape)] for each in checkpoint.entries.values()}
    told = {"schema": SCHEMA, "files": files, "tensors": tensors}
    return (json.dumps(told, ensure_ascii=False) + "\n").encode()


def _json(value: object) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode()
