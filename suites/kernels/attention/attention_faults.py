"""Plant faults in sparse attention by replacing a function while a kernel is traced.

The kernels contain none of it. No fault can stop a GPU: barriers and addresses of stages stay as
they are. On an H200 attention_checks catches each, and passes the kernels without one.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.attention import problem as facts
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.targets import SM90A
from degarble.suites.kernels.attention import attention_checks as checks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from degarble.kernels.attention.problem import MergeForm, MergeProblem

_GATHER = "degarble.kernels.attention.gather"
_KERNEL = "degarble.kernels.attention.sm90_attention_kernel"
_TURNS = "degarble.kernels.attention.sm90_attention_turns"
_ENTRY = "degarble.kernels.attention.sm90_sparse_attention"
_MERGE = "degarble.kernels.attention.simt_attention_merge"
_EXCHANGE = "degarble.kernels.attention.exchange"


@dataclass(frozen=True)
class Fault:
    """A function of a module, what stands in its place, and a case that tells."""

    name: str
    module: str
    function: str
    instead: Callable[..., Any]
    case: checks.Case = field(default_factory=checks.Case)


def _without_sink(true: Any, total: Any, peak: Any, sink: Any) -> Any:
    return true(total, peak, sink - float("inf"))


def _nothing(_true: Any, *_given: Any) -> None:
    return None


def _first_only(_true: Any, *_given: Any) -> Any:
    return import_module("cutlass").Float32(1.0)


def _next_group(true: Any, *given: Any) -> Any:
    return true(*given) + 1


def _one_more(true: Any, key: Any, width: Any) -> Any:
    return true(key, width + 1)


def _one_less(true: Any, key: Any, width: Any) -> Any:
    return true(key, width - 1)


def _without_first(_true: Any, index: Any, capacity: Any) -> Any:
    return (index > 0) & (index < capacity), index >= capacity


def _two_further(true: Any, *given: Any) -> Any:
    return true(*given) + 2


def _never_far(true: Any, step: Any, walk: Any, widths: Any) -> Any:
    return true(step * 0, walk, widths)


def _own_half(_true: Any, _memory: Any, lane: Any, halves: Any, _entry: Any) -> Any:
    cutlass = import_module("cutlass")
    count = cutlass.cute.size(halves) // 2
    made = cutlass.cute.make_rmem_tensor(count, cutlass.Float32)
    for i in range(count):
        made[i] = ops.select(lane.half == 0, halves[i], halves[count + i])
    return made


def _first_twice(true: Any, stats: Any, both: Any) -> Any:
    return true(stats[:1] * 2, both[:1] * 2)


_DECODE, _WHOLE = checks.Case(far=600, seed=3), checks.Case(far=600, splits=1, seed=3)
_STEEP = checks.Case(far=600, splits=1, spread="steep", seed=3)  # peaks move far, or stay
# Prefill goes in turns, codes by way of BF16 rows.
_PREFILL = checks.Case(far=600, mode="prefill", seed=3)
_STEEP_PREFILL = replace(_STEEP, mode="prefill", entry="bf16")
# Few keys, so that the sink's share is no rounding error; two splits.
_SINK = checks.Case(near=9, far=20, mode="prefill", gaps=0.0, seed=3)
_SINK_APART = checks.Case(near=9, far=20, splits=2, gaps=0.0, seed=3)
_APART = checks.Case(far=600, splits=9, seed=3)
_LENGTHS = checks.Case(tokens=4, far=600, lengths=True, seed=5)
_FEW = checks.Case(tokens=64, near=9, far=4, gaps=0.0, heads=8, pages=(1, 1))
_NVFP4 = checks.Case(far=200, entry="nvfp4", splits=1, seed=4)

FAULTS = (
    Fault("sink left out", _MERGE, "inverse_total", _without_sink, _SINK),
    Fault("sink left out of the merge", _MERGE, "inverse_total", _without_sink, _SINK_APART),
    Fault("merge without rescaling", _MERGE, "factor_of", _first_only, _DECODE),
    Fault("merging kernel without rescaling", _MERGE, "factor_of", _first_only, _APART),
    Fault("mask of -1 dropped", _KERNEL, "hide", _nothing, _WHOLE),
    Fault("running peak without rescaling", _KERNEL, "rescale", _nothing, _STEEP),
    Fault("scale of the next group", _GATHER, "block_of_codes", _next_group, _WHOLE),
    Fault("scales of the next blocks of 16", _GATHER, "scale_of_chunk", _two_further, _NVFP4),
    Fault("list one too long", _GATHER, "within", _one_more, _LENGTHS),
    Fault("list one too short", _GATHER, "within", _one_less, _WHOLE),
    Fault("slot 0 taken for none", _GATHER, "counts", _without_first, _FEW),
    Fault("logits of half of the latent", _EXCHANGE, "joined", _own_half, _WHOLE),
    Fault("sums of the first split twice", _EXCHANGE, "added", _first_twice, _DECODE),
    Fault("first tile again and again", _GATHER, "tile_of_step", _never_far, _WHOLE),
)


# Of V3.2's form: far from what a gate passes, and its own way to codes and scales.
_OF_V32 = checks.Case(key=576, entry="fp8-v32", near=1300, far=None, seed=3)
_OF_V32_APART = replace(_OF_V32, splits=9)
_OF_V32_WHOLE = replace(_OF_V32, splits=1, near=200)


def _first_block(_true: Any, lane: Any, _part: int, _entry: Any) -> Any:
    return lane * 0


def _first_half(true: Any, lane: Any, _part: int, entry: Any) -> Any:
    return true(lane, 0, entry)


def _row_before(true: Any, scales: Any, turn: int, block: Any, entry: Any) -> Any:
    return true(scales, max(0, turn - 1), block, entry)


def _without_key(true: Any, width: int) -> Any:
    return true(width - 64)


FAULTS_OF_V32 = (
    Fault("one scale for all blocks", _GATHER, "block_of_codes", _first_block, _OF_V32),
    Fault("scales of the first half", _GATHER, "block_of_codes", _first_half, _OF_V32_WHOLE),
    Fault("scale of the row before", _GATHER, "scale_of_turn", _row_before, _OF_V32_WHOLE),
    Fault("stages of values 512 wide", _KERNEL, "layout_of_values", _without_key, _OF_V32_WHOLE),
    Fault("a turned key left out", _GATHER, "copy_values", _nothing, _OF_V32_WHOLE),
    Fault("a merge without rescaling", _MERGE, "factor_of", _first_only, _OF_V32),
    Fault("merging kernel without factors", _MERGE, "factor_of", _first_only, _OF_V32_APART),
)


def _first_rows(true: Any, cache: Any, pages: Any, settings: Any) -> Any:
    return true(cache, pages, settings).roll(1, 0)


def _no_factors(true: Any, memory: Any, lane: Any, state: Any, number: int) -> Any:
    factors = true(memory, lane, state, number)
    factors.fill(1.0)
    return factors


def _other_shares(true: Any, memory: Any, number: int, output: Any, entry: Any) -> Any:
    """Read where the other tile's shares are; one place for both would be right by good timing."""
    return true(memory, 1 - number, output, entry)[0], true(memory, number, output, entry)[1]


