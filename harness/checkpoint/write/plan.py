"""Plan a checkpoint before the first byte is written: tensors in order, cut into shards.

The plan alone determines every byte of a shard's header and its name. Its hash identifies it, so an
interrupted run resumes on any machine. Neighbours with the same producer's key stay in one shard. A
shard holds at most `shard_bytes` of data unless one such group alone is larger.

Repeated or unusable names, unknown dtypes, extents that are no counts, and headers that no reader
would accept raise an error.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.checkpoint.read.types import (
    DTYPE_BITS,
    LARGEST_HEADER,
    LONGEST_ENTRY,
    MOST_DIMENSIONS,
    MOST_TENSORS,
    shown,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SHARD_BYTES = 5_000_000_000  # the size that Hugging Face tools write by default
_ALIGNMENT = 8  # data begin at a multiple, as the safetensors package writes them
_LARGEST_COUNT = (1 << 63) - 1
_LONGEST_NAME = LONGEST_ENTRY // 4  # as JSON, with shape and offsets, it stays readable
_MOST_SHARDS = 99_999  # five digits, so that names sort as numbers do
_SAFETENSORS_METADATA = "__metadata__"
_FOR_TORCH = {"format": "pt"}  # transformers refuses shards that do not say so


class PlannedTensor(NamedTuple):
    """One tensor to write. `key` tells its producer which module it belongs to."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    key: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True)
class ShardPlan:
    """One file to write: all that a worker needs to know, whatever else is written elsewhere."""

    plan: str  # hash of the whole plan
    number: int  # from 1
    count: int
    tensors: tuple[PlannedTensor, ...]
    metadata: Mapping[str, str]

    @property
    def file(self) -> str:
        """Name of the shard's file."""
        return f"model-{self.number:05d}-of-{self.count:05d}.safetensors"

    @property
    def data_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def head(self) -> bytes:
        """Return everything before the data: length, header, blanks up to the alignment."""
        members = []
        if self.metadata:
            members.append(f'"{_SAFETENSORS_METADATA}":{_json(dict(self.metadata))}')
        end = 0
        for tensor in self.tensors:
            begin, end = end, end + tensor.nbytes
            extents = ",".join(map(str, tensor.shape))
            members.append(
                f'{_json(tensor.name)}:{{"dtype":"{tensor.dtype}","shape":[{extents}],'
                f'"data_offsets":[{begin},{end}]}}'
            )
        text = ("{" + ",".join(members) + "}").encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class WritePlan:
    """The plan of the whole target. Make it with `WritePlan.of`.

    `sources` names what the data come from, each with a fingerprint: hashes of input files, a seed,
    a recipe. A run resumes only where plan and sources are the same.
    """

    hash: str
    shards: tuple[ShardPlan, ...]
    shard_bytes: int
    metadata: Mapping[str, str]
    sources: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_tensors(
        cls,
        tensors: Iterable[PlannedTensor],
        *,
        shard_bytes: int = SHARD_BYTES,
        metadata: Mapping[str, str] | None = None,
        sources: Mapping[str, str] | None = None,
    ) -> WritePlan:
        """Check the tensors and cut them into shards, in the given order."""
        listed = tuple(tensors)
        _require_tensors(listed)
        _require_count("shard_bytes", shard_bytes)
        fields = dict(_FOR_TORCH if metadata is None else metadata)
        named = dict(sources or {})
        for what, texts in (("metadata", fields), ("sources", named)):
            _require_texts(what, texts)
        parts = _cut(listed, shard_bytes)
        if len(parts) > _MOST_SHARDS:
            raise InvalidArgument(
                "shard_bytes",
                f"{shard_bytes}, which makes {len(parts)} shards",
                f"at most {_MOST_SHARDS} shards",
                "Choose a larger shard_bytes.",
            )
        digest = _hash_of(parts, shard_bytes, fields, named)
        shards = tuple(
            ShardPlan(digest, number, len(parts), part, fields)
            for number, part in enumerate(parts, 1)
        )
        for shard in shards:
            _require_readable_head(shard)
        return cls(digest, shards, shard_bytes, fields, named)

    @property
    def tensors(self) -> int:
        """The number of tensors."""
        return sum(len(shard.tensors) for shard in self.shards)

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors, which an index calls its total size."""
        return sum(shard.data_bytes for shard in self.shards)

    def facts(self) -> dict[str, object]:
        """Return the plan in short, for comparison with another plan."""
        return {
            "sources": dict(self.sources),
            "metadata": dict(self.metadata),
            "shard_bytes": self.shard_bytes,
            "shards": len(self.shards),
            "tensors": self.tensors,
            "data_bytes": self.data_bytes,
            "heads": {
                shard.file: hashlib.sha256(shard.head()).hexdigest() for shard in self.shards
            },
            "plan": self.hash,
        }


def _groups(tensors: Iterable[PlannedTensor]) -> list[tuple[PlannedTensor, ...]]:
    """Split where the producer's key changes; tensors without a key form groups of one."""
    found: list[tuple[PlannedTensor, ...]] = []
    for key, group in groupby(tensors, lambda tensor: tensor.key):
        members = tuple(group)
        found.extend([members] if key else [(member,) for member in members])
    return found


