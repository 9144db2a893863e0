"""Kernels of others in parts that can be carried to a GPU machine which fetches nothing.

    python -m degarble.suites.bench.kernel_peers.pack WHEELS DEST --gpu 90

Of vLLM's wheel, libraries of kernels and DeepGEMM are packed; of the other wheels everything.
Machine code of other GPUs is zeroed, as harness/vllm/pack.py does it.
"""

from __future__ import annotations

import argparse
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from degarble.harness.base.errors import DegarbleError, InvalidArgument
from degarble.harness.vllm.pack import OTHER_PYTHONS, PYTHON, for_gpu, write_parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PART = 26 << 20  # bytes, at most
OF_VLLM = (
    "vllm/_C_stable_libtorch.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so",
    "vllm/_flashmla_C.abi3.so", "vllm/scalar_type.py", "vllm/third_party/deep_gemm/*",
    "vllm-*.dist-info/METADATA",
)  # fmt: skip
WANTED = ("humming_kernels", "quack_kernels", "tokenspeed_flashmla", "vllm")


def kept(wheel: str, name: str) -> bool:
    """Return whether a file of a wheel is packed."""
    if fnmatch(name, OTHER_PYTHONS):
        return PYTHON in name
    return not wheel.startswith("vllm-") or any(fnmatch(name, each) for each in OF_VLLM)


def files_of(wheels: Sequence[Path], architecture: int) -> Iterator[tuple[str, bytes]]:
    """Yield what the wheels leave on the machine."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for info in sorted(archive.infolist(), key=lambda each: each.filename):
                if not info.is_dir() and kept(wheel.name, info.filename):
                    data = archive.read(info)
                    is_library = info.filename.endswith(".so")
                    yield info.filename, for_gpu(data, architecture) if is_library else data


def pack(wheels: Path, to: Path, architecture: int, part: int = PART) -> list[Path]:
    """Write the parts, their digests and the script; return the parts."""
    paths = sorted(wheels.glob("*.whl"))
    missing = [name for name in WANTED if not any(p.name.startswith(f"{name}-") for p in paths)]
    if missing:
        raise InvalidArgument(
            "WHEELS", str(wheels), f"a folder with wheels of {', '.join(missing)}",
            "make peers-pack fetches them.",
        )  # fmt: skip
    return write_parts(files_of(paths, architecture), to, part)


def main(arguments: Sequence[str] | None = None) -> int:
    """Pack, and say what travels; status 2 where that is refused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheels", type=Path)
    parser.add_argument("to", type=Path)
    parser.add_argument("--gpu", type=int, default=90, help="compute capability, without its dot")
    given = parser.parse_args(arguments)
    try:
        paths = pack(given.wheels, given.to, given.gpu)
    except DegarbleError as error:
        sys.stderr.write(f"REFUSED: {error}\n")
        return error.exit_status
    for path in paths:
        sys.stdout.write(f"{path}  {path.stat().st_size:,} bytes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
