"""Read registers, stack and shared memory of a cubin, and find unstated roundings in PTX.

`cubin_facts` runs cuobjdump (package nvidia-cuda-cuobjdump, or the CUDA toolkit's on the PATH); a
missing program or unknown output raises. `unstated_roundings` finds arithmetic that ptxas may
contract into an fma. Our kernels keep no arrays in local memory, so a stack means spilled
registers.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from degarble.harness.base.errors import MissingDependency, UnreadableFile

_FUNCTION = re.compile(
    r"Function (?P<name>\S+):\s+REG:(?P<registers>\d+) STACK:(?P<stack>\d+) "
    r"SHARED:(?P<shared>\d+) LOCAL:(?P<local>\d+)"
)
# PTX ISA 9.1, mul, add, sub: without a rounding modifier ptxas may contract them into an fma.
_UNSTATED = re.compile(
    r"^\s*(?:@!?%\w+\s+)?((?:mul|add|sub|mad)(?:\.ftz|\.sat)*\.b?f(?:16|32|64)(?:x2)?\s.*;)",
    re.MULTILINE,
)
_FMA = re.compile(r"^\s*(?:@!?%\w+\s+)?(fma\.\S+\s.*;)", re.MULTILINE)


@dataclass(frozen=True)
class KernelFacts:
    """Resources of one kernel of a cubin: bytes, and registers per thread."""

    name: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    local_bytes: int

    @property
    def spills(self) -> bool:
        """Return whether registers were spilled to memory."""
        return self.stack_bytes > 0 or self.local_bytes > 0


def cubin_facts(cubin: bytes) -> tuple[KernelFacts, ...]:
    """Return the resources of every kernel in a cubin."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        run = subprocess.run(  # noqa: S603  our own file, a program from a known package
            [cuobjdump_path(), "--dump-resource-usage", path],
            capture_output=True,
            text=True,
            check=False,
        )
    facts = tuple(
        KernelFacts(
            name=match["name"],
            registers=int(match["registers"]),
            stack_bytes=int(match["stack"]),
            shared_bytes=int(match["shared"]),
            local_bytes=int(match["local"]),
        )
        for match in _FUNCTION.finditer(run.stdout)
    )
    if run.returncode or not facts:
        raise UnreadableFile(
            "cubin",
            (run.stderr or run.stdout)[:120],
            "resource usage of at least one kernel, as cuobjdump prints it",
            "Use cuobjdump of CUDA 13, and a cubin that ptxas wrote.",
        )
    return facts


def cuobjdump_path() -> Path:
    """Return the path of cuobjdump: in its package, else on the PATH."""
    try:
        files = metadata.files("nvidia-cuda-cuobjdump") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "cuobjdump":
            return Path(str(file.locate()))
    found = shutil.which("cuobjdump")
    if found is None:
        raise MissingDependency(
            "cuobjdump",
            None,
            "the program in its package or on the PATH",
            "Install it with: pip install nvidia-cuda-cuobjdump",
        )
    return Path(found)


def unstated_roundings(ptx: str) -> tuple[str, ...]:
    """Return float instructions that ptxas may contract: mul, add, sub, mad without .rn."""
    return tuple(match.strip() for match in _UNSTATED.findall(ptx))


def fused_instructions(ptx: str) -> tuple[str, ...]:
    """Return the fma instructions, whether written or made by the front end."""
    return tuple(match.strip() for match in _FMA.findall(ptx))