def _cut(
    tensors: tuple[PlannedTensor, ...], shard_bytes: int
) -> tuple[tuple[PlannedTensor, ...], ...]:
    parts: list[list[PlannedTensor]] = [[]]
    filled = 0
    for group in _groups(tensors):
        nbytes = sum(tensor.nbytes for tensor in group)
        if filled and filled + nbytes > shard_bytes:
            parts.append([])
            filled = 0
        parts[-1].extend(group)
        filled += nbytes
    return tuple(map(tuple, parts))


def _hash_of(
    parts: Iterable[tuple[PlannedTensor, ...]],
    shard_bytes: int,
    metadata: Mapping[str, str],
    sources: Mapping[str, str],
) -> str:
    digest = hashlib.sha256()
    head = {"shard_bytes": shard_bytes, "metadata": metadata, "sources": sources}
    digest.update(_json(head).encode() + b"\n")
    for part in parts:
        for tensor in part:
            digest.update(_json(list(tensor)).encode() + b"\n")
        digest.update(b"\n")
    return digest.hexdigest()


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _require_tensors(tensors: tuple[PlannedTensor, ...]) -> None:
    if not 0 < len(tensors) <= MOST_TENSORS:
        raise InvalidArgument(
            "tensors of the plan",
            len(tensors),
            f"1 to {MOST_TENSORS}",
            "Plan what the target holds.",
        )
    seen: set[str] = set()
    for tensor in tensors:
        _require_tensor(tensor)
        if tensor.name in seen:
            raise InvalidArgument(
                "planned tensor",
                shown(tensor.name),
                "each name once",
                "Two sources claim one tensor: rename one of them.",
            )
        seen.add(tensor.name)


def _require_tensor(tensor: PlannedTensor) -> None:
    name = tensor.name
    if not (_is_text(name) and 0 < len(name) <= _LONGEST_NAME) or name == _SAFETENSORS_METADATA:
        raise InvalidArgument(
            "planned tensor", name, "a name that safetensors can hold", "Rename it."
        )
    if tensor.dtype not in DTYPE_BITS:
        raise UnknownName.among(f"dtype of {shown(tensor.name)}", tensor.dtype, DTYPE_BITS)
    # type(), because True is an int as well.
    counts = all(type(extent) is int and extent >= 0 for extent in tensor.shape)
    bits = prod(tensor.shape) * DTYPE_BITS[tensor.dtype] if counts else -1
    if len(tensor.shape) > MOST_DIMENSIONS or not 0 <= bits <= _LARGEST_COUNT or bits % 8:
        raise InvalidArgument(
            f"shape of {shown(tensor.name)}",
            tensor.shape,
            f"at most {MOST_DIMENSIONS} counts that make whole bytes of {tensor.dtype}",
            "Give the extents of the stored tensor.",
        )


def _require_count(name: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise InvalidArgument(name, value, "an integer of at least 1", "Leave it out for 5 GB.")


def _require_texts(what: str, texts: Mapping[str, str]) -> None:
    for key, value in texts.items():
        if not (_is_text(key) and _is_text(value)):
            raise InvalidArgument(f"{what}[{key!r}]", value, "texts", "Spell it as a text.")


def _is_text(value: object) -> bool:
    """Return whether it is a str that UTF-8 can encode."""
    try:
        return isinstance(value, str) and bool(value.encode() or True)
    except UnicodeEncodeError:
        return False


def _require_readable_head(shard: ShardPlan) -> None:
    length = len(shard.head()) - 8
    if length > LARGEST_HEADER:
        raise InvalidArgument(
            f"header of {shard.file}",
            f"{length} bytes for {len(shard.tensors)} tensors",
            f"at most {LARGEST_HEADER} bytes",
            "Choose a smaller shard_bytes.",
        )
