"""Plant faults in the kernels around attention: cache, heads, softmax, compressor, indexer, mHC.

The records are those of cutedsl_faults. A function in a module that several kernels share is
replaced for one of them only, so that no other kernel is compiled with the fault. Keys are split
from 577 on; `beside` then replaces the size of a split (64 keys instead), which is no fault. Faults
that would read memory out of bounds are left out.
"""

from __future__ import annotations

import math
from importlib import import_module
from typing import TYPE_CHECKING, Any

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.runtime.modules import module_of
from degarble.suites.backends.cutedsl.cutedsl_faults import Fault

if TYPE_CHECKING:
    from collections.abc import Callable

_ATTEND, _SCORES = "sm90_sparse_attention", "sm90_indexer_scores"
_GATHER, _MERGE = (
    "degarble.kernels.attention.gather",
    "degarble.kernels.attention.simt_attention_merge",
)
_WEIGHING = "degarble.kernels.indexer.sm90_indexer_scores"
_POOL, _MIX = "degarble.kernels.cache.problem", "degarble.kernels.rows.mhc_problem"
SPLITS_OF_A_TILE = (("degarble.kernels.attention.problem", "TILES_OF_SPLIT", 1),)
_LONG = 4  # lengths that see more entries than are chosen
_LONGER = 7  # lengths of which many tokens do: scores that are rounded change the choice of some
_NEGATIVE = 0x8000_0000  # the least bits of a float32 below zero
_LAST_BITS = 0x0007_FFFF  # of a key: without them sign, exponent, four bits of a mantissa


def _float32(number: float) -> Any:
    return import_module("cutlass").Float32(number)


def _pairs_swapped(true: Any, numbers: Any, registers: Any, *, back: bool) -> Any:
    swapped = [numbers[place ^ 1] for place in range(len(numbers))]
    return true(swapped, registers, back=back)


def _without_sink(true: Any, total: Any, peak: Any, _sink: Any) -> Any:
    return true(total, peak, _float32(-float("inf")))


def _sink_twice(true: Any, total: Any, peak: Any, sink: Any) -> Any:
    return true(total, peak, ops.add_rn(sink, math.log(2)))


def _one_less(true: Any, key: Any, width: Any) -> Any:
    return true(key, width - 1)


def _without_oldest(true: Any, lists: Any, tile: Any, widths: Any, how: Any) -> Any:
    cutlass = import_module("cutlass")
    thread, _, _ = cutlass.cute.arch.thread_idx()
    oldest = (tile == 0) & (thread % how.threads == 0)  # the window's list comes first
    return ops.select(oldest, cutlass.Int32(-1), true(lists, tile, widths, how))


def _scaled_by_128(true: Any, *given: Any) -> Any:
    *others, (scale, *more) = given
    return true(*others, (ops.multiply_rn(scale, 2.0), *more))


def _first_for_none(true: Any, *given: Any) -> Any:
    return ops.maximum(true(*given), 0)


def _one(_true: Any, _peak: Any, _largest: Any) -> Any:
    return _float32(1.0)


