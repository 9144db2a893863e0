"""Open a checkpoint of any layout as one lazy view, with its parameters by logical name.

Every error is an UnreadableFile with file and place. `Checkpoint.open` raises if files contradict
each other; `Checkpoint.survey` opens what can be read and lists the rest in `problems`, for audits.
Imports no torch, because a structure audit runs without it.
"""

from __future__ import annotations

import hashlib
import json
import os
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from degarble.harness.base.errors import (
    InvalidArgument,
    Refused,
    ShapeMismatch,
    UnknownName,
    UnreadableFile,
)
from degarble.harness.base.files import read_small_file, regular_file
from degarble.harness.checkpoint.read.file_access import MappedFiles
from degarble.harness.checkpoint.read.json_scan import ObjectScanner
from degarble.harness.checkpoint.read.safetensors_files import (
    INDEX_NAME,
    CheckpointFolder,
    CheckpointIndex,
    gather,
    list_folder,
    read_index,
    read_shards,
)
from degarble.harness.checkpoint.read.types import (
    LARGEST_CONFIG,
    MOST_TENSORS,
    ProblemKind,
    Problems,
    StoredLayout,
    TensorEntry,
    shown,
    unknown_name,
)
from degarble.harness.checkpoint.view.modules import ModuleTable, StoredForm
from degarble.harness.checkpoint.view.quantisation_configs import READ_METHODS
from degarble.harness.checkpoint.write.manifest import UNFINISHED, require_finished
from degarble.harness.model.config.json_file import config_from_dict
from degarble.harness.model.family import model_types
from degarble.harness.model.layouts import layouts_of
from degarble.harness.model.parameters import EXPERT, parameter_named, parameters
from degarble.harness.model.recipes import BF16, Recipe, Rule
from degarble.harness.model.tensors import PartKind, slots

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from degarble.harness.checkpoint.view.stored import StoredWeight
    from degarble.harness.formats.weight import Weight
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.layouts import Fusion, Layout
    from degarble.harness.model.parameters import Parameter
    from degarble.harness.model.types import Box


# --------------------------------------------------------------------------------------------------
# Logical names: the layout (spelling and fusion) that finds most of a checkpoint's names locates
# every parameter, as a module of its own or as a box in each tensor of a fused one. Formats and
# scales come from the stored modules, not from a recipe.


class ParameterLocation(NamedTuple):
    """The location of a parameter: the module that holds it, and its box of each part.

    `boxes` is None where the module holds nothing else.
    """

    parameter: Parameter
    form: StoredForm
    boxes: Mapping[PartKind, Box] | None


_OF_GGUF = (
    "Name the model's own folder of safetensors, from which the GGUF file was made, or let"
    " transformers decode it: AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=FILE)"
    ".save_pretrained(OUT)."
)


def _instead(root: Path, *, pickled: bool) -> str:
    """Return what to do about a folder without safetensors."""
    if any(root.glob("*.gguf")):
        return _OF_GGUF
    return _OF_PICKLED if pickled else "Name the folder that holds the model's shards."


