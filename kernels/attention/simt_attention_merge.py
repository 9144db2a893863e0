"""Merge the splits of sparse attention: out = sum_s exp2(peak_s - peak) sums_s / (total + sink).

The second kernel of sparse attention with more splits than merge in a cluster, and the arithmetic
that the merges in a cluster share. Reads sums [T, splits, H, 512] and (peak, total) [T, splits, H,
2] in float32; peaks are to base 2. A thread block has a head of a token, a thread four of its 512
values. Splits are added in their order relative to the largest peak, so the result is the same in
every run. A split without keys has peak -inf and total 0: its sums are not used, they may be
uninitialised.
"""

from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint8, Uint32, cute

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.attention import instructions as ptx
from degarble.kernels.attention.problem import MERGED_AT_ONCE, MergeForm, MergeProblem
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.runtime.kernel import Kernel, Operand, Presence, Storage
from degarble.kernels.runtime.pdl import EARLY, follow

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
VALUES = 4  # of a thread
THREADS = rows.WIDTH // VALUES


class MergeAddresses(NamedTuple):
    """Operands and results in global memory, as 64-bit addresses."""

    sums: Any  # float32 [T, splits, H, 512]
    stats: Any  # float32 [T, splits, H, 2]: peak, total
    sink: Any  # float32 [H]
    out: Any  # BF16 [T, H, 512]
    lse: Any  # float32 [T, H]


# ---- device --------------------------------------------------------------------------------------


def finite(peak: Any) -> Any:
    """Return the peak to subtract: 0 where it is -inf. Trap: -inf - -inf is NaN."""
    return ops.select(peak == -float("inf"), Float32(0.0), peak)


def inverse_total(total: Any, peak: Any, sink: Any) -> Any:
    """Return 1 / (sum of shares + sink's share), or 0 where both are 0."""
    # The sink is a logit to base e, peaks are to base 2.
    own = ptx.power_of_two(ops.subtract_rn(ops.multiply_rn(sink, LOG2_E), finite(peak)))
    both = ops.add_rn(total, own)
    return ops.select(both == 0.0, Float32(0.0), ops.divide_rn(1.0, both))


def lse_of(total: Any, peak: Any) -> Any:
    """Return the natural logarithm of the sum over keys."""
    return ops.multiply_rn(ops.add_rn(finite(peak), ptx.binary_logarithm(total)), LN_2)


def factor_of(peak: Any, largest: Any) -> Any:
    """Return the factor that rescales a split's sums to the largest peak."""
    return ptx.power_of_two(ops.subtract_rn(peak, finite(largest)))


def sink_of(start: Any, head: Any, sinks: cutlass.Constexpr) -> Any:
    """Return a head's sink; -inf where there are none."""
    return ptx.single_at(start + Int64(head) * 4) if sinks else Float32(-float("inf"))


class ReadSplit(NamedTuple):
    """What a thread has of one split."""

    counts: Any  # whether the split is there, and has keys
    total: Any
    factor: Any
    words: list[Any]  # four float32


def words_of(split: Any, extents: tuple[Any, Any], start: Any) -> list[Any]:
    """Issue the reads of a thread's sums of a split; nothing waits for its total."""
    heads, splits = extents
    at = start + Int64(ops.minimum(split, splits - 1)) * Int64(heads) * (4 * rows.WIDTH)
    return ptx.words_if(at, ops.select(split < splits, Uint32(1), Uint32(0)), VALUES)


def split_of(split: Any, splits: Any, lanes: tuple[Any, Any], words: list[Any]) -> ReadSplit:
    """Return a split's sums beside its total and factor, which come from its lane."""
    lane = ops.minimum(split, splits - 1)
    total, factor = (cute.arch.shuffle_sync(each, lane) for each in lanes)
    # A split without keys: its sums may be uninitialised, and are not used.
    return ReadSplit((split < splits) & (total != 0.0), total, factor, words)


def added_splits(total: Any, sums: Any, some: list[ReadSplit]) -> Any:
    """Add splits to a thread's sums in their order; return the total."""
    for each in some:
        total = ops.select(each.counts, ops.fma_rn(each.total, each.factor, total), total)
        for i in range(VALUES):
            added = ops.fma_rn(ops.number_of(each.words[i]), each.factor, sums[i])
            sums[i] = ops.select(each.counts, added, sums[i])
    return total


def places_of(
    addresses: MergeAddresses, extents: tuple[Any, Any], place: tuple[Any, Any, Any]
) -> tuple[Any, Any]:
    """Return the addresses of a lane's peak and total, and of a thread's sums of the first split.

    Each lane reads the peak and the total of one split, so every warp has all of them at once.
    """
    (heads, splits), (token, head, thread) = extents, place
    first = Int64(token) * Int64(splits) * Int64(heads) + Int64(head)
    own = ops.minimum(thread % rows.LANES, splits - 1)
    stats_at = addresses.stats + (first + Int64(own) * Int64(heads)) * 8
    return stats_at, addresses.sums + (first * rows.WIDTH + Int64(thread) * VALUES) * 4