def _own_window_alone(true: Any, gates: Any, latents: Any, *rest: Any) -> Any:
    return true(gates[len(gates) // 2 :], latents[len(latents) // 2 :], *rest)


def _not_divided(true: Any, totals: Any, weighted: Any) -> Any:
    weight, total = true(totals, weighted)
    return weight, type(total)(1.0)


def _turned_at_the_end(true: Any, tensors: Any, told: Any, form: Any) -> Any:
    window, sequence, last, *rest = told
    return true(tensors, (window, sequence, last + (form.ratio - 1), *rest), form)


def _scores_read(change: Callable[[Any], Any]) -> Callable[..., None]:
    """simt_indexer_topk.load_scores that changes each score but -inf, of what is not seen.

    A score is compared as digits, as a key and as itself: all have to be of the same number.
    """

    def load(true: Any, tensors: Any, scores: Any, *rest: Any) -> None:
        true(tensors, scores, *rest)
        for place in range(import_module("cutlass").cute.size(scores)):
            score = _float32(scores[place])
            scores[place] = ops.select(score == -float("inf"), score, change(score))

    return load


def _negated(score: Any) -> Any:
    return ops.multiply_rn(score, -1.0)


def _coarse(score: Any) -> Any:
    """Return the number of a key without its last bits; those of a negative one's are inverted."""
    number = import_module("cutlass").Uint32
    bits, low = ops.bits_of(score), number(_LAST_BITS)
    return ops.number_of(ops.select(bits >= number(_NEGATIVE), bits | low, bits & ~low))


def _as_e4m3(score: Any) -> Any:
    cutlass, words = (
        import_module("cutlass"),
        import_module("degarble.kernels.primitives.device_words"),
    )
    text = "cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r1}, {$r0};"
    code = cutlass.Uint32(words.emit(text, cutlass.Uint16, score, _float32(0.0)))
    return words.e4m3_number(code)


def _not_rectified(_true: Any, low: Any, high: Any) -> Any:
    return import_module(_WEIGHING).pair_rounded(low, high)


def _neighbour(true: Any, column: Any, form: Any) -> Any:
    return true(column, form) ^ 1


def _one_more(true: Any, position: Any, ratio: Any) -> Any:
    return true(position, ratio) + 1


def _one_fewer(true: Any, position: Any, ratio: Any) -> Any:
    seen = true(position, ratio)  # fewer than none says that the token is another sequence's
    return seen - ops.select(seen > 0, type(seen)(1), type(seen)(0))


def _a_place_later(true: Any, table: Any, registers: Any, place: Any) -> Any:
    position, lane = place
    return true(table, registers, (position + 1, lane))


def _as_it_is(_true: Any, numbers: Any, *_rest: Any) -> Any:
    return list(numbers)


def _rows_left(_true: Any, _lines: Any, told: Any, *_rest: Any, **_more: Any) -> Any:
    _, before, _ = told
    return before, [_float32(1.0)] * len(before), _float32(1.0)


def _but_the_largest(true: Any, base: Any, operands: Any, part: int, form: Any) -> None:
    if part != 0:
        true(base, operands, part, form)


def _reversed_gates(true: Any, words: Any, gates: Any) -> Any:
    return true(words, gates[::-1])


def _spread(place_of: Any, post_of: Any, row_of: Any) -> Callable[..., None]:
    """simt_mhc.spread_out with another place of a stream, weight of the layer, or mix."""

    def spread(_true: Any, tensors: Any, place: Any, chunk: Any, chunks: Any) -> None:
        mhc, cutlass = import_module("degarble.kernels.rows.simt_mhc"), import_module("cutlass")
        token, first = place
        words = mhc.read_streams(tensors, first, chunks)
        layer = mhc.registers_of(mhc.WORDS, 1)
        own = cutlass.Int64(token) * cutlass.Int64(chunks) + cutlass.Int64(chunk)
        cutlass.cute.autovec_copy(tensors.layer[None, own], layer[None, 0])
        post = mhc.loaded_numbers(tensors.post, token)
        start = token * mhc.STREAMS
        mix = [mhc.loaded_numbers(tensors.mix, start + row) for row in range(mhc.STREAMS)]
        numbers = [mhc.numbers_of(each) for each in (*words, mhc.words_at(layer, 0))]
        for stream in range(mhc.STREAMS):
            weights = [*row_of(mix, stream), post_of(post[stream])]
            made = [mhc.facts.weighted(weights, list(each)) for each in zip(*numbers, strict=True)]
            at = first + cutlass.Int64(place_of(stream)) * cutlass.Int64(chunks)
            mhc.store(tensors.out, at, mhc.rounded_words(made))

    return spread


def _column(mix: Any, stream: int) -> Any:
    return [row[stream] for row in mix]


_TRANSPOSED = _spread(lambda at: at, lambda post: post, lambda mix, stream: mix[stream])
_HALVED = _spread(lambda at: at, lambda post: ops.multiply_rn(post, 0.5), _column)
_REVERSED = _spread(lambda at: 3 - at, lambda post: post, _column)


def _scales_reversed(
    true: Any, tensors: Any, place: Any, start: Any, scales: Any, form: Any
) -> Any:
    entry = form.format
    block = place // (entry.block // import_module("degarble.kernels.primitives.kv_problem").HALF)
    moved = import_module("cutlass").Int64(entry.quantised // entry.block - 1 - 2 * block)
    return true(tensors, place, start, scales + moved, form)


def _neighbours_scales(
    true: Any, tensors: Any, place: Any, start: Any, scales: Any, form: Any
) -> Any:
    return true(tensors, place, start, scales ^ form.format.scale_bytes, form)


def _of(
    name: str, kernel: str, function: str, instead: Callable[..., Any], component: str, **more: Any
) -> Fault:
    module = more.pop("module", module_of(kernel))
    return Fault(name, kernel, module, function, instead, component, **more)


FAULTS = (
    _of("pairs of queries swapped", "simt_qnorm_rope", "turned_words", _pairs_swapped,
        "q_head_norm_rope", cause="M28"),
    _of("pairs of the latent swapped", "simt_kv_write", "turned_words", _pairs_swapped,
        "kv_norm_rope", cause="M28"),
    _of("positions a place later", "simt_qnorm_rope", "load_turn", _a_place_later,
        "q_head_norm_rope", cause="M28"),
    _of("sink left out", _ATTEND, "inverse_total", _without_sink, "attend", module=_MERGE,
        cause="M30"),
    _of("sink counted twice", _ATTEND, "inverse_total", _sink_twice, "attend", module=_MERGE,
        cause="M30"),
    _of("logits scaled by another width", _ATTEND, "weigh", _scaled_by_128, "attend",
        module="degarble.kernels.attention.sm90_attention_turns", cause="M29"),
    _of("window of one less", _ATTEND, "slot_of", _without_oldest, "attend", module=_GATHER,
        prompts=_LONG, cause="M34"),
    _of("last of each list left out", _ATTEND, "within", _one_less, "attend", module=_GATHER,
        cause="M34"),
    _of("no slot read as the first", _ATTEND, "slot_of", _first_for_none, "attend",
        module=_GATHER, cause="M35"),
    _of("splits merged as equals", _ATTEND, "factor_of", _one, "attend", module=_MERGE,
        beside=SPLITS_OF_A_TILE, cause="M30"),
    _of("overlap dropped", "simt_compressor", "part_sums", _own_window_alone, "compressor.pool",
        module=_POOL, cause="M30"),
    _of("gates not normalised", "simt_compressor", "sums_of_parts", _not_divided, "compressor.pool",
        module=_POOL, cause="M30"),
    _of("entry turned at its window's end", "simt_compressor", "write_slot", _turned_at_the_end,
        "compressor.pool", cause="M28"),
    _of("smallest scores chosen", "simt_indexer_topk", "load_scores", _scores_read(_negated),
        "indexer.topk", prompts=_LONG, cause="M31"),
    _of("scores compared as E4M3", "simt_indexer_topk", "load_scores", _scores_read(_as_e4m3),
        "indexer.topk", prompts=_LONGER, cause="M31"),
    _of("scores compared coarsely", "simt_indexer_topk", "load_scores", _scores_read(_coarse),
        "indexer.topk", prompts=_LONGER, cause="M31"),
    _of("negative products kept", _SCORES, "rectified_pair", _not_rectified, "indexer.scores",
        module=_WEIGHING, cause="M31"),
    _of("weights of the neighbouring heads", _SCORES, "head_of_column", _neighbour,
        "indexer.scores", module=_WEIGHING, cause="M31"),
    # Whose row does not exist yet: attention is handed a choice that it cannot follow.
    _of("an entry too early", _SCORES, "visible_of", _one_more, "indexer.scores", also="attend",
        cause="M34"),
    _of("an entry too late", _SCORES, "visible_of", _one_fewer, "indexer.scores", cause="M34"),
    _of("not transformed", "simt_indexer_operand", "transformed", _as_it_is, "indexer.q",
        cause="M24"),
    _of("Sinkhorn without rows", "simt_mhc", "rows_divided", _rows_left, "hc_pre", module=_MIX,
        cause="M23"),
    _of("mix the other way round", "simt_mhc", "spread_out", _TRANSPOSED, "hc_post",
        cause="M23"),
    _of("layer without its factor", "simt_mhc", "spread_out", _HALVED, "hc_post", cause="M23"),
    _of("streams reversed", "simt_mhc", "spread_out", _REVERSED, "hc_post", cause="M23"),
    _of("gates of streams reversed", "simt_mhc", "collapsed", _reversed_gates, "hc_pre",
        cause="M23"),
    _of("projection without its largest part", "simt_mhc_project", "add_part", _but_the_largest,
        "hc_pre", cause="M23"),
    _of("scales of blocks reversed", "simt_kv_read", "decoded", _scales_reversed, "kv_write",
        cache="fp8", cause="M32"),
    _of("scales of the neighbouring entry", "simt_kv_read", "decoded", _neighbours_scales,
        "kv_write", cache="fp8", cause="M32"),
)  # fmt: skip
ATTENTION_BY_NAME = {fault.name: fault for fault in FAULTS}
