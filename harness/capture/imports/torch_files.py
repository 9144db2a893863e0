"""Read tensors from files of torch.save without unpickling: nothing in them is imported or called.

Such a file is a zip archive whose data.pkl describes objects and whose other members are the
tensors' bytes. The opcodes of data.pkl are walked by a small machine that knows numbers, texts,
lists, dicts and torch's own way to describe a tensor. Every other object becomes a `ForeignObject`:
its name is kept and its arguments are dropped. Tensors are copies of members whose sizes are
checked against their shapes.
"""

from __future__ import annotations

import math
import pickletools
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.base.files import regular_file
from degarble.references.traced.trace import named

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

_LARGEST_DESCRIPTION = 64 << 20
_MOST_OPCODES = 2_000_000
_MOST_DIMENSIONS = 16
_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "BFloat16Storage": torch.bfloat16,
        "HalfStorage": torch.float16,
        "FloatStorage": torch.float32,
        "DoubleStorage": torch.float64,
        "ByteStorage": torch.uint8,
        "CharStorage": torch.int8,
        "ShortStorage": torch.int16,
        "IntStorage": torch.int32,
        "LongStorage": torch.int64,
        "BoolStorage": torch.bool,
    }
)
_REMEDY = "Dump it again, as safetensors where the tool can."


@dataclass(frozen=True)
class ForeignObject:
    """An object that is no number, text, container or tensor: only its name is known."""

    name: str


@dataclass(frozen=True)
class _Storage:
    member: str
    dtype: torch.dtype | None  # None: bytes, whose dtype the tensor says
    count: int


class _Mark:
    """Where a run of stack items begins."""


def read_saved(path: Path) -> Any:
    """Return what a file of torch.save holds: containers, numbers, texts and tensors."""
    with regular_file(path):
        pass  # refuses pipes, devices and links to nowhere
    try:
        with zipfile.ZipFile(path) as archive:
            return _Machine(path, archive).read()
    except (zipfile.BadZipFile, OSError, ValueError, IndexError, KeyError, TypeError) as error:
        raise UnreadableFile(
            str(path), f"{type(error).__name__}: {error}"[:200], "a zip archive of torch.save",
            _REMEDY,
        ) from error  # fmt: skip


