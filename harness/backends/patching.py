"""`--patch FILE.py`: run a user's `patch(candidate)` on a model before it is captured.

`candidate.weights[name]` is a record with the fields `codes`, `block_scale`, `tensor_scale`,
`input_scale`, `value`: a copy, which may be replaced as a whole, by field, or written into. A name
is a parameter's (`layers.3.attn.wq_b`) or that of a stored tensor. `candidate.components[name]` is
a replaceable callable of inputs and weights. Replacements are recorded in the manifest, with the
hash of the file. The file is executed as code, so it is accepted from the command line only.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from importlib.abc import SourceLoader
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.backends.pairings import failed, replace_call
from degarble.harness.base.errors import DegarbleError, InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.base.files import read_small_file
from degarble.harness.formats.quantise import QuantisedTensor
from degarble.harness.formats.weight import DerivedWeight, Weight

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.references.binding import BoundModel

LARGEST_PATCH = 16 << 20
FIELDS = ("codes", "block_scale", "tensor_scale", "input_scale", "value")


@dataclass(frozen=True)
class Patched:
    """What a patch changed, for the manifest: parameters with their replaced fields, components."""

    file: str
    sha256: str
    weights: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    components: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return the record as plain data."""
        return {
            "file": self.file,
            "sha256": self.sha256,
            "weights": {name: list(weight) for name, weight in self.weights.items()},
            "components": list(self.components),
        }

    def lines(self) -> list[str]:
        """Return the record as one line of text."""
        done = [*self.weights, *self.components]
        text = ", ".join(done[:6]) + (", ..." if len(done) > 6 else "")
        return [f"Patched by {self.file}: {text or 'nothing was replaced'}"]


class Candidate:
    """The argument of a patch: weights and components of the model that is about to run."""

    def __init__(
        self, bound: BoundModel, source: Mapping[str, Weight], stored: Mapping[str, str]
    ) -> None:
        self.weights = CandidateWeights(source, stored)
        self.components = CandidateComponents(bound)


class CandidateWeights(MutableMapping[str, Weight]):
    """Records of all parameters; a record is kept once it is read, so that it can be changed.

    `stored` gives the parameter of each stored module that holds one alone.
    """

    def __init__(self, source: Mapping[str, Weight], stored: Mapping[str, str]) -> None:
        self._source = source
        self._stored = stored
        self._taken: dict[str, tuple[Weight, dict[str, tuple[Tensor | None, int]]]] = {}
        self._copied_whole: set[str] = set()

    def __getitem__(self, key: str) -> Weight:
        name = self._name(key)
        if name not in self._taken:
            own = _copied(self._source[name])
            self._taken[name] = (own, _versions(own))
        return self._taken[name][0]

    def __setitem__(self, key: str, record: Any) -> None:
        name = self._name(key)
        if isinstance(record, QuantisedTensor):
            record = Weight.of(record, self[name].input_scale)
        elif isinstance(record, torch.Tensor):
            record = Weight(value=record, input_scale=self[name].input_scale)
        if not isinstance(record, Weight):
            raise InvalidArgument(
                f"candidate.weights[{key!r}]", type(record).__name__,
                "a record of weights, a QuantisedTensor or a tensor",
                "Replace a field: candidate.weights[name].codes = ...",
            )  # fmt: skip
        self._taken[name] = (record, _versions(record))
        self._copied_whole.add(name)

    def __delitem__(self, key: str) -> None:
        raise InvalidArgument(
            f"candidate.weights[{key!r}]", "deleted", "a parameter that is replaced",
            "A model needs all of its parameters; put zeros there.",
        )  # fmt: skip

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)

    def changed(self) -> dict[str, tuple[str, ...]]:
        """Return parameters with their changed fields; raise if a record is inconsistent."""
        found = {}
        for name, (record, before) in self._taken.items():
            shape = tuple(self._source[name].shape)
            names = FIELDS if name in self._copied_whole else _written(record, before)
            if not names:
                continue
            _require_fitting(name, record, shape)
            found[name] = tuple(names)
        return found

    def record(self, name: str) -> Weight:
        """Return the record that replaces a parameter's."""
        return self._taken[name][0]

    def _name(self, key: str) -> str:
        """Return a parameter's name, given that name or a stored tensor's."""
        parent = key.rpartition(".")[0]
        for name in (key, self._stored.get(key), parent, self._stored.get(parent)):
            if name is not None and name in self._source:
                return name
        raise UnknownName.among("candidate.weights", key, {*self._source, *self._stored})


