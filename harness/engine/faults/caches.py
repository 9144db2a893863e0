"""Faults of KV caches: M12 shared view, M13 row layout, M32 scales, O20 to O23 pages and slots."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.gain_fit import FAINT, fitted, gain_variant, is_named, of_record
from degarble.harness.engine.faults.model_faults import (
    FaultVariant,
    ModelFault,
    Reach,
    with_inputs,
    with_outputs,
)
from degarble.harness.engine.faults.stale_memory import counts_of, differs
from degarble.harness.formats.codec import decode_array, encode_array
from degarble.harness.formats.number_formats import E4M3
from degarble.harness.model.family import family_of
from degarble.harness.report.number_text import number
from degarble.references.facts import spans_of
from degarble.references.numerics import E4M3_LARGEST, FP8_FLOOR, power_of_two_above

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext

    Tensors = Mapping[str, Tensor]
    Read = Callable[[Tensor], Tensor]  # a sequence's rows as they are read back


# --------------------------------------------------------------------------------------------------
# M13: KV cache rows are written in one layout and read in another.
#
# A page stores all values first and then all scales, but is read as rows of values and scale; rows
# of FP8 values, scales and rotated BF16 dims are read as plain FP8 (vllm issues 40991 and 48611).
# Both layouts occupy the same bytes, so nothing asserts: from the second token on a scale is four
# value bytes, of any size. Blame falls on the component that writes the rows; its healthy rows may
# be rounded or exact.
#
# Shape letters: T rows, D dims of a row, C blocks of a row, S bytes.

_BLOCK = 64  # dims of one scale in V4's rows; V3.2's rows hold two of them each
_ROW_WRITERS = frozenset({"attn.kv_write", "attn.compressor.write"})
_REMEDY = "One record of the row for writer and reader; write a ramp and read it back."


def _encoded(rows_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Return FP8 codes [T, D] and float32 scales [T, C] of rows."""
    blocks = rows_TD.float().unflatten(-1, (-1, _BLOCK))
    scales = blocks.abs().amax(-1).clamp(min=1e-4) / 448
    codes = encode_array(blocks / scales[..., None], E4M3)
    return codes.flatten(-2), scales


def _decoded(codes_TD: Tensor, scales_TC: Tensor) -> Tensor:
    values = decode_array(codes_TD, E4M3).unflatten(-1, (-1, _BLOCK))
    rows_TD: Tensor = (values * scales_TC[..., None]).flatten(-2)
    return rows_TD


def _planar_as_rows(rows_TD: Tensor) -> Tensor:
    codes, scales = _encoded(rows_TD)
    octets = scales.contiguous().view(torch.uint8).reshape(len(scales), -1)
    page = torch.cat((codes.flatten(), octets.flatten()))
    rows_TS = page.reshape(len(codes), -1)
    width = codes.shape[1]
    found = rows_TS[:, width:].contiguous().view(torch.float32)
    return _decoded(rows_TS[:, :width].contiguous(), found)


def _without_scales(rows_TD: Tensor) -> Tensor:
    codes, scales = _encoded(rows_TD)
    return _decoded(codes, torch.ones_like(scales))


def _neighbour_scales(rows_TD: Tensor) -> Tensor:
    codes, scales = _encoded(rows_TD)
    return _decoded(codes, scales.roll(1, -1))


def _bytes_of_numbers(rows_TD: Tensor) -> Tensor:
    """Read BF16 rows as plain FP8: the first half of the bytes, one value each."""
    octets = rows_TD.to(torch.bfloat16).contiguous().view(torch.uint8)
    return decode_array(octets[:, : rows_TD.shape[1]].contiguous(), E4M3)


