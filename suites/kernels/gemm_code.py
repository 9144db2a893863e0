"""What a GEMM kernel's PTX and cubin have to show, whatever its operands are.

Owns the readings: bytes that barriers expect, TMA boxes and stores, matrix instructions, registers.
Refuses to pass over what it cannot find: a reading that is missing fails. Kept honest by
suites/kernels/gemm/test_sm90_gemm_bf16.py, which reads PTX with another number in it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from degarble.kernels.gemm import problem as facts
from degarble.kernels.runtime.compiling import cubin_facts, unstated_roundings

if TYPE_CHECKING:
    from degarble.kernels.gemm.problem import GemmForm
    from degarble.kernels.runtime.compiling import CompiledKernel

_EXPECT = re.compile(r"mbarrier\.arrive\.expect_tx\S+ \S+, \[[^\]]+\], (%r\d+|\d+);")
_LOAD = re.compile(r"cp\.async\.bulk\.tensor\.[23]d\.shared::c")
_STORE = re.compile(r"cp\.async\.bulk\.tensor\.2d\.global")
_WGMMA = re.compile(r"wgmma\.mma_async\S+")


def expected_bytes(ptx: str) -> set[int]:
    """Return what the barriers of the ring are told to expect."""
    found = set()
    for operand in _EXPECT.findall(ptx):
        if operand.startswith("%"):
            moved = re.search(rf"mov\.b32 \s*{operand}, (\d+);", ptx)
            assert moved, f"{operand} is no constant"
            found.add(int(moved[1]))
        else:
            found.add(int(operand))
    return found


def wgmmas(ptx: str) -> list[str]:
    """Return the matrix instructions in the order of the text."""
    return _WGMMA.findall(ptx)


def boxes(load: facts.Load) -> int:
    """Return how many boxes bring a load: one, or row by row so many of 256 words."""
    most = 256 * 4  # PTX ISA 9.1, 5.5.3: extents of a box
    return 1 if load.row_bytes <= most else load.matrices * load.rows * load.row_bytes // most


def complaints(
    kernel: CompiledKernel, form: GemmForm, *, issued: int, stores: int | None = None
) -> list[str]:
    """Say what differs from the derived facts. ptxas is not asked whether it serialises wgmma:

    kernels start with enough registers for that. `issued` is how often a stage's loads are written,
    `stores` how many TMA stores there are, where it is not one for each piece of a tile.
    """
    (code,) = cubin_facts(kernel.cubin)
    pieces = form.tactic.columns // facts.PIECE_COLUMNS if stores is None else stores
    figures = {
        "spills": (code.spills, False),
        "registers at launch": (code.registers <= facts.registers_at_launch(form), True),
        "expected bytes": (expected_bytes(kernel.ptx), {facts.transaction_bytes(form)}),
        "loads": (len(_LOAD.findall(kernel.ptx)), issued * sum(map(boxes, facts.loads(form)))),
        "stores": (len(_STORE.findall(kernel.ptx)), pieces),
        "registers of roles": (
            sorted(map(int, re.findall(r"setmaxnreg\S+ \s*(\d+);", kernel.ptx))),
            sorted(role.registers for role in facts.roles(form)),
        ),
        "roundings unstated": (unstated_roundings(kernel.ptx), ()),
    }
    return [
        f"{name}: got {got}, want {want}" for name, (got, want) in figures.items() if got != want
    ]
