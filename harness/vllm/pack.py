"""vLLM for a GPU machine that reaches no package registry, in parts small enough to be carried.

    python -m degarble.harness.vllm.pack WHEELS DEST --gpu 90

Some files of the wheels are left out, and machine code of other GPUs is zeroed: a fat binary keeps
its table, so the driver still finds its own code. The rest is an archive in parts with digests, and
a script that joins and unpacks them. Attention libraries that V4's path never calls are left out;
vLLM imports them by name, so empty modules replace them, and calling one fails.

An engine ran on an H200 from these files.
"""

from __future__ import annotations

import argparse
import hashlib
import struct
import sys
import tarfile
import zipfile
from fnmatch import fnmatch
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.base.errors import DegarbleError, InvalidArgument
from degarble.harness.base.version import VERSION
from degarble.harness.report.files import require_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

PROGRAM = b"\x7fELF"  # the first bytes of a program or library
PART = 24 << 20  # bytes, at most
LEFT_OUT = (
    "vllm/vllm_flash_attn/*.so", "vllm/vllm-rs", "vllm/_qutlass_C*", "vllm/benchmarks/*",
    "vllm/third_party/fmha_sm100/*", "vllm/third_party/tml_fa4/*",
    "tilelang/3rdparty/composable_kernel/*", "tilelang/3rdparty/tvm/src/*",
    "z3/include/*", "z3/lib/libz3.so.*", "z3_solver-*.data/*",  # TileLang links to z3/lib/libz3.so
)  # fmt: skip
OTHER_PYTHONS = "vllm/third_party/deep_gemm/_C.cpython-*"
PYTHON = "cpython-312"
STAND_INS = tuple(f"vllm/vllm_flash_attn/_vllm_fa{n}_C.py" for n in (2, 3))
STAND_IN = b'"""Left out of the pack: nothing that DeepSeek-V4 runs calls it."""\n'
# As pyproject.toml has them: the machine runs degarble from its tree, where nothing is installed.
ENTRY_POINTS = """[vllm.general_plugins]
degarble = degarble.harness.vllm.entry:register

[vllm.stat_logger_plugins]
degarble = degarble.harness.vllm.bound.metrics:PartInfo
"""
# CUDA fat binaries (CUDA Binary Utilities 13.0 tells of them, cuobjdump lists them): a container of
# magic, version, bytes of its head and of what follows; entries of kind, bytes and architecture.
MAGIC, HEAD, ENTRY_HEAD = 0xBA55ED50, struct.Struct("<IHHQ"), struct.Struct("<HHIQ")
ARCHITECTURE_AT, PTX, ELF = 28, 1, 2

JOIN = """#!/bin/sh
# Joins the parts in its folder, checks them, and unpacks into the folder named: sh unpack.sh TARGET
set -eu
target=$1
cd "$(dirname "$0")"
sha256sum --quiet --check SHA256SUMS
mkdir -p "$target"
cat pack.[0-9][0-9] | xz -dc | tar x -C "$target"
echo "PYTHONPATH=$target"
"""


class FatBinaryEntry(NamedTuple):
    """Code of one architecture in a fat binary: where its bytes lie."""

    kind: int
    architecture: int
    begin: int
    end: int


def containers(data: bytes) -> Iterator[list[FatBinaryEntry]]:
    """Yield the entries of each fat binary in a library."""
    at = data.find(MAGIC.to_bytes(4, "little"))
    while at >= 0:
        _, version, head, size = HEAD.unpack_from(data, at)
        end, place, found = at + head + size, at + head, []
        if version == 1 and head == HEAD.size and end <= len(data):
            while place + 2 * ENTRY_HEAD.size <= end:
                kind, _, own, count = ENTRY_HEAD.unpack_from(data, place)
                (architecture,) = struct.unpack_from("<I", data, place + ARCHITECTURE_AT)
                if kind not in (PTX, ELF) or own < ENTRY_HEAD.size or place + own + count > end:
                    break
                found.append(FatBinaryEntry(kind, architecture, place + own, place + own + count))
                place += own + count
            yield found
        else:
            end = at + 4
        at = data.find(MAGIC.to_bytes(4, "little"), end)