@dataclass(frozen=True)
class LogicalNames:
    """The parameters of `config` found in the modules of `table`, as `layout` names them."""

    config: Config
    table: ModuleTable
    layout: Layout

    @cached_property
    def present(self) -> Mapping[str, Parameter]:
        """The parameters that have a tensor here, by logical name."""
        return MappingProxyType(
            {
                parameter.name: parameter
                for parameter in parameters(self.config)
                if not self.layout.omits(parameter, self.config)
                and self.module_of(parameter) in self.table.suffixes
            }
        )

    def module_of(self, parameter: Parameter) -> str:
        """Return the name of a parameter's module in this layout, whether it is present or not."""
        fusion = self._fusions.get(parameter.row.name)
        return self.layout.path_of(parameter, self.config, fusion.target if fusion else "")

    def is_fused(self, parameter: Parameter) -> bool:
        """Return whether this layout stores a parameter in a module that it shares with others."""
        return parameter.row.name in self._fusions

    def place(self, name: str) -> ParameterLocation:
        """Locate one parameter, with its shape checked against the config."""
        if name not in self.present:
            raise unknown_name("parameter in the checkpoint", name, self.present)
        parameter = self.present[name]
        form = self.table.form(self.module_of(parameter))
        fusion = self._fusions.get(parameter.row.name)
        boxes = None if fusion is None else self._boxes(parameter, fusion, form)
        if boxes is None and form.shape != parameter.shape:
            raise _shape_refused(parameter, form)
        return ParameterLocation(parameter, form, boxes)

    @cached_property
    def _fusions(self) -> Mapping[str, Fusion]:
        return {member: fusion for fusion in self.layout.fusions for member in fusion.members}

    def _boxes(
        self, parameter: Parameter, fusion: Fusion, form: StoredForm
    ) -> Mapping[PartKind, Box]:
        """Locate a member in a fused module by the layout's boxes for the format that was found."""
        block = parameter.block
        assert block is not None, "nothing outside blocks is fused"
        names = (member.replace(EXPERT, str(parameter.expert)) for member in fusion.members)
        members = [parameter_named(self.config, f"{block.prefix}.{name}") for name in names]
        weight = BF16 if form.format is None else form.format.name
        activation = weight if PartKind.INPUT_SCALE in form.parts and weight == "NVFP4" else BF16
        layout = self.layout.with_recipe(Recipe("as stored", (Rule("*", weight, activation),)))
        found = {}
        for slot in slots(self.config, layout, members):
            if slot.parameter.name == parameter.name and slot.part in form.parts:
                entry = form.parts[slot.part]
                inside = len(slot.box.ranges) == len(entry.shape) and all(
                    stop <= extent
                    for (_, stop), extent in zip(slot.box.ranges, entry.shape, strict=True)
                )
                if not inside:
                    raise _shape_refused(parameter, form)
                found[slot.part] = slot.box
        return MappingProxyType(found)


def _shape_refused(parameter: Parameter, form: StoredForm) -> ShapeMismatch:
    stored = {str(part): list(entry.shape) for part, entry in form.parts.items()}
    return ShapeMismatch(
        f"{parameter.name}, stored as {shown(form.module)}",
        f"{list(form.shape)}, stored {stored}",
        f"{list(parameter.shape)}, as the config implies",
        "Check that config and shards are of one model, and that no prefix was mixed up.",
    )


def logical_names(config: Config, table: ModuleTable) -> LogicalNames | None:
    """Choose the layout that finds most names; None where it finds less than half."""
    best, best_hits, asked = None, 0, 0
    # One expert stands for all: their names differ by number only.
    sample = [parameter for parameter in parameters(config) if parameter.expert in (None, 0)]
    for layout in _spellings(config):
        names = LogicalNames(config, table, layout)
        wanted = [parameter for parameter in sample if not layout.omits(parameter, config)]
        hits = sum(names.module_of(parameter) in table.suffixes for parameter in wanted)
        if hits > best_hits:
            best, best_hits, asked = names, hits, len(wanted)
    return best if best_hits * 2 > asked else None


def _spellings(config: Config) -> Iterator[Layout]:
    """Yield one layout for each combination of spelling and fusion."""
    seen = set()
    for layout in layouts_of(config).values():
        way = (layout.spelling, layout.fusions)
        if way not in seen:
            seen.add(way)
            yield layout


# --------------------------------------------------------------------------------------------------
# Opening: a stray shard, a link that leaves the folder, a wrong total size and pickled files are
# reported, and tolerated even by `Checkpoint.open`.

# Counts of things that are listed one by one; everything else in a config is a number to us.
_COUNTS = (
    "num_hidden_layers",
    "n_layers",
    "num_nextn_predict_layers",
    "n_mtp_layers",
    "n_routed_experts",
)
_LARGEST_COUNT = 10_000
_FLOATS = frozenset({"BF16", "F16", "F32", "F64"})
_OF_PICKLED = (
    "Convert pickled weights to safetensors with the tool that wrote them; they are never opened"
    " here, because unpickling runs code."
)


@dataclass(frozen=True)
class ShardFile:
    """One file of a checkpoint."""

    file: Path
    file_size: int
    data_begin: int
    metadata: Mapping[str, str]
    tensors: int


