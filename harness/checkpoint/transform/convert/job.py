"""Conversions: the registry, the job that plans, produces and proves, its configs and record."""

from __future__ import annotations

import json
import secrets
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.base.errors import (
    InvalidArgument,
    LayoutMismatch,
    Refused,
    UnknownName,
    UnreadableFile,
)
from degarble.harness.base.files import read_small_file
from degarble.harness.checkpoint.read.types import LARGEST_CONFIG, StoredLayout, shown
from degarble.harness.checkpoint.transform.configs import (
    CONVERSION,
    StoredFormat,
    companions,
    declared,
    recipe_of,
    stored_formats,
)
from degarble.harness.checkpoint.transform.convert.deepgemm_wo_a import to_deepgemm_wo_a
from degarble.harness.checkpoint.transform.convert.dialect_configs import stated_configs
from degarble.harness.checkpoint.transform.convert.dialects import (
    DIALECTS,
    DialectPlan,
    to_dialect,
)
from degarble.harness.checkpoint.transform.convert.formats import (
    to_bf16,
    to_fp8_block,
    to_nvfp4,
    to_nvfp4_lossless,
)
from degarble.harness.checkpoint.transform.convert.integers import (
    SCHEMES,
    stated_integers,
    to_scheme,
)
from degarble.harness.checkpoint.transform.convert.vllm import to_fused_compressor, to_vllm
from degarble.harness.checkpoint.transform.pipeline import Transform
from degarble.harness.checkpoint.transform.units import (
    Conversion,
    ConversionOptions,
    ConversionProof,
    NameProof,
    TargetNames,
    TensorProof,
)
from degarble.harness.checkpoint.view.consumers import consumer_of, name_coverage
from degarble.harness.checkpoint.view.quantisation_configs import (
    CONFIG,
    HF_QUANT_CONFIG,
    fused_in_vllm,
)
from degarble.harness.checkpoint.view.view import Checkpoint, fingerprints
from degarble.harness.checkpoint.write.plan import PlannedTensor
from degarble.harness.checkpoint.write.workers import run_each
from degarble.harness.checkpoint.write.writer import CompanionFiles
from degarble.harness.model.family import family_of
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.recipes import BF16, recipe_named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from degarble.harness.checkpoint.transform.units import Chunk, ConversionUnit
    from degarble.harness.checkpoint.view.view import LogicalNames
    from degarble.harness.checkpoint.write.manifest import Manifest, ShardRecord
    from degarble.harness.checkpoint.write.plan import ShardPlan
    from degarble.harness.checkpoint.write.workers import Workers
    from degarble.harness.model.layouts import Layout


# --------------------------------------------------------------------------------------------------
# The registry: what `degarble convert --to` offers, with promise and options.