def for_gpu(data: bytes, architecture: int) -> bytes:
    """Zero machine code of other GPUs; PTX stays if there is no code for this one."""
    made = bytearray(data)
    for entries in containers(data):
        has = any(entry.kind == ELF and entry.architecture == architecture for entry in entries)
        for kind, other, begin, end in entries:
            own = kind == ELF and other == architecture
            if not own and (has or kind == ELF or other > architecture):
                made[begin:end] = bytes(end - begin)
    return bytes(made)


def kept(name: str) -> bool:
    """Return whether a file of a wheel is packed."""
    if fnmatch(name, OTHER_PYTHONS):
        return PYTHON in name
    return not any(fnmatch(name, each) for each in LEFT_OUT)


def files_of(wheels: Sequence[Path], architecture: int) -> Iterator[tuple[str, bytes]]:
    """Yield what the wheels leave on the machine, then what stands in, then our entry points."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for info in sorted(archive.infolist(), key=lambda each: each.filename):
                if not info.is_dir() and kept(info.filename):
                    data = archive.read(info)
                    library = info.filename.startswith("vllm/") and info.filename.endswith(".so")
                    yield info.filename, for_gpu(data, architecture) if library else data
    yield from ((name, STAND_IN) for name in STAND_INS)
    about = f"degarble-{VERSION}.dist-info"
    yield (
        f"{about}/METADATA",
        f"Metadata-Version: 2.1\nName: degarble\nVersion: {VERSION}\n".encode(),
    )
    yield f"{about}/entry_points.txt", ENTRY_POINTS.encode()


def pack(wheels: Path, to: Path, architecture: int, part: int = PART) -> list[Path]:
    """Write the parts, their digests and the script; return the parts."""
    paths = sorted(wheels.glob("*.whl"))
    if not any(path.name.startswith("vllm-") for path in paths):
        raise InvalidArgument(
            "WHEELS", str(wheels), "a folder with vLLM's wheel", "make vllm-pack fetches it."
        )
    return write_parts(files_of(paths, architecture), to, part)


def write_parts(files: Iterable[tuple[str, bytes]], to: Path, part: int = PART) -> list[Path]:
    """Write an archive in parts, their digests and the script; return the parts."""
    if to.exists():
        raise InvalidArgument("DEST", str(to), "a folder that does not exist", "Remove it.")
    require_folder("DEST", to)
    whole = BytesIO()
    with tarfile.open(fileobj=whole, mode="w:xz", preset=6) as archive:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            # Some wheels start programs of their own; a wheel's modes are not read.
            info.mode = 0o755 if data.startswith(PROGRAM) else 0o644
            archive.addfile(info, BytesIO(data))
    data, made = whole.getvalue(), []
    to.mkdir(parents=True)
    for number, begin in enumerate(range(0, len(data), part)):
        made.append(to / f"pack.{number:02}")
        made[-1].write_bytes(data[begin : begin + part])
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in made]
    (to / "SHA256SUMS").write_text("\n".join(sums) + "\n", encoding="utf-8")
    (to / "unpack.sh").write_text(JOIN, encoding="utf-8")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Pack, and say what travels; status 2 where that is refused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheels", type=Path)
    parser.add_argument("to", type=Path)
    parser.add_argument("--gpu", type=int, default=90, help="compute capability, without its dot")
    given = parser.parse_args(arguments)
    try:
        paths = pack(given.wheels, given.to, given.gpu)
    except DegarbleError as error:
        print(f"REFUSED: {error}", file=sys.stderr)  # noqa: T201  a command's own line
        return error.exit_status
    for path in paths:
        print(f"{path}  {path.stat().st_size:,} bytes")  # noqa: T201  a command's own lines
    return 0


if __name__ == "__main__":
    sys.exit(main())