def merged(
    places: tuple[Any, Any],
    extents: tuple[Any, Any],
    sinks: tuple[Any, Any],
    form: Any,
) -> tuple[list[Any], Any, Any]:
    """Return a thread's four values of a head as two words, the total, and the largest peak.

    Sinks are the address of all heads', and the head.
    """
    (_, splits), (stats_at, start) = extents, places
    peak, of_split = ptx.single_at(stats_at), ptx.single_at(stats_at + 4)
    # Asked for before anything is known of the splits: one wait for both.
    asked = [words_of(Int32(i), extents, start) for i in range(form.at_once)]
    sink = sink_of(*sinks, form.sinks)
    # Lanes without a split repeat the last one's peak.
    largest = peak
    for distance in (1, 2, 4, 8, 16):
        largest = ptx.larger(largest, cute.arch.shuffle_sync_bfly(largest, offset=distance))
    factor = factor_of(peak, largest)
    total = Float32(0.0)
    sums = cute.make_rmem_tensor(VALUES, Float32)
    sums.fill(0.0)
    some = [split_of(Int32(i), splits, (of_split, factor), asked[i]) for i in range(form.at_once)]
    total = added_splits(total, sums, some)
    inverse = inverse_total(total, largest, sink)
    words = [
        ptx.pair_rounded(*(ops.multiply_rn(sums[i + j], inverse) for j in range(2)))
        for i in range(0, VALUES, 2)
    ]
    return words, total, largest


@cute.kernel
def merge_kernel(
    addresses: MergeAddresses, extents: tuple[Any, ...], form: cutlass.Constexpr
) -> None:
    """Merge one head of one token per thread block."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    heads, _ = extents
    token, head = block // heads, block % heads
    places = places_of(addresses, extents, (token, head, thread))
    follow()
    words, total, largest = merged(places, extents, (addresses.sink, head), form)
    number = Int64(token) * Int64(heads) + Int64(head)
    ptx.store_8(addresses.out + (number * rows.WIDTH + Int64(thread) * VALUES) * 2, words)
    if thread == 0:
        ptx.store_single(addresses.lse + number * 4, lse_of(total, largest))


@cute.jit
def launch_merge(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Any, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch; extents are heads, splits and thread blocks."""
    heads, splits, blocks = extents
    addresses = MergeAddresses(*(Int64(pointer.toint()) for pointer in pointers))
    merge_kernel(addresses, (heads, splits), form).launch(
        grid=[blocks, 1, 1], block=[THREADS, 1, 1], use_pdl=EARLY, stream=stream
    )


# ---- host ----------------------------------------------------------------------------------------

_Operand = Operand[MergeProblem]
_FP32 = Storage(Uint8, torch.float32, 16, assumed=4)
_NUMBERS, _OUT = Storage(Uint8, torch.float32, 4), Storage(Uint8, torch.bfloat16, 16, assumed=4)
_SINKS = Presence[MergeProblem](lambda of: of.sinks, "V4 has one a head, V3.2 none.")


def choose_form(problem: MergeProblem, target: str) -> MergeForm:
    """Return the form that loads all splits at once."""
    at_once = next(each for each in MERGED_AT_ONCE if each >= problem.splits)
    return MergeForm(target, problem.sinks, at_once)


def refuse_form(problem: MergeProblem, form: MergeForm) -> None:
    """Raise on a form that would leave out splits."""
    if problem.splits > form.at_once:
        raise InvalidArgument(
            "form of a merge", form, f"at_once of {problem.splits} at least",
            "Leave the form out: the problem chooses it.",
        )  # fmt: skip


KERNEL = Kernel[MergeProblem, MergeForm](
    entry=launch_merge,
    operands=(
        _Operand("sums", _FP32, lambda p: (p.tokens, p.splits, p.heads, rows.WIDTH)),
        _Operand("stats", _FP32, lambda p: (p.tokens, p.splits, p.heads, 2), label="peaks"),
        _Operand("sink", _NUMBERS, lambda p: (p.heads,), _SINKS, label="sinks"),
        _Operand(
            "out", _OUT, lambda p: (p.tokens, p.heads, rows.WIDTH), output=True, label="output"
        ),
        _Operand("lse", _NUMBERS, lambda p: (p.tokens, p.heads), output=True, label="LSE"),
    ),
    choose_form=choose_form,
    kinds=((Int32,) * 3,),
    numbers=lambda of: (
        (of.problem.heads, of.problem.splits, of.problem.tokens * of.problem.heads),
    ),
    work=lambda problem: problem.tokens,
    refuse_form=refuse_form,
)
compile_form = KERNEL.compile_form