class _Machine:
    """Walks the opcodes of data.pkl."""

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self._path, self._archive = path, archive
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._prefix = ""

    def read(self) -> Any:
        """Return the object."""
        described = [
            info for info in self._archive.infolist()
            if info.filename.rpartition("/")[2] == "data.pkl"
        ]  # fmt: skip
        if len(described) != 1 or described[0].file_size > _LARGEST_DESCRIPTION:
            self._refuse(f"{len(described)} data.pkl", "one data.pkl of 64 MiB at most")
        self._prefix = described[0].filename.removesuffix("data.pkl")
        text = self._archive.read(described[0])
        for number, (opcode, argument, _) in enumerate(pickletools.genops(text)):
            if number > _MOST_OPCODES:
                self._refuse(f"more than {_MOST_OPCODES} opcodes", "the description of tensors")
            if opcode.name == "STOP":
                return self._stack.pop()
            self._step(opcode.name, argument)
        return self._refuse("no end", "a complete description")

    def _step(self, name: str, argument: Any) -> None:
        work = _OPCODES.get(name)
        if work is not None:
            work(self, argument)
        elif name in _LITERALS:
            self._stack.append(argument)
        elif name not in {"PROTO", "FRAME"}:
            self._refuse(f"opcode {name}", "the opcodes by which torch.save describes tensors")

    def _refuse(self, value: object, expectation: str) -> Any:
        raise UnreadableFile(str(self._path), value, expectation, _REMEDY)

    def marked(self) -> list[Any]:
        """Take what lies above the last mark."""
        items: list[Any] = []
        while not isinstance(item := self._stack.pop(), _Mark):
            items.append(item)
        return items[::-1]

    def push(self, item: Any) -> None:
        """Put an item on the stack."""
        self._stack.append(item)

    def take(self, count: int) -> list[Any]:
        """Take the last items of the stack."""
        items = self._stack[-count:] if count else []
        if len(items) != count:
            raise IndexError("an empty stack")
        del self._stack[len(self._stack) - count :]
        return items

    def put(self, number: int | None) -> None:
        """Remember the item on top."""
        self._memo[len(self._memo) if number is None else number] = self._stack[-1]

    def get(self, number: int) -> None:
        """Put a remembered item on the stack."""
        self._stack.append(self._memo[number])

    def name(self, argument: str) -> None:
        """Put the name of a class or function on the stack; it is never imported."""
        self._stack.append(ForeignObject(argument.replace(" ", ".")))

    def stack_name(self) -> None:
        """Put a name on the stack, from its two parts there."""
        module, name = self.take(2)
        self._stack.append(ForeignObject(f"{module}.{name}"))

    def append(self) -> None:
        """Append the item on top to the list beneath it."""
        (item,) = self.take(1)
        self._extend([item])

    def extend(self) -> None:
        """Append the marked items to the list beneath them."""
        self._extend(self.marked())

    def _extend(self, items: list[Any]) -> None:
        if isinstance(self._stack[-1], list):
            self._stack[-1].extend(items)
        elif not isinstance(self._stack[-1], ForeignObject):
            self._refuse(type(self._stack[-1]).__name__, "a list that is appended to")

    def assign(self, pairs: list[Any]) -> None:
        """Fill the dict on top."""
        target = self._stack[-1]
        if isinstance(target, dict):
            for key, value in zip(pairs[::2], pairs[1::2], strict=True):
                target[key if isinstance(key, (str, int, float, tuple)) else str(key)] = value
        elif not isinstance(target, ForeignObject):
            self._refuse(type(target).__name__, "a dict that is filled")

    def storage(self) -> None:
        """Put the bytes of a tensor on the stack, by the number of their member."""
        (described,) = self.take(1)
        kind, typed, key, _, count = described
        if kind != "storage" or not isinstance(typed, ForeignObject):
            self._refuse(kind, "a storage")
        dtype = _DTYPES.get(typed.name.rpartition(".")[2])
        if dtype is None and not typed.name.endswith("UntypedStorage"):
            self._refuse(typed.name, f"one of {', '.join(_DTYPES)}")
        self._stack.append(_Storage(f"{self._prefix}data/{key}", dtype, count))

    def reduce(self) -> None:
        """Make what a function would: a tensor, an ordered dict, or nothing but a name."""
        function, arguments = self.take(2)
        name = function.name if isinstance(function, ForeignObject) else ""
        if name == "torch._utils._rebuild_tensor_v2":
            self._stack.append(self._tensor(*arguments[:4], dtype=None))
        elif name == "torch._utils._rebuild_tensor_v3":
            dtype = getattr(torch, _leaf(arguments[6]), None)
            self._stack.append(self._tensor(*arguments[:4], dtype=dtype))
        elif name == "torch._utils._rebuild_parameter":
            self._stack.append(arguments[0])
        elif name == "collections.OrderedDict":
            self._stack.append(OrderedDict())
        elif name == "torch.Size":
            self._stack.append(tuple(arguments[0]))
        else:
            self._stack.append(ForeignObject(name or type(function).__name__))

    def build(self) -> None:
        """Drop the state of an object that is not rebuilt."""
        self.take(1)

    def _tensor(
        self,
        storage: Any,
        offset: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        *,
        dtype: torch.dtype | None,
    ) -> Tensor:
        if not isinstance(storage, _Storage):
            self._refuse(type(storage).__name__, "a storage of this file")
        dtype = storage.dtype or dtype
        if not isinstance(dtype, torch.dtype):
            raise TypeError("a tensor without a dtype")
        numbers = (offset, *shape, *stride)
        if (
            len(shape) > _MOST_DIMENSIONS
            or len(shape) != len(stride)
            or any(type(each) is not int or each < 0 for each in numbers)
        ):
            self._refuse(numbers, "offset, shape and stride")
        if not math.prod(shape):
            return torch.empty(shape, dtype=dtype)
        info = self._archive.getinfo(storage.member)
        last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        size = torch.empty(0, dtype=dtype).element_size()
        if info.compress_type != zipfile.ZIP_STORED or (last + 1) * size > info.file_size:
            self._refuse(
                f"{storage.member}: {info.file_size} bytes", f"{(last + 1) * size} bytes, as stored"
            )
        # An overlapping view may have many more elements than its memory.
        if math.prod(shape) * size > max(info.file_size, 1 << 20):
            self._refuse(list(shape), "no more elements than the file has bytes for")
        data = bytearray(self._archive.read(info))
        usable = memoryview(data)[: len(data) // size * size]
        return torch.frombuffer(usable, dtype=dtype).as_strided(shape, stride, offset).clone()


def _leaf(name: Any) -> str:
    return name.name.rpartition(".")[2] if isinstance(name, ForeignObject) else ""


_LITERALS = named(
    """
    INT LONG LONG1 LONG4 BININT BININT1 BININT2 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING
    UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8
    """
)
_OPCODES: Mapping[str, Callable[[_Machine, Any], Any]] = MappingProxyType(
    {
        "NONE": lambda m, _: m.push(None),
        "NEWTRUE": lambda m, _: m.push(True),
        "NEWFALSE": lambda m, _: m.push(False),
        "MARK": lambda m, _: m.push(_Mark()),
        "EMPTY_DICT": lambda m, _: m.push({}),
        "EMPTY_LIST": lambda m, _: m.push([]),
        "EMPTY_TUPLE": lambda m, _: m.push(()),
        "EMPTY_SET": lambda m, _: m.push([]),
        "TUPLE": lambda m, _: m.push(tuple(m.marked())),
        "TUPLE1": lambda m, _: m.push(tuple(m.take(1))),
        "TUPLE2": lambda m, _: m.push(tuple(m.take(2))),
        "TUPLE3": lambda m, _: m.push(tuple(m.take(3))),
        "LIST": lambda m, _: m.push(m.marked()),
        "APPEND": lambda m, _: m.append(),
        "APPENDS": lambda m, _: m.extend(),
        "ADDITEMS": lambda m, _: m.extend(),
        "SETITEM": lambda m, _: m.assign(m.take(2)),
        "SETITEMS": lambda m, _: m.assign(m.marked()),
        "MEMOIZE": lambda m, _: m.put(None),
        "BINPUT": lambda m, number: m.put(number),
        "LONG_BINPUT": lambda m, number: m.put(number),
        "BINGET": lambda m, number: m.get(number),
        "LONG_BINGET": lambda m, number: m.get(number),
        "GLOBAL": lambda m, name: m.name(name),
        "STACK_GLOBAL": lambda m, _: m.stack_name(),
        "BINPERSID": lambda m, _: m.storage(),
        "REDUCE": lambda m, _: m.reduce(),
        "NEWOBJ": lambda m, _: m.reduce(),
        "BUILD": lambda m, _: m.build(),
        "POP": lambda m, _: m.take(1),
    }
)