class CandidateComponents(MutableMapping[str, Any]):
    """The callables of all components."""

    def __init__(self, bound: BoundModel) -> None:
        self._bound = bound
        self.changed: dict[str, ComponentCall] = {}

    def __getitem__(self, name: str) -> ComponentCall:
        self._require(name)
        return self.changed.get(name, self._bound.calls[name])

    def __setitem__(self, name: str, call: Any) -> None:
        self._require(name)
        if not callable(call):
            raise InvalidArgument(
                f"candidate.components[{name!r}]", type(call).__name__,
                "a callable of inputs and weights", "Return a dict of named tensors from it.",
            )  # fmt: skip
        self.changed[name] = call

    def __delitem__(self, name: str) -> None:
        raise InvalidArgument(
            f"candidate.components[{name!r}]", "deleted", "a callable that takes its place",
            "A model needs all of its components.",
        )  # fmt: skip

    def __iter__(self) -> Iterator[str]:
        return iter(self._bound.calls)

    def __len__(self) -> int:
        return len(self._bound.calls)

    def _require(self, name: str) -> None:
        if name not in self._bound.calls:
            raise UnknownName.among("candidate.components", name, self._bound.calls)


class PatchedWeights(dict[str, Weight]):
    """A source of weights with some of them replaced."""

    def __init__(self, source: Mapping[str, Weight], replaced: Mapping[str, Weight]) -> None:
        super().__init__(replaced)
        self._source = source

    def __missing__(self, name: str) -> Weight:
        return self._source[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)

    def __contains__(self, name: object) -> bool:
        return name in self._source


def apply_patch(
    path: Path, bound: BoundModel, source: Mapping[str, Weight], stored: Mapping[str, str]
) -> Patched:
    """Run a patch on a bound model; the model stays unchanged unless the patch succeeds."""
    text = read_small_file(path, LARGEST_PATCH)
    function = _function(path, text)
    candidate = Candidate(bound, source, stored)
    try:
        function(candidate)
    except (Exception, SystemExit) as error:
        raise failed(f"--patch {path.name}", error, str(path)) from error
    changed = candidate.weights.changed()
    records = {name: candidate.weights.record(name) for name in changed}
    if records:
        bound.weights = PatchedWeights(bound.weights, records)
    for name, call in candidate.components.changed.items():
        replace_call(bound, name, call, f"--patch {path.name}", str(path))
    digest = hashlib.sha256(text).hexdigest()
    return Patched(path.name, digest, changed, tuple(candidate.components.changed))


class _Read(SourceLoader):
    """A loader that runs exactly the bytes that were hashed, and writes no bytecode cache."""

    def __init__(self, path: Path, text: bytes) -> None:
        self._path, self._text = path, text

    def get_filename(self, fullname: str) -> str:  # noqa: ARG002  there is one file
        """Return the file's path."""
        return str(self._path)

    def get_data(self, path: bytes | str) -> bytes:  # noqa: ARG002  as above
        """Return the bytes that were read."""
        return self._text


def _function(path: Path, text: bytes) -> Any:
    """Run a file as a separate module, and return its `patch`."""
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    folder = str(path.resolve().parent)
    sys.path.append(folder)  # modules in its folder may be imported
    try:
        _Read(path, text).exec_module(module)
    except (Exception, SystemExit) as error:
        raise failed(f"--patch {path.name}", error, str(path)) from error
    finally:
        sys.path.remove(folder)
    found = vars(module).get("patch")
    if not callable(found):
        raise InvalidArgument(
            f"--patch {path.name}", "no function patch", "def patch(candidate): ...",
            "It is called once, with the candidate.",
        )  # fmt: skip
    return found


def _copied(weight: Weight) -> Weight:
    """Copy a record, so that writing into its tensors does not change the source."""
    if isinstance(weight, DerivedWeight):
        return Weight(value=weight.values(torch.float32).clone())
    made = Weight(storage=weight.storage)
    for name in FIELDS:
        held = getattr(weight, name)
        setattr(made, name, None if held is None else held.clone())
    return made


def _require_fitting(name: str, record: Weight, shape: tuple[int, ...]) -> None:
    """Raise if a record's fields do not fit each other or the parameter."""
    place = f"candidate.weights[{name!r}]"
    for each in FIELDS:
        held = getattr(record, each)
        if held is not None and not isinstance(held, torch.Tensor):
            raise InvalidArgument(
                f"{place}.{each}", type(held).__name__, "a tensor", "Replace it by a tensor."
            )
    try:
        values = record.values(torch.float32)
    except DegarbleError as error:
        raise InvalidArgument(
            place, str(error), "fields that fit each other", "Replace all that belong together."
        ) from error
    if tuple(values.shape) != shape:
        raise ShapeMismatch(
            place, tuple(values.shape), str(shape), "Keep the extents of the parameter."
        )


def _versions(record: Weight) -> dict[str, tuple[Tensor | None, int]]:
    found = {}
    for name in FIELDS:
        held = getattr(record, name)
        found[name] = (held, held._version if isinstance(held, torch.Tensor) else 0)  # noqa: SLF001
    return found


def _written(record: Weight, before: Mapping[str, tuple[Tensor | None, int]]) -> tuple[str, ...]:
    """Return the fields whose tensor was replaced or written into."""
    after = _versions(record)
    return tuple(
        name for name in FIELDS
        if after[name][0] is not before[name][0] or after[name][1] != before[name][1]
    )  # fmt: skip