CONVERSIONS: Mapping[str, Conversion] = MappingProxyType(
    {
        conversion.name: conversion
        for conversion in (
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


# Of models without tables, whose linears alone are known.
OF_INTEGERS: Mapping[str, Conversion] = MappingProxyType(
    {
        name: Conversion(
            name,
            f"integers by group, value for value, as in {scheme.exporters}",
            (),
            partial(to_scheme, name),
        )
        for name, scheme in SCHEMES.items()
    }
)
OF_DIALECTS: Mapping[str, Conversion] = MappingProxyType(
    {
        name: Conversion(name, promise, ("tensor_scales",), partial(to_dialect, name))
        for name, promise in DIALECTS.items()
    }
)


def conversion_named(name: str) -> Conversion:
    """Return a conversion by name; an unknown name raises with the nearest known ones."""
    known = {**CONVERSIONS, **OF_INTEGERS, **OF_DIALECTS}
    if name not in known:
        raise UnknownName.among("conversion", name, known)
    return known[name]


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
        units = list(self._listed())
        if not units:
            raise InvalidArgument(
                f"what {self.to} would convert in {shown(str(self.source))}",
                "nothing",
                f"something to do: {self.conversion.promise}",
                _already(self.options.only)
                if self.checkpoint.model is not None or self.checkpoint.quantisation
                else "Of a model without tables here only quantised modules are converted, and this"
                " source has none: `degarble quantise` makes some.",
            )
        return tuple(
            sorted(
                units, key=lambda unit: min((position[name] for name in unit.sources), default=0)
            )
        )

    def _listed(self) -> Iterator[ConversionUnit]:
        if self.to in DIALECTS:
            return self.dialect.units(self.options)
        return self.conversion.units(self.checkpoint, self.options, self.names)

    @cached_property
    def dialect(self) -> DialectPlan:
        """The modules and scales of a conversion between dialects."""
        return DialectPlan(self.checkpoint, self.to)

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
        tensors: list[PlannedTensor] = []
        for name, entry in self.checkpoint.entries.items():
            if name in first:
                tensors.extend(first[name].tensors)
            elif name in kept:
                tensors.append(PlannedTensor(self.names.tensor(name), entry.dtype, entry.shape))
        return tuple(tensors)

    def plan_sources(self) -> dict[str, str]:
        """Return the conversion, its options and the fingerprints of the source."""
        facts = json.dumps(self.options.to_json(self.conversion.options), sort_keys=True)
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

    def prove(
        self,
        target: Path,
        *,
        workers: Workers = 1,
        progress: Callable[[int, str], None] | None = None,
    ) -> ConversionProof:
        """Compare a finished target with the source; nothing that writing remembered is used."""
        return prove(self.source, target, workers=workers, progress=progress)

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
    return ConversionJob(
        source, to, ConversionOptions.from_values(given or {}, conversion.options, to)
    )


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
        if job.to in SCHEMES:
            return {
                CONFIG: _json(
                    raw | {"quantization_config": stated_integers(job.checkpoint, job.to)}
                )
            }
        if job.to in DIALECTS:
            forms = {each.linear.module: each.form for each in job.dialect.chosen}
            told = stated_configs(job.checkpoint, job.to, forms)
            files = {CONFIG: _json(raw | {"quantization_config": told.config})}
            return files | ({HF_QUANT_CONFIG: _json(told.beside)} if told.beside else {})
        kept = job.checkpoint.quantisation.get(CONFIG)
        return {CONFIG: _json(raw | ({"quantization_config": kept} if kept and job.copied else {}))}
    layout = layout_named("vllm", model) if job.conversion.whole else job.names.layout
    assert layout is not None, "a known model has a layout"
    formats = formats_after(job)
    _require_one_way(job, formats)
    recipe = recipe_of(formats, names)
    experts = {
        stored_format.weight
        for name, stored_format in formats.items()
        if ".experts." in name and name.startswith("layers.")
    }
    stated_experts: Mapping[str, Any] = family_of(model).stated_experts(experts)
    raw |= stated_experts
    model = replace(model, **stated_experts)
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


def _require_one_way(job: ConversionJob, formats: Mapping[str, StoredFormat]) -> None:
    """Raise where some NVFP4 weights have quantised activations and others have not."""
    made = [n for unit in job.units for n, word in unit.formats.items() if word == _NVFP4]
    scaled = [
        n
        for n, stored_format in formats.items()
        if stored_format.weight == _NVFP4 and stored_format.scaled
    ]
    if made and scaled:
        raise LayoutMismatch(
            f"NVFP4 weights after {job.to}",
            f"{len(made)} without input scales, such as {made[0]}, and {len(scaled)} with them",
            "one or the other: engines read one kind of NVFP4 out of a config",
            "Use `degarble quantise --calibration` for all of them, or decode the others to BF16.",
        )


def _record(job: ConversionJob) -> dict[str, Any]:
    moved = {}
    if job.to in DIALECTS:
        moved = {"moved_scales": job.dialect.moved}
    return moved | {
        "schema": SCHEMA,
        "to": job.to,
        "promise": job.conversion.promise,
        "options": job.options.to_json(job.conversion.options),
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
    tensors = {
        entry.name: [entry.dtype, list(entry.shape)] for entry in checkpoint.entries.values()
    }
    fields = {"schema": SCHEMA, "files": files, "tensors": tensors}
    return (json.dumps(fields, ensure_ascii=False) + "\n").encode()


def _json(value: object) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode()


# --------------------------------------------------------------------------------------------------
# The proof of names: exactly those that the consumer reads.
#
# Correct values under wrong names are not loaded: transformers then leaves its own tensors random
# and reports it in one log line among many. The expected names follow from the config and the
# formats alone, never from the conversion's plan.


def prove_names(job: ConversionJob, output: Checkpoint) -> NameProof | None:
    """Compare the names of a target with those that its consumer reads."""
    names = job.checkpoint.names
    if names is None:
        return None
    formats = formats_after(job)
    consumer = consumer_of(job.to, names.config.family)
    packed = output.layout is StoredLayout.COMPRESSED_TENSORS
    recipe = recipe_of(formats, names)
    coverage = name_coverage(consumer, names.config, recipe, output.entries, packed=packed)
    if coverage is None:
        return None
    taken = {names.module_of(parameter) for parameter in names.present.values()}
    claimed = {entry.name for module in taken for entry in names.table.tensors(module)}
    extra = {job.names.tensor(name) for name in job.copied if name not in claimed}
    others: dict[str, int] = {}
    for stored_format in formats.values():
        if stored_format.weight not in consumer.formats:
            others[stored_format.weight] = others.get(stored_format.weight, 0) + 1
    return NameProof(
        consumer.what,
        len(output.entries) - len(coverage.unexpected) - coverage.passed_over,
        coverage.missing,
        tuple(name for name in coverage.unexpected if name not in extra),
        coverage.passed_over,
        tuple(name for name in coverage.unexpected if name in extra),
        others,
    )


# --------------------------------------------------------------------------------------------------
# The proof of values.
#
# Each unit compares its output: exactly where nothing is lost, within one rounding to the format
# elsewhere. Copied tensors are compared byte by byte. Separate faults are: a source tensor that
# reached nothing, a target tensor that no unit planned, a dtype or shape other than planned, and
# names that the consumer does not read. Nothing that the writing run remembered is
# used. Parts may be proven by several processes or machines. The target needs its conversion.json.

_COMPARED_BYTES = 16 << 20
_LEAST_PART = 64 << 20  # bytes: below it, handing out costs more than it spreads
_PROOF_PARTS = 256


class ProofPart(NamedTuple):
    """A range of units and a range of copied tensors that one worker proves at once."""

    units: tuple[int, int]
    copies: tuple[int, int]
    nbytes: int


@dataclass(frozen=True)
class _Kept:
    """The files that this process has opened for a proof."""

    by_key: dict[str, tuple[ConversionJob, Checkpoint]] = field(default_factory=dict)


_KEPT = _Kept()


def prove(
    source: Path,
    target: Path,
    *,
    workers: Workers = 1,
    progress: Callable[[int, str], None] | None = None,
) -> ConversionProof:
    """Compare a finished target with the source that it was converted from.

    `progress` is called with the number of compared bytes of the target.
    """
    job = job_of(source, target)
    with job.checkpoint, Checkpoint.open(target) as output:
        faults = tuple(_unbalanced(job, output))
        parts = parts_of(job)
        # Workers keep files open between parts. The key separates this proof from an earlier one.
        key = secrets.token_hex(8)
        work = partial(_proven, key, source, target)
        if isinstance(workers, int) and sum(part.nbytes for part in parts) < _LEAST_PART:
            workers = 1  # another process takes longer to start than this takes
        proofs: dict[ProofPart, list[TensorProof]] = {}
        try:
            for part, found in run_each(work, parts, workers, "proof of {0.units}".format):
                proofs[part] = found
                if progress:
                    progress(part.nbytes, "compared")
        finally:
            _forget()
        tensors = tuple(proof for part in parts for proof in proofs[part])
        named = prove_names(job, output)
        return ConversionProof(job.to, tensors, len(job.copied), faults, job.left_out, named)


def parts_of(job: ConversionJob) -> list[ProofPart]:
    """Cut the work into parts of about equal size, in the order of the source."""
    sizes = [sum(tensor.nbytes for tensor in unit.tensors) for unit in job.units]
    copies = [job.checkpoint.entry(name).nbytes for name in job.copied]
    room = max(_LEAST_PART, (sum(sizes) + sum(copies)) // _PROOF_PARTS)
    parts = [ProofPart(cut, (0, 0), nbytes) for cut, nbytes in _cut(sizes, room)]
    return parts + [ProofPart((0, 0), cut, nbytes) for cut, nbytes in _cut(copies, room)]


def _cut(sizes: Sequence[int], room: int) -> Iterator[tuple[tuple[int, int], int]]:
    begin = filled = 0
    for end, nbytes in enumerate(sizes, 1):
        filled += nbytes
        if filled >= room or end == len(sizes):
            yield (begin, end), filled
            begin, filled = end, 0


def _proven(key: str, source: Path, target: Path, part: ProofPart) -> list[TensorProof]:
    """Prove one part in any process; opened files are kept for the next part."""
    if key not in _KEPT.by_key:
        _forget()
        _KEPT.by_key[key] = job_of(source, target), Checkpoint.open(target)
    job, output = _KEPT.by_key[key]
    proofs: list[TensorProof] = []
    for unit in job.units[slice(*part.units)]:
        try:
            proofs.extend(unit.check(output))
        except Refused as error:
            text = f"cannot be read: {error}"
            proofs.append(TensorProof(unit.key, unit.sources, 0, 0, 0, "", None, (text,)))
    copied = (_copy(job, output, name) for name in job.copied[slice(*part.copies)])
    return proofs + [proof for proof in copied if proof]


def _forget() -> None:
    for job, output in _KEPT.by_key.values():
        job.checkpoint.close()
        output.close()
    _KEPT.by_key.clear()


def _unbalanced(job: ConversionJob, output: Checkpoint) -> Iterator[str]:
    planned = {tensor.name: (tensor.dtype, tensor.shape) for tensor in job.planned()}
    for name, (dtype, shape) in planned.items():
        entry = output.entries.get(name)
        if entry is None:
            yield f"{name} is missing"
        elif (entry.dtype, entry.shape) != (dtype, shape):
            found = f"{entry.dtype} {list(entry.shape)}"
            yield f"{name} is {found}, not {dtype} {list(shape)}"
    for name in output.entries:
        if name not in planned:
            yield f"{name} belongs to no conversion"


def _copy(job: ConversionJob, output: Checkpoint, source: str) -> TensorProof | None:
    """Compare a copied tensor byte by byte; None where it is the same."""
    entry, name = job.checkpoint.entry(source), job.names.tensor(source)
    if name not in output.entries or output.entry(name).nbytes != entry.nbytes:
        fault = ("not copied",)
        return TensorProof(name, (source,), entry.nbytes, 0, 0, "equal bytes", None, fault)
    chunks = (job.checkpoint.chunks(source, _COMPARED_BYTES), output.chunks(name, _COMPARED_BYTES))
    wrong = sum(ours != theirs for ours, theirs in zip(*chunks, strict=True))
    if not wrong:
        return None
    fault = (f"bytes differ from the source in {wrong} pieces of {_COMPARED_BYTES} bytes",)
    return TensorProof(name, (source,), entry.nbytes, wrong, wrong, "equal bytes", None, fault)
