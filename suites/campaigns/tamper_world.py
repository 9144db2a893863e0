"""A small checkpoint in memory, to be damaged tensor by tensor or file by file, and written again.

A tampered copy keeps its manifest only where the tamper is about the manifest: the content hashes
would tell every other change by themselves, and measure nothing.
"""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

_NUMPY = {"F32": np.float32, "BF16": np.uint16, "F16": np.float16, "I64": np.int64}
_LENGTH = 8  # bytes in front of a head
SCALES = (".weight_scale", ".weight_scale_inv", ".scale")


@dataclass
class Stored:
    """One tensor as a header states it, and its bytes."""

    dtype: str
    shape: list[int]
    data: bytearray

    @property
    def array(self) -> NDArray[Any]:
        """The elements, over the bytes; bfloat16 and codes as unsigned integers."""
        kind = _NUMPY.get(self.dtype, np.uint8)
        return np.frombuffer(self.data, kind).reshape(self.shape)

    def copy(self) -> Stored:
        """Return a tensor of its own."""
        return Stored(self.dtype, list(self.shape), bytearray(self.data))


@dataclass
class World:
    """A checkpoint of one shard: tensors, configs, and what is done to the files at the end."""

    source: Path
    tensors: dict[str, Stored]
    config: dict[str, Any]
    beside: dict[str, Any]  # hf_quant_config.json, empty where there is none
    rng: np.random.Generator
    keeps_manifest: bool = False
    edits: list[Callable[[Path], object]] = field(default_factory=list)
    index_edits: list[Callable[[dict[str, Any]], None]] = field(default_factory=list)

    @classmethod
    def read(cls, source: Path, seed: int) -> World:
        """Read a whole checkpoint."""
        (shard,) = source.glob("*.safetensors")
        data = shard.read_bytes()
        (length,) = struct.unpack("<Q", data[:_LENGTH])
        begin = _LENGTH + length
        tensors = {
            name: Stored(
                load["dtype"],
                load["shape"],
                bytearray(data[begin + load["data_offsets"][0] : begin + load["data_offsets"][1]]),
            )
            for name, load in json.loads(data[_LENGTH:begin]).items()
            if name != "__metadata__"
        }
        beside = source / "hf_quant_config.json"
        return cls(
            source,
            tensors,
            json.loads((source / "config.json").read_text()),
            json.loads(beside.read_text()) if beside.exists() else {},
            np.random.default_rng(seed),
        )

    def write(self, target: Path) -> None:
        """Write the checkpoint, in one shard, with an index and every edit."""
        shutil.copytree(self.source, target)
        (shard,) = target.glob("*.safetensors")
        if not self.keeps_manifest:
            (target / "manifest.json").unlink(missing_ok=True)
        heads, at = {}, 0
        for name, tensor in self.tensors.items():
            heads[name] = {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "data_offsets": [at, at + len(tensor.data)],
            }
            at += len(tensor.data)
        head = json.dumps(heads).encode()
        head += b" " * (-len(head) % _LENGTH)
        with shard.open("wb") as file:
            file.write(struct.pack("<Q", len(head)) + head)
            for tensor in self.tensors.values():
                file.write(tensor.data)
        index: dict[str, Any] = {
            "metadata": {"total_size": at},
            "weight_map": dict.fromkeys(self.tensors, shard.name),
        }
        for change in self.index_edits:
            change(index)
        (target / "model.safetensors.index.json").write_text(json.dumps(index))
        (target / "config.json").write_text(json.dumps(self.config))
        if self.beside:
            (target / "hf_quant_config.json").write_text(json.dumps(self.beside))
        for edit in self.edits:
            edit(target)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.tensors[name].array

    def pick(self, names: list[str]) -> str:
        """Choose one name."""
        if not names:
            raise LookupError
        return names[int(self.rng.integers(len(names)))]

    @cached_property
    def nvfp4(self) -> list[str]:
        """Modules with NVFP4 codes that lie in their linear's own order."""
        return [name.removesuffix(".weight_scale_2") for name in self.tensors
                if name.endswith(".weight_scale_2")]  # fmt: skip

    @cached_property
    def fp8(self) -> list[str]:
        """Modules with FP8 codes in blocks, several of them."""
        found = (name for name, tensor in self.tensors.items() if tensor.dtype == "F8_E4M3")
        modules = [name.removesuffix(".weight") for name in found if name.endswith(".weight")]
        return [name for name in modules if len(self.scale_of(name).data)]

    @cached_property
    def mxfp4(self) -> list[str]:
        """Modules with MXFP4 codes."""
        return [
            name.removesuffix(".weight")
            for name, tensor in self.tensors.items()
            if tensor.dtype == "I8" and name.endswith(".weight")
        ]

    @cached_property
    def linears(self) -> list[str]:
        """Plain matrices of BF16 inside of layers, with more than one row and no router."""
        return self.plain("BF16", lambda name, shape: "layers." in name and len(shape) == 2)

    @cached_property
    def norms(self) -> list[str]:
        """Norms and other vectors of layers."""
        return [
            name
            for name, tensor in self.tensors.items()
            if "norm" in name and name.endswith(".weight") and len(tensor.shape) == 1
        ]

    def plain(self, dtype: str, kept: Callable[[str, list[int]], bool]) -> list[str]:
        """Name the plain tensors of a dtype that `kept` keeps."""
        return [
            name
            for name, tensor in self.tensors.items()
            if tensor.dtype == dtype and not name.endswith(SCALES) and kept(name, tensor.shape)
        ]

    def named(self, *endings: str) -> list[str]:
        """Name the tensors that end so."""
        return [name for name in self.tensors if name.endswith(endings)]

    def scale_of(self, module: str) -> Stored:
        """Return the block scales of a module."""
        return next(self.tensors[module + each] for each in SCALES if module + each in self.tensors)

    def parts(self, module: str) -> list[str]:
        """Name the tensors of a module."""
        return [name for name in self.tensors if name.rpartition(".")[0] == module]

    def expert_of(self, module: str, step: int = 1) -> str:
        """Name the same projection of the next expert of a layer."""
        front, _, rest = module.partition(".experts.")
        number, _, projection = rest.partition(".")
        for other in (int(number) + step, int(number) - step):
            found = f"{front}.experts.{other}.{projection}"
            if self.parts(found):
                return found
        raise LookupError

    @property
    def experts(self) -> list[str]:
        """Quantised modules of routed experts."""
        return [n for n in (*self.nvfp4, *self.fp8, *self.mxfp4) if ".experts." in n]

    def swap(self, first: str, second: str) -> None:
        """Exchange all parts of two modules."""
        for name in self.parts(first):
            other = second + name[len(first) :]
            a, b = self.tensors[name], self.tensors[other]
            self.tensors[name], self.tensors[other] = b, a

    def take(self, target: str, source: str) -> None:
        """Give a module copies of another one's parts."""
        for name in self.parts(source):
            self.tensors[target + name[len(source) :]] = self.tensors[name].copy()

    def rename(self, old: str, new: str) -> None:
        """Give a tensor another name, in its place."""
        self.tensors = {(new if k == old else k): v for k, v in self.tensors.items()}
