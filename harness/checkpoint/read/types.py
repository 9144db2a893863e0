"""Records of a checkpoint's files: stored tensors, headers, layouts, problems, and size limits.

Holds the dtypes that safetensors headers name, and the limits beyond which a file raises an error
before it costs memory. Positions are absolute bytes in a file. Imports no sibling, and no torch,
because a structure audit runs without it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.base.errors import UnknownName, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from degarble.harness.base.errors import Refused

# Bits of one element, by the names of safetensors 0.8 (its source: tensor.rs, enum Dtype).
DTYPE_BITS: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 8,
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "U8": 8,
        "I8": 8,
        "F8_E5M2": 8,
        "F8_E4M3": 8,
        "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8,
        "F8_E5M2FNUZ": 8,
        "I16": 16,
        "U16": 16,
        "F16": 16,
        "BF16": 16,
        "I32": 32,
        "U32": 32,
        "F32": 32,
        "C64": 64,
        "F64": 64,
        "I64": 64,
        "U64": 64,
    }
)

LARGEST_HEADER = 100_000_000  # safetensors' own limit on a header, in bytes
LARGEST_INDEX = 256 << 20  # an index of 300,000 tensors has 40 MB
LARGEST_CONFIG = 16 << 20
MOST_TENSORS = 1 << 20  # of one checkpoint; the largest one known has about 300,000
MOST_DIMENSIONS = 64
LONGEST_ENTRY = 16 << 10  # bytes of one tensor's line in a header or an index
LARGEST_METADATA = 8 << 20  # bytes of `__metadata__`, or of the index's `metadata`


_LONGEST_SHOWN = 160
_MOST_COMPARED = 1000


def shown(text: str) -> str:
    """Return a name from a file as one bounded, printable line, for use in a message."""
    return printable(text, _LONGEST_SHOWN)


def unknown_name(kind: str, value: object, known: Iterable[str]) -> UnknownName:
    """Return an error for a name; suggestions begin alike, because comparing all names is slow."""
    prefix, names = str(value), list(known)
    near: list[str] = []
    while not near:
        prefix = prefix.rpartition(".")[0]
        near = [name for name in names if name.startswith(prefix)][:_MOST_COMPARED]
        if not prefix:
            break
    matches = get_close_matches(str(value), near, n=3, cutoff=0.5)
    remedy = f"Did you mean {', '.join(map(shown, matches))}?" if matches else "List them first."
    return UnknownName(kind, value, f"one of the {len(names)} known names", remedy)


class TensorEntry(NamedTuple):
    """One stored tensor: the facts of its header, and the range of its bytes in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return self.end - self.begin

    @property
    def elements(self) -> int:
        """The number of elements; 1 for a scalar."""
        return prod(self.shape)


@dataclass(frozen=True)
class Header:
    """The header of one safetensors file, checked against the file's size."""

    file: Path
    entries: Mapping[str, TensorEntry]  # in the header's own order
    metadata: Mapping[str, str]
    data_begin: int
    file_size: int


class StoredLayout(StrEnum):
    """The conventions of a checkpoint as a whole; its modules may each differ."""

    OFFICIAL = "official"  # DeepSeek's names, FP8 with UE8M0 `.scale`, packed FP4 experts
    HF_FP8 = "hf-fp8"  # transformers' names, FP8 with `.weight_scale_inv`
    MODELOPT = "modelopt"  # NVFP4 as weight, weight_scale, weight_scale_2, input_scale
    COMPRESSED_TENSORS = "compressed-tensors"  # NVFP4 as weight_packed with divisor scales
    TRANSFORMERS = "transformers"  # experts stacked in one tensor, unquantised
    VLLM = "vllm"  # an engine's fused parameters, written to disk
    BF16 = "bf16"  # one unquantised tensor a parameter
    EMPTY = "empty"  # no tensor at all


class ProblemKind(StrEnum):
    """The kinds of problems of a checkpoint's files, found before any tensor is read."""

    UNFINISHED = "unfinished output"  # still being written, or the writer was interrupted
    UNREADABLE_SHARD = "unreadable shard"  # missing, truncated, hostile, no regular file
    UNREADABLE_INDEX = "unreadable index"
    UNREADABLE_CONFIG = "unreadable config"
    UNKNOWN_METHOD = "unknown quant_method over plain weights"
    UNSAFE_NAME = "unsafe name"  # a shard's name that leaves the folder
    IN_TWO_SHARDS = "tensor in two shards"
    NOT_IN_INDEX = "tensor that the index lacks"
    NOT_IN_HEADER = "tensor that no shard has"
    IN_OTHER_SHARD = "tensor in another shard than the index says"
    STRAY_SHARD = "shard that the index does not name"
    FOREIGN_LINK = "link that leaves the checkpoint"
    UNPICKLED = "file that would have to be unpickled"
    TOTAL_SIZE = "total size in the index"

    @property
    def is_fatal(self) -> bool:
        """Whether a strict opening raises for it; the others are reported and tolerated."""
        return self not in _TOLERATED


_TOLERATED = frozenset(
    {
        ProblemKind.STRAY_SHARD,
        ProblemKind.FOREIGN_LINK,
        ProblemKind.UNPICKLED,
        ProblemKind.TOTAL_SIZE,
    }
)


class Problem(NamedTuple):
    """One problem of the files, with the error that a strict opening raises."""

    kind: ProblemKind
    file: str
    tensor: str | None
    error: Refused


EXAMPLES_KEPT = 100


@dataclass
class Problems:
    """The problems found; the first hundred of each kind are kept, all are counted.

    `strict`: raise the first fatal one instead.
    """

    strict: bool
    found: list[Problem] = field(default_factory=list)
    counts: Counter[ProblemKind] = field(default_factory=Counter)

    def report(self, kind: ProblemKind, file: str, tensor: str | None, error: Refused) -> None:
        """Record one problem, or raise it."""
        if self.strict and kind.is_fatal:
            raise error
        self.counts[kind] += 1
        if self.counts[kind] <= EXAMPLES_KEPT:
            self.found.append(Problem(kind, file, tensor, error))