def _unswizzled(true: Any, *given: Any) -> Any:
    upper, _ = true(*given)
    return upper, upper + 512


def _first_token(true: Any, of: Any, how: Any) -> Any:
    return true(of._replace(place=of.place._replace(token=of.place.token * 0)), how)


def _one_chunk(true: Any, row: Any, chunk: Any) -> Any:
    return true(row, chunk * 0)


def _queries_of_first(true: Any, q: Any, place: Any, at: Any, chunks: int) -> None:
    true(q, place._replace(token=place.token * 0), at, chunks)


# More tokens than thread blocks that run at a time: some go on to a second one.
_PAIRS_STAY = replace(_OF_V32, tokens=100)
_STAYS = replace(_PREFILL, tokens=140, entry="bf16")
FAULTS_IN_TURNS = (
    Fault("queries of the first token", _GATHER, "bring_queries", _first_token, _STAYS),
    Fault("columns on their way in one place", _KERNEL, "staged_place", _one_chunk, _STAYS),
    Fault("queries of the first token in decoding", _KERNEL, "begin_queries", _queries_of_first,
          _PAIRS_STAY),
    Fault("columns of two splits in one place", _EXCHANGE, "place_of_received", _one_chunk,
          _PAIRS_STAY),
    Fault("mask of -1 dropped in turns", _KERNEL, "hide", _nothing, _PREFILL),
    Fault("own peaks without rescaling", _TURNS, "rescale_where", _nothing, _STEEP_PREFILL),
    Fault("taken peaks without rescaling", _TURNS, "taken_peaks", _no_factors, _STEEP_PREFILL),
    Fault("shares of the other tile", _TURNS, "shares_of", _other_shares, _PREFILL),
    Fault("shares of the other tile in decoding", _TURNS, "shares_of", _other_shares, _OF_V32),
    Fault("sums in decoding without rescaling", _TURNS, "rescale_where", _nothing,
          replace(_OF_V32, spread="steep")),
    Fault("rows four further on as if swizzled alike", _GATHER, "targets_of_rows", _unswizzled,
          replace(_PREFILL, entry="bf16")),
    Fault("rows of the page before", _ENTRY, "rows_of_cache", _first_rows, _PREFILL),
    Fault("a list one too short in turns", _GATHER, "within", _one_less, _PREFILL),
)  # fmt: skip


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Replace the function while a kernel is traced."""
    module = import_module(fault.module)
    true = getattr(module, fault.function)
    setattr(module, fault.function, lambda *given: fault.instead(true, *given))
    try:
        yield
    finally:
        setattr(module, fault.function, true)


def merge_of(fault: Fault) -> tuple[MergeProblem, MergeForm]:
    """Return the problem and the form of the kernel that merges a fault's splits."""
    told = import_module(_ENTRY).merge_problem(fault.case.problem)
    return told, import_module(_MERGE).choose_form(told, SM90A.name)


