"""Open a checkpoint of any layout as one lazy view: folder or file, index, headers, configs.

Every error is an UnreadableFile with file and place. `Checkpoint.open` raises if files contradict
each other; `Checkpoint.survey` opens what can be read and lists the rest in `problems`, for audits.
A stray shard, a link that leaves the folder, a wrong total size and pickled files are reported and
tolerated by both.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from degarble.harness.base.errors import InvalidArgument, Refused, UnreadableFile
from degarble.harness.base.input_files import read_small_file
from degarble.harness.checkpoint.read.index import (
    INDEX_NAME,
    Folder,
    Index,
    gather,
    look_into,
    read_index,
    read_shards,
)
from degarble.harness.checkpoint.read.json_scan import ObjectScanner
from degarble.harness.checkpoint.read.mapped import MappedFiles
from degarble.harness.checkpoint.read.types import (
    LARGEST_CONFIG,
    MOST_TENSORS,
    Layout,
    ProblemKind,
    Problems,
    TensorEntry,
    shown,
    unknown_name,
)
from degarble.harness.checkpoint.view.logical import LogicalNames, logical_names
from degarble.harness.checkpoint.view.modules import ModuleTable, StoredForm
from degarble.harness.checkpoint.write.manifest import UNFINISHED, require_finished
from degarble.harness.model.config.json_file import ARCHITECTURES, config_from_dict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from degarble.harness.checkpoint.view.stored import StoredWeight
    from degarble.harness.formats.weight import Weight
    from degarble.harness.model.config.config import Config


# Counts of things that are listed one by one; everything else in a config is a number to us.
_COUNTS = (
    "num_hidden_layers",
    "n_layers",
    "num_nextn_predict_layers",
    "n_mtp_layers",
    "n_routed_experts",
)
_LARGEST_COUNT = 10_000
_OF_PICKLED = (
    "Convert pickled weights to safetensors with the tool that wrote them; they are never opened"
    " here, because unpickling runs code."
)


@dataclass(frozen=True)
class Shard:
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
        self.index: Index | None = None
        self.shards: tuple[Shard, ...] = ()
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
        from degarble.harness.checkpoint.read.tensors import tensor_over  # noqa: PLC0415

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
        return ModuleTable(self.entries)

    @cached_property
    def layout(self) -> Layout:
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
        from degarble.harness.checkpoint.read.tensors import tensor_over  # noqa: PLC0415
        from degarble.harness.checkpoint.view.stored import StoredWeight  # noqa: PLC0415

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
        from degarble.harness.checkpoint.view.stored import Weights  # noqa: PLC0415  as above

        return Weights(self.names.present if self.names else {}, self.weight)

    def named_by(self, model: Config | None) -> Checkpoint:
        """Return a view of the same files whose names follow another config."""
        if model is None or model == self.model:
            return self
        other = copy(self)
        other.__dict__.pop("names", None)
        other.model = model
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
        folder = Folder((self._path,), (), ()) if single else look_into(root)
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
                _OF_PICKLED if folder.pickled else "Name the folder that holds the model's shards.",
            )
        headers = list(read_shards(root, folder, checkpoint.index, self._problems))
        checkpoint.entries = MappingProxyType(gather(headers, checkpoint.index, self._problems))
        checkpoint.shards = tuple(
            Shard(each.file, each.file_size, each.data_begin, each.metadata, len(each.entries))
            for each in headers
        )
        checkpoint.files = MappedFiles({each.file: each.file_size for each in headers})
        self._configs(checkpoint)
        return checkpoint

    def _report_unfinished(self, root: Path) -> None:
        try:
            require_finished(root)
        except UnreadableFile as error:
            self._problems.report(ProblemKind.UNFINISHED, UNFINISHED, None, error)

    def _report_pickled(self, folder: Folder) -> None:
        for path in folder.pickled:
            error = UnreadableFile(
                shown(str(path)),
                path.suffix,
                "safetensors",
                "It is never opened: unpickling runs code. Remove it, or convert it elsewhere.",
            )
            self._problems.report(ProblemKind.UNPICKLED, path.name, None, error)

    def _index(self, folder: Folder) -> Index | None:
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
        try:
            checkpoint.model = model_of(checkpoint.config)
        except Refused as error:
            place = f"{shown(str(root / 'config.json'))}: {error.name}"
            told = type(error)(place, error.value, error.expectation, error.remedy)
            self._problems.report(ProblemKind.UNREADABLE_CONFIG, "config.json", None, told)

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
    if not config or family not in (None, *ARCHITECTURES):
        return None
    for key in _COUNTS:
        count = config.get(key)
        if isinstance(count, (int, float)) and count > _LARGEST_COUNT:
            raise _implausible(key, count, f"at most {_LARGEST_COUNT}")
    model = config_from_dict(dict(config))
    tensors = (model.num_hidden_layers + model.drafters) * 3 * model.n_routed_experts
    if tensors > MOST_TENSORS:
        raise _implausible("layers and experts", tensors, f"at most {MOST_TENSORS} expert weights")
    return model


def _implausible(key: str, value: object, expectation: str) -> InvalidArgument:
    remedy = "No model has as many; see who wrote this config."
    return InvalidArgument(key, value, expectation, remedy)