def _row_fault(
    variant: str, title: str, action: str, change: Callable[[Tensor], Tensor]
) -> ModelFault:
    def applies_to(context: ComponentContext) -> bool:
        return context.role in _ROW_WRITERS

    def way(context: ComponentContext, every: bool) -> FaultVariant:
        def changed(
            _inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
        ) -> Mapping[str, Tensor]:
            rows = outputs["out"].flatten(1)
            width = rows.shape[1] // _BLOCK * _BLOCK
            if not len(rows) or not width:
                return outputs
            made = rows.clone()
            made[:, :width] = change(rows[:, :width]).to(rows.dtype)
            if not every:
                made[:, : width // 2] = rows[:, : width // 2]
            return {**outputs, "out": made.reshape(outputs["out"].shape)}

        of = "" if every else ", the second half of every row"
        return FaultVariant(f"{action} {context.name}{of}", with_outputs(changed))

    def variants(context: ComponentContext) -> Iterator[FaultVariant]:
        yield way(context, every=True)
        yield way(context, every=False)

    effect = "attention reads noise, often huge or NaN, from the cache"
    return ModelFault(f"M13.{variant}", title, effect, _REMEDY, applies_to, variants)


def _beside_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    """Yield variants with the rows of a neighbouring slot; unwritten slots are zeros."""
    for shift, words in ((1, "the row after its own"), (-1, "the row before its own")):
        change = with_outputs(partial(_beside, shift))
        yield FaultVariant(
            f"{words} in every slot at {context.name}",
            change,
            {"shift": shift},
            needs_whole_call=True,
        )


def _beside_signature(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    """Propose them unless all rows are zeros, which give no evidence of an offset."""
    rows = record.outputs.get("out")
    if rows is not None and len(rows) > 1 and bool(rows.any()):
        yield from _beside_variants(context)


def _beside(shift: int, _inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Any:
    rows = outputs["out"]
    at = torch.arange(len(rows)) + shift
    found = rows[at.clamp(0, max(0, len(rows) - 1))]
    inside = ((at >= 0) & (at < len(rows))).reshape(-1, *[1] * (rows.ndim - 1))
    return {**outputs, "out": torch.where(inside, found, torch.zeros_like(found))}


CACHE_ROWS_FAULTS = (
    ModelFault(
        id="M13.slot_beside",
        title="Rows are written to the slot next to their own",
        effect="every token attends to its neighbours' rows in the place of its own",
        remedy="A slot is page times page size plus place; write a ramp and read it back.",
        applies_to=lambda context: context.role in _ROW_WRITERS,
        variants=_beside_variants,
        signature=_beside_signature,
    ),
    _row_fault(
        "planar_as_rows",
        "A page with all scales after all values is read row by row",
        "reading a page of values and scales as rows at",
        _planar_as_rows,
    ),
    _row_fault(
        "without_scales",
        "Rows of FP8 with scales are read as plain FP8",
        "FP8 rows read without their scales at",
        _without_scales,
    ),
    _row_fault(
        "neighbour_scales",
        "Every block of a row is read with the scale of the block before",
        "the scale of the block before at",
        _neighbour_scales,
    ),
    _row_fault(
        "numbers_as_fp8",
        "Rows of BF16 are read as plain FP8",
        "BF16 bytes read as FP8 at",
        _bytes_of_numbers,
    ),
)


# --------------------------------------------------------------------------------------------------
# M32: cached rows are written with one FP8 scale and read with another.
#
# A row is written once and read as key and as value; its scale must be applied on both paths and by
# every reader (sglang issues 34765 and 20705). On the value path alone the output is off by a gain,
# on the key path alone the logits are. A wrong scale at the writer changes only the latent dims, as
# rotated ones have no scale.
#
# Shape letters: T tokens, C latent, B blocks.


_CACHE_SCALE_WRITERS = ("attn.kv_write", "attn.compressor.write")
PLANTED = (0.05, 0.5, 2.0, 20.0)
_READ = {
    "window": ("window", "state_window"),
    "entries": ("compressed", "state_compressed"),
    "rows": ("rows", "state_rows"),
    "older rows": ("state_window", "state_compressed", "state_rows"),
}


def _latent(context: ComponentContext) -> tuple[int, int]:
    """Return the columns of a row that have scales, and how many share one."""
    config = context.bound.config
    return family_of(config).cached_latent(config)


def _written(context: ComponentContext, factor: float) -> FaultVariant:
    width, _ = _latent(context)
    words = f"latents written with a scale that is {number(factor)} times the reader's"

    def change(_inputs: Tensors, outputs: Tensors) -> Tensors:
        out = outputs["out"].clone()
        out[..., :width] = (out[..., :width].double() * factor).to(out.dtype)
        return {**outputs, "out": out}

    return FaultVariant(words, with_outputs(change), {"factor": factor})


def _written_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    for factor in PLANTED:
        yield _written(context, factor)


def _written_signature(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    (width, _), c, e = _latent(context), record.outputs["out"], record.expected["out"]
    gain = fitted(c[..., :width], e[..., :width]) if c.shape == e.shape else None
    if gain is not None:
        for value in _short(gain):
            yield _written(context, value)


def _short(gain: float) -> Iterator[float]:
    found = {float(f"{gain:.{digits}g}"): None for digits in (1, 2, 3)}
    yield from (value for value in found if is_named(gain, value))
    yield gain


def _block_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    """Yield variants that read codes with the scales of other blocks or rows."""
    width, block = _latent(context)
    for words, which in (
        ("every block with the scale of the first", lambda s: s[:, :1].expand(s.shape)),
        ("every row with the scales of the row before", lambda s: s.roll(1, 0)),
        ("every row of a pair with the other's scales", partial(_of_pair, 0)),
        ("every row of a pair from the last on with the other's scales", partial(_of_pair, 1)),
        ("blocks with their scales in the reverse order", lambda s: s.flip(1)),
        ("every block with the largest scale of its row", lambda s: s.amax(1, keepdim=True)),
        ("scales left out", torch.ones_like),
    ):
        yield FaultVariant(words, with_outputs(partial(_rescaled, width, block, which)))


def _of_pair(last: int, scale_TB: Tensor) -> Tensor:
    """Exchange scales within pairs of rows, counted from the first row or (`last`) the last.

    A row without a partner gets 2^-127.
    """
    slot = torch.arange(len(scale_TB))
    slot = slot.flip(0) if last else slot
    other = slot ^ 1
    # `other` is a slot; slots count from the last row if `last`.
    row = (len(scale_TB) - 1 - other) if last else other
    found = scale_TB[row.clamp(0, len(scale_TB) - 1)]
    return torch.where((other < len(scale_TB))[:, None], found, 2.0**-127)


def _rescaled(width: int, block: int, which: Any, inputs: Tensors, outputs: Tensors) -> Tensors:
    out = outputs["out"].clone()
    given = inputs["x"][..., :width] if "x" in inputs else inputs["latent"]
    if not len(out):
        return outputs
    amax_TB = given.float().reshape(len(out), -1, block).abs().amax(-1)
    scale_TB = power_of_two_above(amax_TB.clamp(min=FP8_FLOOR) * (1.0 / E4M3_LARGEST))
    factor_TB = which(scale_TB) / scale_TB
    read = out[..., :width].float().reshape(len(out), -1, block) * factor_TB[..., None]
    out[..., :width] = read.flatten(1).to(out.dtype)
    return {**outputs, "out": out}


def _value_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    del context
    for factor in PLANTED:
        yield gain_variant(f"values read without their scale: {number(factor)}", factor)


def _value_signature(_context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    gain = of_record(record)
    if gain is None or abs(gain - 1) <= FAINT:
        return  # no cache's scale is as near 1 as that: M43 tells a gain as the number that it is
    for value in _short(gain):
        yield gain_variant(f"values read without their scale: {number(value)}", value)


def _reader(context: ComponentContext, what: str, factor: float) -> FaultVariant:
    del context
    names = _READ[what]

    def change(inputs: Tensors) -> Tensors:
        scaled = {n: inputs[n].double() * factor for n in names if n in inputs}
        return {**inputs, **scaled}

    words = f"the {what} read with a scale of {number(factor)}"
    return FaultVariant(words, with_inputs(change), {"factor": factor})


def _reader_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    names = {each.name for each in context.component.inputs}
    for what, read in _READ.items():
        if names & set(read):
            for factor in (0.5, 2.0, 1 / E4M3_LARGEST):
                yield _reader(context, what, factor)


def _is_attention(context: ComponentContext) -> bool:
    return context.role == "attn.attend"


CACHE_SCALES_FAULTS = (
    ModelFault(
        id="M32.written",
        title="Latents are written with another scale than they are read with",
        effect="all latent dims of the cache are off by one factor, rotated dims are right",
        remedy="Record the scale that the writer used and let every reader take it.",
        applies_to=lambda context: context.role in _CACHE_SCALE_WRITERS,
        variants=_written_variants,
        signature=_written_signature,
    ),
    ModelFault(
        id="M32.blocks",
        title="Cached blocks are read with the scales of other blocks",
        effect="blocks of a row, or rows, are off by powers of two",
        remedy="Keep scales next to their values, in one order for writer and reader.",
        applies_to=lambda context: context.role in _CACHE_SCALE_WRITERS,
        variants=_block_variants,
    ),
    ModelFault(
        id="M32.values",
        title="The value path does not apply the cache's scale",
        effect="attention's output is off by the scale, its weights are right",
        remedy="Apply the scale of a row in both products, or in neither and beforehand.",
        applies_to=_is_attention,
        variants=_value_variants,
        signature=_value_signature,
    ),
    ModelFault(
        id="M32.reader",
        title="One reader of the cache applies another scale",
        effect="one kind of rows is too large or too small compared with the others",
        remedy="Hand the writer's scale to every reader.",
        applies_to=_is_attention,
        variants=_reader_variants,
    ),
)


# --------------------------------------------------------------------------------------------------
# O20 to O23: the paged KV cache was never written, or is read by other pages, strides or slots.
#
# The address of a row is page * page size + slot. Where writer and reader disagree, the first page
# is often right (flashinfer issue 4044); where nothing was written the output is empty or garbage,
# as one team observed in its container for weeks. Rows of earlier calls and of this one lie in the
# same cache, so both arrive wrong.


PAGES = (16, 64, 256)  # rows of a page: FlashMLA has 64, others have these
# What holds new rows, and what holds those of earlier calls.
CACHES = {
    "window": "state_window", "compressed": "state_compressed", "rows": "state_rows",
    "keys": "state_keys",
}  # fmt: skip
_ROLES = ("attn.attend", "attn.indexer.scores")


def caches(context: ComponentContext) -> list[str]:
    """Return the caches that a component reads, by the input with their new rows."""
    names = {each.name for each in context.component.inputs}
    return [new for new, old in CACHES.items() if new in names and old in names]


def read_back(
    context: ComponentContext, words: str, new: str, read: Read, **where: Any
) -> FaultVariant:
    """Read back all rows of a cache, old and new ones of each sequence together."""
    block = context.component.block
    ratio = block.ratio if block is not None and new in ("compressed", "keys") else 0

    def passed(inputs: Tensors) -> Tensors:
        old = CACHES[new]
        made = [span.entries_made(ratio) if ratio else span.count for span in spans_of(inputs)]
        kept = counts_of(context, old, inputs) if old in inputs else [0] * len(made)
        before = inputs[old] if old in inputs else inputs[new][:0]
        if sum(made) != len(inputs[new]) or sum(kept) != len(before):
            return inputs  # other positions than the rows belong to
        olds, news = before.split(kept), inputs[new].split(made)
        rows = [read(torch.cat((a.to(b.dtype), b))) for a, b in zip(olds, news, strict=True)]
        found = dict(inputs)
        found[new] = torch.cat([r[k:] for r, k in zip(rows, kept, strict=True)])
        if old in inputs:
            parts = torch.cat([r[:k] for r, k in zip(rows, kept, strict=True)])
            found[old] = parts.to(before.dtype)
        return found

    return FaultVariant(
        f"{_pages_read(new)}: {words}", with_inputs(passed), {"cache": new, **where}
    )


def _pages_read(new: str) -> str:
    return {
        "window": "rows of the window",
        "compressed": "compressed entries",
        "rows": "cached rows",
        "keys": "the indexer's keys",
    }[new]


def _gathered(rows: Tensor, index: Tensor) -> Tensor:
    """Gather rows by number; rows beyond the end are zeros, as fresh memory is."""
    inside = (index >= 0) & (index < len(rows))
    found = rows[index.clamp(0, max(0, len(rows) - 1))] if len(rows) else rows
    return torch.where(inside.reshape(-1, *[1] * (rows.ndim - 1)), found, 0.0).to(rows.dtype)


def _never(rows: Tensor) -> Tensor:
    return torch.zeros_like(rows)


def _never_of_latent(width: int, rows: Tensor) -> Tensor:
    made = rows.clone()
    made[:, :width] = 0
    return made


def _every_other(rows: Tensor) -> Tensor:
    made = rows.clone()
    made[1::2] = 0
    return made


def _paged(page: int, shift: int, rows: Tensor) -> Tensor:
    """Begin each page some rows away from where the reader expects it."""
    at = torch.arange(len(rows))
    # The offset grows from page to page; the first page is right.
    return _gathered(rows, at + at // page * shift)


def _aliased(page: int, back: int, rows: Tensor) -> Tensor:
    """Make pages from the second on read the first one, or the previous one."""
    at = torch.arange(len(rows))
    number = at // page
    seen = torch.zeros_like(number) if not back else (number - back).clamp(min=0)
    return _gathered(rows, seen * page + at % page)


def _other_size(written: int, read: int, rows: Tensor) -> Tensor:
    """Take slots by one page size and pages by another."""
    at = torch.arange(len(rows))
    return _gathered(rows, at // read * written + at % read)


def _strided(gap: int, rows: Tensor) -> Tensor:
    """Read rows with a stride that is some elements too small or too large."""
    width = rows.shape[1]
    flat = rows.reshape(-1)
    at = torch.arange(len(rows))[:, None] * (width + gap) + torch.arange(width)
    inside = at < len(flat)
    found = flat[at.clamp(0, max(0, len(flat) - 1))] if len(flat) else rows
    return torch.where(inside, found, torch.zeros_like(found))


def _slots(shift: int, rows: Tensor) -> Tensor:
    return _gathered(rows, torch.arange(len(rows)) + shift)


def _unwritten(context: ComponentContext) -> Iterator[FaultVariant]:
    for new in caches(context):
        yield read_back(context, "never written", new, _never)
        yield read_back(context, "every second row never written", new, _every_other)
        half = partial(_never_of_latent, 64)
        yield read_back(context, "the first 64 columns never written", new, half)


def _pages(context: ComponentContext) -> Iterator[FaultVariant]:
    for new in caches(context):
        for page in (4, *PAGES):
            words = f"every page of {page} rows reads the first"
            yield read_back(context, words, new, partial(_aliased, page, 0), page=page)
            words = f"every page of {page} rows reads the one before"
            yield read_back(context, words, new, partial(_aliased, page, 1), page=page)
        for written, read in ((64, 16), (64, 32), (16, 64), (256, 64), (4, 8), (8, 4)):
            words = f"written in pages of {written} rows, read in pages of {read}"
            yield read_back(context, words, new, partial(_other_size, written, read), page=read)


def _strides(context: ComponentContext) -> Iterator[FaultVariant]:
    for new in caches(context):
        for page in (4, *PAGES):
            for shift in (1, -1):
                words = f"every page of {page} rows {shift:+d} row from its place"
                change = partial(_paged, page, shift)
                yield read_back(context, words, new, change, page=page, shift=shift)
        for gap in (-8, 8, 16):
            words = f"a row stride that is {gap:+d} elements off"
            yield read_back(context, words, new, partial(_strided, gap), gap=gap)


def _slot_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    for new in caches(context):
        for shift in (1, -1, 4):
            words = f"slots {shift:+d} from where rows were written"
            yield read_back(context, words, new, partial(_slots, shift), shift=shift)


def _where_differing(
    variants: Callable[[ComponentContext], Iterator[FaultVariant]],
) -> Callable[[ComponentContext, CallRecord], Iterator[FaultVariant]]:
    """Propose variants for the caches whose rows are not those that were written."""

    def signature(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
        changed = {new for new in caches(context) if _differs(record, new, CACHES[new])}
        for variant in variants(context) if changed else ():
            if variant.where["cache"] in changed:
                yield variant

    return signature


def _differs(record: CallRecord, *names: str) -> bool:
    pairs = [(record.inputs.get(name), record.implied.get(name)) for name in names]
    return any(
        a is not None and b is not None and (a.shape != b.shape or not torch.equal(a, b))
        for a, b in pairs
    )


def _page_fault(name: str, words: tuple[str, str, str], ways: Any) -> ModelFault:
    title, effect, remedy = words
    return ModelFault(
        id=name,
        title=title,
        effect=effect,
        remedy=remedy,
        applies_to=lambda context: context.role in _ROLES and bool(caches(context)),
        variants=ways,
        signature=_where_differing(ways),
        reach=Reach.EDGE,
    )


CACHE_PAGES_FAULTS = (
    _page_fault(
        "O20.never_written",
        (
            "The cache was never written, wholly or in part",
            "attention reads zeros: the output is empty, or the same for every prompt",
            "Call the write in front of the read, and check it by reading a row back.",
        ),
        _unwritten,
    ),
    _page_fault(
        "O21.page_size",
        (
            "Pages of the cache are read by another size or another table",
            "the first page is right, later ones are other tokens' rows",
            "Take page size and table from one place for writer and reader.",
        ),
        _pages,
    ),
    _page_fault(
        "O22.alignment",
        (
            "Pages or rows of the cache are read with another stride",
            "rows drift off their place, page by page or row by row",
            "Pad pages and rows alike on both sides; pass strides and not extents.",
        ),
        _strides,
    ),
    _page_fault(
        "O23.slot",
        (
            "Rows of the cache are read from slots next to those that they were written to",
            "every token sees its neighbours' rows in its own place",
            "Map slots once, and hand the mapping to writer and reader.",
        ),
        _slot_variants,
    ),
)


# --------------------------------------------------------------------------------------------------
# M12: one layer's cache view is used for all layers.
#
# A view by absolute offset ignores the layer, so that all layers read the rows of the first one, or
# a page table is off by one layer (ATOM issue 1466). Rows have the right shape and the right
# tokens, and every component replays clean. The fault is recognised by comparing the received rows
# with those that the same component of other layers received in the same step.


def _lower(context: ComponentContext) -> list[int]:
    """Yield the layers of the same kind before this one, the nearest first."""
    block = context.component.block
    found = []
    for layer in reversed(range(context.component.layer or 0)):
        other = context.sibling(f"layers.{layer}.{context.role}")
        if other is None or other.component.block is None or block is None:
            continue
        kinds = [(each.layer_type, each.ratio) for each in (block, other.component.block)]
        if kinds[0] == kinds[1]:
            found.append(layer)
    return found


def _names(context: ComponentContext) -> list[str]:
    """Return the inputs that are cache rows, new and older ones."""
    return [name for new in caches(context) for name in (new, CACHES[new])]


def _view_read(layer: int) -> str:
    return f"rows of layer {layer}'s cache"


def _taken(held: Tensors, inputs: Tensors) -> Tensors:
    """Replace inputs by another layer's rows where the shapes match."""
    fitting = {
        name: tensor.to(inputs[name].dtype)
        for name, tensor in held.items()
        if name in inputs and inputs[name].shape == tensor.shape
    }
    return {**inputs, **fitting}


def _view_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    layers, names = _lower(context), _names(context)
    for layer in dict.fromkeys((*layers[:1], *layers[-1:])):
        held: dict[str, Tensor] = {}

        def spied(call: Any, held: dict[str, Tensor] = held) -> Any:
            def watching(inputs: Tensors, weights: Mapping[str, Any]) -> Any:
                held.clear()
                held.update({name: inputs[name] for name in names if name in inputs})
                return call(inputs, weights)

            return watching

        beside = {f"layers.{layer}.{context.role}": spied}
        change = with_inputs(partial(_taken, held))
        yield FaultVariant(_view_read(layer), change, {"layer": layer}, beside)


def _signature(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    names = _names(context)
    if not any(differs(record, name) for name in names):
        return
    for layer, given in record.elsewhere.items():
        held = {name: given[name] for name in names if name in given}
        if any(_equal(held[name], record.inputs.get(name)) for name in held):
            yield FaultVariant(
                _view_read(layer), with_inputs(partial(_taken, held)), {"layer": layer}
            )


def _equal(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and torch.equal(one, other.to(one.dtype))


SHARED_VIEW_FAULTS = (
    ModelFault(
        id="M12.layer_view",
        title="A layer reads the rows of another layer's cache",
        effect="attention sees the right tokens as another layer keeps them",
        remedy="Put the layer into the offset of every view; no two views may share memory.",
        applies_to=lambda context: (
            context.role in _ROLES and bool(caches(context)) and bool(_lower(context))
        ),
        variants=_view_variants,
        signature=_signature,
        reach=Reach.EDGE,
        per_call=True,
    ),
)