class Checkpoint:
    """A checkpoint on disk. Make it with open() or survey(); use it as a context, or close it."""

    def __init__(self, root: Path, problems: Problems) -> None:
        self.root = root
        self.problems = problems
        self.index: CheckpointIndex | None = None
        self.shards: tuple[ShardFile, ...] = ()
        self.entries: Mapping[str, TensorEntry] = {}
        self.config: Mapping[str, Any] = {}
        self.quantisation: Mapping[str, Mapping[str, Any]] = {}
        self.model: Config | None = None
        self.files = MappedFiles({})
        self.is_folder = True  # not one file by itself, which promises nothing around it

    @classmethod
    def open(cls, path: Path | str) -> Checkpoint:
        """Open a folder or one safetensors file; raise if files contradict each other."""
        return _Opener(Path(path), Problems(strict=True)).open()

    @classmethod
    def survey(cls, path: Path | str) -> Checkpoint:
        """Open what can be read; the rest is in `problems`. Raises only if there is no folder."""
        return _Opener(Path(path), Problems(strict=False)).open()

    def tensor(self, name: str) -> Tensor:
        """Return one stored tensor over the file's own pages; writes to it are not kept."""
        # torch takes 200 MB, and a structure audit needs none of it.
        from degarble.harness.checkpoint.view.stored import tensor_over  # noqa: PLC0415

        return tensor_over(self.entry(name), self.raw(name))

    def raw(self, name: str) -> memoryview:
        """Return the bytes of one stored tensor, without copying."""
        return self.files.raw(self.entry(name))

    def chunks(self, name: str, size: int = 16 << 20) -> Iterator[memoryview]:
        """Yield the bytes of one stored tensor in pieces; memory is released after each."""
        return self.files.chunks(self.entry(name), size)

    def entry(self, name: str) -> TensorEntry:
        """Look one stored tensor up by its own name."""
        if name not in self.entries:
            raise unknown_name("stored tensor", name, self.entries)
        return self.entries[name]

    @cached_property
    def table(self) -> ModuleTable:
        """The stored modules and their suffixes."""
        return ModuleTable(self.entries, tuple(self.quantisation.values()))

    @cached_property
    def layout(self) -> StoredLayout:
        """The conventions that the checkpoint follows as a whole."""
        return self.table.layout()

    @cached_property
    def names(self) -> LogicalNames | None:
        """The model's parameters among the modules; None without a known config or spelling."""
        return None if self.model is None else logical_names(self.model, self.table)

    def modules(self) -> tuple[str, ...]:
        """List the stored modules that hold a matrix or a stack: linears, embeddings, tables."""
        return tuple(name for name in self.table.suffixes if self.table.is_matrix(name))

    def form(self, module: str) -> StoredForm:
        """Infer how to decode one stored module: its parts, format, block size, direction."""
        return self.table.form(module)

    def stored(self, name: str) -> StoredWeight:
        """Find one weight, by its logical name or by the name of its stored module."""
        # torch takes 200 MB, and a structure audit needs none of it.
        from degarble.harness.checkpoint.view.stored import (  # noqa: PLC0415
            StoredWeight,
            tensor_over,
        )

        def read(entry: TensorEntry) -> Tensor:
            return tensor_over(entry, self.files.raw(entry))

        if self.names is not None and name in self.names.present:
            parameter, form, boxes = self.names.place(name)
            return StoredWeight(name, form, parameter.shape, boxes, read, self.files.release)
        form = self.form(name)
        return StoredWeight(name, form, form.shape, None, read, self.files.release)

    def weight(self, name: str) -> Weight:
        """Read one weight, by its logical name or by the name of its stored module."""
        return self.stored(name).weight()

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The weights by logical name, as references take them; empty without `names`."""
        from degarble.harness.checkpoint.view.stored import StoredWeights  # noqa: PLC0415  as above

        return StoredWeights(self.names.present if self.names else {}, self.weight)

    def named_by(self, model: Config | None) -> Checkpoint:
        """Return a view of the same files whose names follow another config."""
        if model is None or model == self.model:
            return self
        other = copy(self)
        other.__dict__.pop("names", None)
        other.model = model
        return other

    @cached_property
    def fingerprint(self) -> str:
        """Return the fingerprint of all files, computed at the first access."""
        text = json.dumps(fingerprints(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def once_more(self) -> Checkpoint:
        """Return another view of the same files, as their headers were read; its pages are own."""
        other = copy(self)
        other.files = MappedFiles({shard.file: shard.file_size for shard in self.shards})
        return other

    def release(self, name: str | None = None) -> None:
        """Release the memory of pages that were read: of one tensor, or of all."""
        self.files.release(None if name is None else self.entry(name))

    def close(self) -> None:
        """Make further reading an error; memory is freed with the last tensor that uses it."""
        self.files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Opener:
    """The steps that open one checkpoint."""

    def __init__(self, path: Path, problems: Problems) -> None:
        self._path = path
        self._problems = problems

    def open(self) -> Checkpoint:
        """Return the view."""
        single = self._path.is_file()
        root = self._path.parent if single else self._path
        checkpoint = Checkpoint(root, self._problems)
        checkpoint.is_folder = not single
        folder = CheckpointFolder((self._path,), (), ()) if single else list_folder(root)
        if not single:
            self._report_unfinished(root)
        self._report_pickled(folder)
        checkpoint.index = self._index(folder)
        if not folder.shards and checkpoint.index is None:
            if not single:
                require_finished(root)  # a run that ended before its first shard
            raise UnreadableFile(
                shown(str(root)),
                f"no safetensors file ({len(folder.pickled)} pickled ones)",
                "at least one .safetensors file",
                _instead(root, pickled=bool(folder.pickled)),
            )
        headers = list(read_shards(root, folder, checkpoint.index, self._problems))
        checkpoint.entries = MappingProxyType(gather(headers, checkpoint.index, self._problems))
        checkpoint.shards = tuple(
            ShardFile(
                header.file,
                header.file_size,
                header.data_begin,
                header.metadata,
                len(header.entries),
            )
            for header in headers
        )
        checkpoint.files = MappedFiles({header.file: header.file_size for header in headers})
        self._configs(checkpoint)
        return checkpoint

    def _report_unfinished(self, root: Path) -> None:
        try:
            require_finished(root)
        except UnreadableFile as error:
            self._problems.report(ProblemKind.UNFINISHED, UNFINISHED, None, error)

    def _report_pickled(self, folder: CheckpointFolder) -> None:
        for path in folder.pickled:
            error = UnreadableFile(
                shown(str(path)),
                path.suffix,
                "safetensors",
                "It is never opened: unpickling runs code. Remove it, or convert it elsewhere.",
            )
            self._problems.report(ProblemKind.UNPICKLED, path.name, None, error)

    def _index(self, folder: CheckpointFolder) -> CheckpointIndex | None:
        known = {path.name: path for path in folder.indices}
        path = known.get(INDEX_NAME) or (folder.indices[0] if len(known) == 1 else None)
        if path is None:
            return None
        try:
            return read_index(path, self._problems)
        except Refused as error:
            self._problems.report(ProblemKind.UNREADABLE_INDEX, path.name, None, error)
            return None

    def _configs(self, checkpoint: Checkpoint) -> None:
        root = checkpoint.root
        checkpoint.config = self._json(root / "config.json")
        found = {
            "config.json": checkpoint.config.get("quantization_config"),
            "hf_quant_config.json": self._json(root / "hf_quant_config.json").get("quantization"),
        }
        checkpoint.quantisation = {
            name: stated for name, stated in found.items() if isinstance(stated, dict)
        }
        for name in found.keys() - checkpoint.quantisation:
            self._require_no_quantisation(root / name, found[name])
        self._method(checkpoint)
        try:
            checkpoint.model = model_of(checkpoint.config)
        except Refused as error:
            place = f"{shown(str(root / 'config.json'))}: {error.name}"
            told = type(error)(place, error.value, error.expectation, error.remedy)
            self._problems.report(ProblemKind.UNREADABLE_CONFIG, "config.json", None, told)

    def _require_no_quantisation(self, path: Path, stated: object) -> None:
        """Report a statement that is no object: weights would be read as plain ones."""
        if stated is None:
            return
        error = InvalidArgument(
            f"quantization_config in {shown(str(path))}", stated, "a JSON object",
            "Write what the exporter stated, or remove it if the shards hold plain weights.",
        )  # fmt: skip
        self._problems.report(ProblemKind.UNREADABLE_CONFIG, path.name, None, error)

    def _method(self, checkpoint: Checkpoint) -> None:
        """Report a method that nobody here knows, where no codes show what it did."""
        method = checkpoint.quantisation.get("config.json", {}).get("quant_method")
        known = method is None or any(str(method).startswith(each) for each in READ_METHODS)
        matrices = (each.dtype for each in checkpoint.entries.values() if len(each.shape) > 1)
        if known or not _FLOATS.issuperset(matrices):
            return
        place = f"quant_method in {shown(str(checkpoint.root / 'config.json'))}"
        error = UnknownName(
            place, f"{shown(str(method))}, over plain weights", ", ".join(sorted(READ_METHODS)),
            "Remove quantization_config from config.json if the shards hold plain weights; if the"
            " method changes them while an engine loads, let it save the result.",
        )  # fmt: skip
        self._problems.report(ProblemKind.UNKNOWN_METHOD, "config.json", None, error)

    def _json(self, path: Path) -> dict[str, Any]:
        """Read one JSON object; a missing file is an empty one."""
        if not (path.exists() or path.is_symlink()):
            return {}
        try:
            scan = ObjectScanner(read_small_file(path, LARGEST_CONFIG), shown(str(path)))
            found = scan.value(LARGEST_CONFIG)
            scan.finish()
            if not isinstance(found, dict):
                scan.refuse("config", found, "a JSON object")
        except Refused as error:
            self._problems.report(ProblemKind.UNREADABLE_CONFIG, path.name, None, error)
            return {}
        else:
            return found


def model_of(config: Mapping[str, Any]) -> Config | None:
    """Return the config of a known family; None for another family, or without a config."""
    family = config.get("model_type")
    if not config or family not in (None, *model_types()):
        return None
    for key in _COUNTS:
        count = config.get(key)
        if isinstance(count, (int, float)) and count > _LARGEST_COUNT:
            raise _implausible(key, count, f"at most {_LARGEST_COUNT}")
    model = config_from_dict(dict(config))
    tensors = (model.num_hidden_layers + model.drafters) * 3 * getattr(model, "n_routed_experts", 1)
    if tensors > MOST_TENSORS:
        raise _implausible("layers and experts", tensors, f"at most {MOST_TENSORS} expert weights")
    found: Config = model
    return found


def _implausible(key: str, value: object, expectation: str) -> InvalidArgument:
    remedy = "No model has as many; see who wrote this config."
    return InvalidArgument(key, value, expectation, remedy)


# --------------------------------------------------------------------------------------------------
# Fingerprints, which a resumed run compares. Of each shard they cover its size, every entry of its
# header, and 64 windows of 4 KiB, spread evenly over its data, the first and the last included.
# Training steps, seeds and quantisers change bytes everywhere, so another model is detected; a few
# bytes edited between two windows are not. Reading all of 881 GB twice would cost more than the
# conversion; `degarble convert --prove` compares every byte.

WINDOWS = 64
WINDOW_BYTES = 4096
FINGERPRINT_COVERS = f"sizes, heads, and {WINDOWS} samples of {WINDOW_BYTES} bytes of each shard"


def fingerprints(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the fingerprint of each shard of a source, and of its config."""
    digests = {shard.file: _begun(shard) for shard in checkpoint.shards}
    for entry in checkpoint.entries.values():
        facts = (entry.name, entry.dtype, entry.shape, entry.begin, entry.end)
        digests[entry.file].update(repr(facts).encode())
    config = json.dumps(dict(checkpoint.config), sort_keys=True).encode()
    found = {file.name: digest.hexdigest() for file, digest in digests.items()}
    return found | {"config.json": hashlib.sha256(config).hexdigest()}


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return one fingerprint of a whole source."""
    return checkpoint.fingerprint


def _begun(shard: ShardFile) -> hashlib._Hash:
    digest = hashlib.sha256(f"{shard.file_size}\n".encode())
    for window in shard_samples(shard.file, shard.data_begin, shard.file_size):
        digest.update(window)
    return digest


def shard_samples(path: Path, begin: int, end: int) -> list[bytes]:
    """Read the windows of a file's data, or all of it if it is small."""
    room = end - begin - WINDOW_BYTES
    with regular_file(path) as (descriptor, _):
        if room <= WINDOWS * WINDOW_BYTES:
            return [os.pread(descriptor, end - begin, begin)]
        places = [begin + room * index // (WINDOWS - 1) for index in range(WINDOWS)]
        return [os.pread(descriptor, WINDOW_BYTES, place) for place in places]