def compiled(fault: Fault) -> tuple[Any, Any]:
    """Compile both kernels of a fault's case with the fault, past every cache."""
    kernels = import_module(_ENTRY)
    merging = import_module(_MERGE)
    form = facts.choose_form(fault.case.problem, SM90A.name)
    with planted(fault):
        kernel = kernels.compile_form.__wrapped__(form, CompileSettings())
        merge = None
        if form.together == 0:
            _, merge_form = merge_of(fault)
            merge = merging.compile_form.__wrapped__(merge_form, CompileSettings())
    return kernel, merge


def verdict(fault: Fault, both: tuple[Any, Any]) -> str:
    """Say what the checks find wrong; empty where they find nothing."""
    kernels, merging = import_module(_ENTRY), import_module(_MERGE)
    case, given = fault.case, checks.drawn(fault.case)
    problem, (kernel, merge) = case.problem, both
    memory = checks.memory_for(case, given.q.device)
    tensors = checks.operands_of(given) | memory
    with planted(fault):
        tensors = kernels.KERNEL.before(problem, tensors, CompileSettings())
    form = facts.choose_form(problem, SM90A.name)
    kernels.KERNEL.launch(kernel, form, problem, tensors)
    if merge is not None:
        told, merge_form = merge_of(fault)
        merging.KERNEL.launch(merge, merge_form, told, tensors)
    return checks.complaint((memory["out"], memory["lse"]), checks.formula(case, given))
