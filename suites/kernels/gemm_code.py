"""What the PTX and cubin of a GEMM kernel have to show, against the derived facts of its form."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm import tensor_memory
from degarble.kernels.runtime.compiling import cubin_facts, unstated_roundings
from degarble.suites.kernels import tcgen05_words as words
from degarble.suites.kernels.sm100_model import CODE_BYTES, CORE_STRIDE, SCALE_STRIDE, SWIZZLE

if TYPE_CHECKING:
    from degarble.kernels.gemm.problem import GemmForm
    from degarble.kernels.runtime.compiling import CompiledKernel


# --------------------------------------------------------------------------------------------------
# Read from a GEMM kernel's PTX and cubin what does not depend on its operands.
#
# Bytes that barriers expect, TMA boxes and stores, matrix instructions, registers. A reading that
# is missing fails.

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
    pieces = form.tactic.folds * form.tactic.columns // facts.piece_columns(form.tactic)
    pieces = pieces if stores is None else stores
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


# --------------------------------------------------------------------------------------------------
# Compare the PTX and cubin of an sm_100a GEMM with the derived facts of its form.
#
# The readings are numbers in the text: bytes that barriers expect, boxes, matrix instructions and
# the words that they take, copies of scales, columns of tensor memory, places in shared memory,
# registers and spills. Words are compared with those that tcgen05_words makes. A reading that is
# missing fails.

REGISTERS = 255  # of a thread; CUDA C++ Programming Guide 13.0
KINDS = {
    "nvfp4": "kind::mxf4nvf4.block_scale.block16",
    "bf16": "kind::f16",
    "fp8_block": "kind::f8f6f4",
}
FORMATS = {"bf16": words.BF16_OF_F16, "fp8_block": words.E4M3_OF_F8F6F4}
_BARRIER = re.compile(r"mbarrier\.init\.shared\.b64 \s*\[(%r\d+)(?:\+(\d+))?\], (%r\d+);")
_WORD = r"(?:or\.b32 \s*%r\d+, %r\d+|mov\.b32 \s*%r\d+)"
FIRST_OF_PAIR = -(1 << 24) - 8  # what an address of a barrier is cut to: PTX ISA 9.1, peers
LEAST_WORD = 1 << 24  # of an instruction: its rows
_COLUMNS = re.compile(r"mov\.b32 \s*(%r\d+), (\d+);\s*tcgen05\.alloc\S+ \s*\[%r\d+\], (%r\d+);")


def barriers_of(ptx: str) -> list[int]:
    """Return where barriers lie, counted from the beginning of shared memory."""
    return list(arrivals_of(ptx))


def arrivals_of(ptx: str) -> dict[int, int]:
    """Return the arrivals that barriers wait for, by their places in shared memory."""
    found = {}
    for register, offset, count in _BARRIER.findall(ptx):
        written = re.findall(rf"add\.s32 \s*{register}, %r1, (\d+);", ptx)
        (arrivals,) = re.findall(rf"mov\.b32 \s*{count}, (\d+);", ptx)
        found[int(offset or written[0])] = int(arrivals)
    return found


def arrivals_wanted(form: GemmForm) -> list[int]:
    """Return arrivals in the order of the barriers: stages full, empty, sums full, given back."""
    stages, sums = tensor_memory.footprint(form).stages, tensor_memory.accumulators(form)
    released = [tensor_memory.arrivals_of_stage(form)]
    return (
        [1] * stages
        + released * stages
        + [1] * sums
        + [tensor_memory.arrivals_of_sums(form)] * sums
    )


def columns_allocated(ptx: str) -> int:
    """Return how many columns of tensor memory are asked for."""
    ((moved, columns, used),) = _COLUMNS.findall(ptx)
    assert moved == used
    return int(columns)


def immediates(ptx: str, pattern: str) -> list[int]:
    """Return the constants of instructions, in ascending order."""
    return sorted(map(int, re.findall(pattern + r", (\d+);", ptx)))


def wanted_words(form: GemmForm) -> dict[str, list[int]]:
    """Return what the text has to hold of descriptors and of addresses in tensor memory."""
    count, tactic = tensor_memory.instructions(form), form.tactic
    rows = tactic.together * tactic.rows
    along = [i * CODE_BYTES // words.ATOM for i in range(1, count)]
    # Eight rows are one core: the DSL names no distance to another.
    strides = [CORE_STRIDE * (load.rows > words.ROWS_OF_CORE) for load in facts.loads(form)[:2]]
    of_operands = sorted(words.operand_word(0, stride, SWIZZLE) for stride in strides)
    if form.operands != facts.NVFP4.name:
        return {
            "words of instructions": count
            * [words.dense_word(tactic.rows, tactic.columns, FORMATS[form.operands])],
            "words of operands": of_operands,
            "columns of scales": [],
            "steps along K": sorted(2 * along),
        }
    a, b = tensor_memory.first_columns(form)
    of_b = tensor_memory.scale_columns(form)[1]
    return {
        "words of instructions": count * [words.block_scaled_word(rows, tactic.columns)],
        "words of operands": sorted(of_operands + 2 * [words.operand_word(0, SCALE_STRIDE, 0)]),
        "columns of scales": [*range(a, a + 4 * count, 4), *range(b, b + of_b, 4)],
        "steps along K": sorted(2 * along),
    }


def found_words(ptx: str) -> dict[str, list[int]]:
    """Return what the text holds of them."""
    (base,) = re.findall(r"ld\.shared\.b32 \s*(%r\d+),", ptx)
    before = [part[-400:] for part in ptx.split("tcgen05.mma.")[:-1]]
    return {
        "words of instructions": [word for word in immediates(ptx, _WORD) if word >= LEAST_WORD],
        "words of operands": immediates(ptx, r"or\.b64 \s*%rd\d+, %rd\d+"),
        "columns of scales": immediates(ptx, rf"add\.s32 \s*%r\d+, {base}"),
        "steps along K": sorted(
            step for part in before for step in immediates(part, r"add\.s64 \s*%rd\d+, %rd\d+")
        ),
    }


def figures_of_clusters(ptx: str, form: GemmForm) -> dict[str, tuple[Any, Any]]:
    """Return what the text has of thread blocks that share loads or multiply together."""
    sharers, pair = tensor_memory.sharers(form), form.tactic.together > 1
    loads, releases = r"complete_tx::bytes\.multicast", r"tcgen05\.commit\S+multicast"
    other = 1 - pair  # groups of one are named 1, and loads of one are not named at all
    return {
        "loads shared": (len(re.findall(loads, ptx)), sum(count > 1 for count in sharers)),
        "releases shared": (len(re.findall(releases, ptx)), int(max(sharers) > 1) + pair),
        "loads for the pair": (
            len(re.findall(r"cp\.async\.bulk\.tensor\S+cta_group::2", ptx)),
            len(sharers) * pair,
        ),
        "the first one's barrier": (ptx.count(f", {FIRST_OF_PAIR};") > 0, pair),
        "of the other group": (len(re.findall(rf"tcgen05\S+cta_group::{1 + other}", ptx)), 0),
        "scales cleared for the other one": (
            ptx.count("st.shared::cluster.v4"),
            pair * tensor_memory.scale_copies(form) // tensor_memory.instructions(form),
        ),
        "end together": (len(re.findall(r"barrier\.cluster\.arrive;", ptx)), int(pair)),
        "sums given back to the first one": (
            len(re.findall(r"mbarrier\.arrive\S*shared::cluster", ptx)),
            int(pair),
        ),
    }


def sm100_complaints(kernel: CompiledKernel, form: GemmForm) -> list[str]:
    """Say what differs from the derived facts."""
    (code,) = cubin_facts(kernel.cubin)
    ptx, held = kernel.ptx, tensor_memory.footprint(form)
    pieces, group = tensor_memory.stores(form), f"cta_group::{form.tactic.together}"
    columns = form.tactic.columns // pieces
    barriers = arrivals_of(ptx)
    kind = f"tcgen05.mma.{group}.{KINDS[form.operands]}."
    figures = {
        "spills": (code.spills, False),
        "registers fit": (code.registers <= REGISTERS, True),
        "expected bytes": (expected_bytes(ptx), {facts.expected_bytes(form)}),
        "loads": (ptx.count("cp.async.bulk.tensor.2d.shared"), len(facts.loads(form))),
        "stores": (ptx.count("cp.async.bulk.tensor.2d.global"), pieces),
        "matrix instructions": (ptx.count(kind), tensor_memory.instructions(form)),
        "all matrix instructions": (ptx.count("tcgen05.mma"), tensor_memory.instructions(form)),
        "copies of scales": (
            ptx.count(f"tcgen05.cp.{group}.32x128b.warpx4"),
            tensor_memory.scale_copies(form),
        ),
        "reads of sums": (ptx.count(f"tcgen05.ld.sync.aligned.32x32b.x{columns}."), pieces),
        "columns": (columns_allocated(ptx), tensor_memory.columns_allocated(form)),
        "arrivals": ([barriers[at] for at in sorted(barriers)], arrivals_wanted(form)),
        "end of shared memory": (max(barriers) + facts.BARRIER_BYTES, held.total),
        "threads": (f".reqntid {tensor_memory.threads()}, 1, 1" in ptx, True),
        "roundings unstated": (unstated_roundings(ptx), ()),
    }
    found = found_words(ptx)
    figures |= {name: (found[name], want) for name, want in wanted_words(form).items()}
    figures |= figures_of_clusters(ptx, form)
    return [
        f"{name}: got {got}, want {want}" for name, (got, want) in figures.items() if got != want
    ]
