"""Faults of memory: M34 stale state, M35 leaking padding or masked slots, M36 stale CUDA graphs."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.attention import (
    FAR,
    by_lists,
    joined,
    parts_of,
    with_empty,
    without,
)
from degarble.harness.engine.faults.kernel_tiles import PRODUCTS
from degarble.harness.engine.faults.model_faults import (
    FaultVariant,
    ModelFault,
    Reach,
    has_window,
    unrounded,
    with_config,
    with_facts,
    with_function,
    with_inputs,
    with_outputs,
    with_x,
)
from degarble.harness.engine.faults.regions import flat
from degarble.harness.model.config.config import compressor_windows
from degarble.harness.report.number_text import number
from degarble.references.facts import spans_of
from degarble.references.sparse_attention import indexer_scores, visible_entries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.attention import ListedAttention
    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext

    Tensors = Mapping[str, Tensor]
    Change = Callable[[Tensor, list[int]], Tensor]


# --------------------------------------------------------------------------------------------------
# M34: a sequence's cached state is stale, empty, shifted, or another sequence's.
#
# A window is not refilled after a prefix cache hit, a history is empty after a split, decoding
# pools its current tokens alone, the second chunk of a prompt takes the positions of the first
# (ATOM issue 1417, transformers issue 48721, llama.cpp issue 26509). Every component replays clean:
# the fault is in its inputs.


_ATTEND, _SCORES = "attn.attend", "attn.indexer.scores"
POOLS = ("attn.compressor.pool", "attn.indexer.compressor.pool")
ROWS = ("state_window", "state_compressed", "state_rows", "state_expanded", "state_keys")
WORDS = {
    "state_window": "the window", "state_compressed": "earlier entries",
    "state_rows": "earlier rows", "state_expanded": "earlier keys and values",
    "state_keys": "earlier keys of the indexer",
}  # fmt: skip


def counts_of(context: ComponentContext, name: str, inputs: Tensors) -> list[int]:
    """Return how many rows of a memory belong to each sequence of a call."""
    block = context.component.block
    starts = [span.start for span in spans_of(inputs)]
    if name == "state_window":
        reach = context.bound.config.sliding_window - 1
        return [min(start, reach) for start in starts]
    ratio = block.ratio if block is not None else 0
    return [start // ratio if ratio else start for start in starts]


def remembered(context: ComponentContext, words: str, name: str, change: Change) -> FaultVariant:
    """Return the variant that changes one memory of a sequence where it is received."""

    def passed(inputs: Tensors) -> Tensors:
        if name not in inputs:
            return inputs
        return {**inputs, name: change(inputs[name], counts_of(context, name, inputs))}

    return FaultVariant(f"{WORDS[name]}: {words}", with_inputs(passed), {"memory": name})


def by_sequence(rows: Tensor, counts: list[int], change: Callable[[Tensor], Tensor]) -> Tensor:
    """Change the rows of each sequence."""
    return torch.cat([change(part) if len(part) else part for part in rows.split(counts)])


def _zeros(rows: Tensor, _counts: list[int]) -> Tensor:
    return torch.zeros_like(rows)


def _rolled(shift: int, rows: Tensor, counts: list[int]) -> Tensor:
    return by_sequence(rows, counts, lambda part: part.roll(shift, 0))


def _last_zero(number: int, rows: Tensor, counts: list[int]) -> Tensor:
    def change(part: Tensor) -> Tensor:
        kept = part.clone()
        kept[max(0, len(part) - number) :] = 0
        return kept

    return by_sequence(rows, counts, change)


def _older_half_zero(rows: Tensor, counts: list[int]) -> Tensor:
    def change(part: Tensor) -> Tensor:
        kept = part.clone()
        kept[: (len(part) + 1) // 2] = 0
        return kept

    return by_sequence(rows, counts, change)


def _first_repeated(rows: Tensor, counts: list[int]) -> Tensor:
    return by_sequence(rows, counts, lambda part: part[:1].expand(part.shape).contiguous())


def _of_other(rows: Tensor, counts: list[int]) -> Tensor:
    """Return the next sequence's rows, repeated or cut to the required number."""
    parts = rows.split(counts)
    made = []
    for index, count in enumerate(counts):
        other = parts[(index + 1) % len(parts)]
        taken = other if len(other) else parts[index]
        made.append(taken.repeat(-(-count // max(1, len(taken))), *[1] * (rows.ndim - 1))[:count])
    return torch.cat(made)


_CHANGES: tuple[tuple[str, Change], ...] = (
    ("never refilled, zeros", _zeros),
    ("shifted by one row", partial(_rolled, 1)),
    ("shifted by one row the other way", partial(_rolled, -1)),
    ("the last row not written yet", partial(_last_zero, 1)),
    ("the last 4 rows not written yet", partial(_last_zero, 4)),
    ("the older half empty", _older_half_zero),
    ("the first row everywhere", _first_repeated),
    ("that of the next sequence", _of_other),
)


def _memories(context: ComponentContext) -> list[str]:
    return [each.name for each in context.component.inputs if each.name in ROWS]


def _row_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    for name in _memories(context):
        for words, change in _CHANGES:
            yield remembered(context, words, name, change)


def _rows(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    for variant in _row_variants(context):
        name = str(variant.where["memory"])
        if differs(record, name):
            yield variant
    for name in _memories(context):
        if differs(record, name):
            yield from _earlier(record, name)


def _earlier(record: CallRecord, name: str) -> Iterator[FaultVariant]:
    """Return the same rows as in an earlier call."""
    for other in record.earlier[::-1]:
        old = other.inputs.get(name)
        if old is not None and old.shape == record.inputs[name].shape:
            yield FaultVariant(
                f"{WORDS[name]}: as they were in step {other.step}",
                with_inputs(partial(_put, name, old)),
                {"memory": name, "step": other.step},
            )


def _put(name: str, value: Tensor, inputs: Tensors) -> Tensors:
    return {**inputs, name: value}


def differs(record: CallRecord, name: str) -> bool:
    """Return whether an input is not what its producers imply."""
    arrived, implied = record.inputs.get(name), record.implied.get(name)
    if arrived is None or implied is None or arrived.shape != implied.shape:
        return False
    return not torch.equal(arrived, implied)


def _pool_state(words: str, change: Callable[[Tensors, int], Tensors], before: int) -> FaultVariant:
    return FaultVariant(words, with_inputs(lambda inputs: {**inputs, **change(inputs, before)}))


def _pool_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    block = context.component.block
    assert block is not None, "a pool is in a block"
    before = block.ratio if compressor_windows(block) == 2 else 0
    if before:
        yield _pool_state("only the current tokens pooled", _without_before, before)
        yield _pool_state("the previous window's state not moved", _not_moved, before)
    yield _pool_state("a state of zeros", _zero_state, before)
    yield _pool_state("a state whose gates see nothing", _blind_state, before)
    yield _pool_state("a state shifted by one row", _rolled_state, before)
    yield _pool_state("the state of the next sequence", _other_state, before)
    yield _pool_state("latents of the state without their gates", _gates_zero, before)


def _without_before(inputs: Tensors, before: int) -> Tensors:
    latent, gate = inputs["state_latent"].clone(), inputs["state_gate"].clone()
    latent[:, :before], gate[:, :before] = 0.0, -torch.inf
    return {"state_latent": latent, "state_gate": gate}


def _not_moved(inputs: Tensors, before: int) -> Tensors:
    made = {}
    for name in ("state_latent", "state_gate"):
        state = inputs[name].clone()
        state[:, :before] = inputs[name][:, before:]
        made[name] = state
    return made


def _zero_state(inputs: Tensors, _before: int) -> Tensors:
    return {name: torch.zeros_like(inputs[name]) for name in ("state_latent", "state_gate")}


def _blind_state(inputs: Tensors, _before: int) -> Tensors:
    return {"state_gate": torch.full_like(inputs["state_gate"], -torch.inf)}


def _rolled_state(inputs: Tensors, _before: int) -> Tensors:
    return {name: inputs[name].roll(1, 1) for name in ("state_latent", "state_gate")}


def _other_state(inputs: Tensors, _before: int) -> Tensors:
    return {name: inputs[name].roll(1, 0) for name in ("state_latent", "state_gate")}


def _gates_zero(inputs: Tensors, _before: int) -> Tensors:
    return {"state_gate": torch.zeros_like(inputs["state_gate"])}


def _pools(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    if differs(record, "state_latent") or differs(record, "state_gate"):
        yield from _pool_variants(context)


def _seen_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    """Yield variants with another count of visible rows."""
    if context.role == _SCORES:
        yield FaultVariant("the newest entry not visible yet", with_outputs(_newest_masked))
        yield FaultVariant("the oldest entry not visible", with_outputs(_oldest_masked))
        yield FaultVariant("nothing visible", with_outputs(_all_masked))
        if context.component.block is not None and context.component.block.ratio:
            words = "an entry visible before its window is full"
            yield FaultVariant(words, with_function(context, _one_early))
    elif has_window(context):
        window = context.bound.config.sliding_window
        for other in (window - 1, max(1, window // 2), 1):
            words = f"a window of {other} and not {window}"
            yield FaultVariant(words, _windowed(context, other), {"window": other})
        for words, gone in (
            ("the token itself not visible", _itself),
            ("the last place of every list not visible", _last_places),
        ):
            change = partial(by_lists, partial(without, gone))
            last = gone is _last_places  # of the longest sequence, where none are chosen
            yield FaultVariant(words, with_function(context, change), needs_whole_call=last)


def _itself(listed: ListedAttention) -> Tensor:
    return listed.place == listed.near - 1


def _last_places(listed: ListedAttention) -> Tensor:
    return _itself(listed) | (listed.place == FAR + listed.far - 1)


def _one_early(facts: Any, inputs: Tensors, _weights: Any) -> Tensors:
    """Make one entry too many visible; an entry not yet written is zeros."""
    ratio, spans = facts.decoder_block.ratio, spans_of(inputs)
    counts = [(each.entries_before(ratio), each.entries_made(ratio)) for each in spans]
    keys = joined(inputs, "keys", counts)
    widest, made = max(map(len, keys)), []
    for span, own in zip(spans, keys, strict=True):
        some = span.tokens
        filled = torch.nn.functional.pad(own, (0, 0, 0, widest - len(own)))
        seen = visible_entries(inputs["positions"][some], ratio) + 1
        part = indexer_scores(
            inputs["q"][some], filled, inputs["weights"][some], seen, facts.numerics
        )
        made.append(part)
    return {"out": torch.cat(made)}


def _newest_masked(_inputs: Tensors, outputs: Tensors) -> Tensors:
    out = outputs["out"]
    last = out.isfinite().sum(-1, keepdim=True) - 1
    number = torch.arange(out.shape[1])
    return {**outputs, "out": out.masked_fill(number == last, -torch.inf)}


def _oldest_masked(_inputs: Tensors, outputs: Tensors) -> Tensors:
    out = outputs["out"].clone()
    out[:, :1] = -torch.inf
    return {**outputs, "out": out}


def _all_masked(_inputs: Tensors, outputs: Tensors) -> Tensors:
    return {**outputs, "out": torch.full_like(outputs["out"], -torch.inf)}


def _windowed(context: ComponentContext, window: int) -> Any:
    """Take another window size; of the received memory only that span is left."""
    own = with_facts(context, partial(with_config, sliding_window=window))

    def trimmed(inputs: Tensors) -> Tensors:
        if "state_window" not in inputs:
            return inputs
        counts = counts_of(context, "state_window", inputs)
        parts = inputs["state_window"].split(counts)
        kept = [part[max(0, len(part) - window + 1) :] for part in parts]
        return {**inputs, "state_window": torch.cat(kept)}

    trim = with_inputs(trimmed)
    return lambda call: trim(own(call))


STALE_MEMORY_FAULTS = (
    ModelFault(
        id="M34.rows",
        title="Rows that earlier calls left are stale, empty, shifted, or another sequence's",
        effect="tokens attend to what was never said; a first call is exact",
        remedy="Compare cold and warm runs; refill what the prefix cache does not hold.",
        applies_to=lambda context: context.role in (_ATTEND, _SCORES),
        variants=_row_variants,
        signature=_rows,
        reach=Reach.EDGE,
    ),
    ModelFault(
        id="M34.pool_state",
        title="The compressor's carried state is empty, stale, or another sequence's",
        effect="entries of windows that a call begins in the middle of are wrong",
        remedy="Carry latents and gates of both windows over every split.",
        applies_to=lambda context: context.role in POOLS,
        variants=_pool_variants,
        signature=_pools,
        reach=Reach.EDGE,
    ),
    ModelFault(
        id="M34.visible",
        title="Tokens see other rows than they may",
        effect="the newest or oldest rows are missing, or one is seen too early",
        remedy="Count what is visible by floor((t + 1) / ratio), and the token into its window.",
        applies_to=lambda context: (
            context.role == _SCORES or (context.role == _ATTEND and has_window(context))
        ),
        variants=_seen_variants,
    ),
)


# --------------------------------------------------------------------------------------------------
# M35: padding, masked or empty slots leak into real outputs.
#
# A null slot is read as row 0 while only its logit is masked, and 0 times NaN is NaN; rows past the
# end share a tile with the last row; padded columns of scales contain leftovers; rows that do not
# exist take part in a softmax as zeros (vllm issues 57158, 38148 and 48898, flashinfer issues 3057
# and 3650). Full tiles and full lists are exact.


TILES = (128, 64, 32)
_PADDED_K = 16  # columns of K in the last block: one block of scales


def _first_for_none(inputs: Tensors) -> Tensors:
    """Clamp -1 to 0 without a mask: the first row always takes part."""
    return {**inputs, "chosen": inputs["chosen"].clamp(min=0)}


def _spoilt_by_none(value: float, inputs: Tensors, outputs: Tensors) -> Tensors:
    """Set the tokens whose list has an empty slot to `value`."""
    spoilt = (inputs["chosen"] < 0).any(-1)
    made = outputs["out"].clone()
    made[spoilt] = value
    return {**outputs, "out": made}


def _null_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    del context
    yield FaultVariant("empty slots read as row 0", with_inputs(_first_for_none))
    yield FaultVariant("NaN from empty slots", with_outputs(partial(_spoilt_by_none, math.nan)))
    yield FaultVariant(
        "zeros for tokens with empty slots", with_outputs(partial(_spoilt_by_none, 0.0))
    )


def _slot_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    for step in (1, 64):
        held = f", of lists filled up to {step}" if step > 1 else ""
        read = with_function(context, partial(by_lists, partial(with_empty, step)))
        words = f"empty places read as the first slot of the cache{held}"
        # How many places are empty depends on the longest sequence of the call.
        yield FaultVariant(words, read, {"step": step}, needs_whole_call=True)


def _zero_rows(missing: int | None, facts: Any, inputs: Tensors, weights: Any) -> Tensors:
    """Let missing rows of the window take part as zeros: they have weight but no value."""
    parts = parts_of(facts, inputs, weights)
    window = facts.config.sliding_window
    absent = (window - 1 - inputs["positions"]).clamp(min=0).double()
    if missing is not None:
        absent = torch.full_like(absent, float(missing))
    top = torch.maximum(parts.log_first, parts.log_second).clamp(min=0.0)
    shares = [torch.exp(log - top) for log in (parts.log_first, parts.log_second)]
    total = shares[0] * parts.first + shares[1] * parts.second
    # A row of zeros has logit 0: it adds exp(0) to the denominator and nothing else.
    more = absent[:, None, None] * torch.exp(-top) + torch.exp(parts.sink - top)
    out = total / (shares[0] + shares[1] + more)
    return {"out": out.to(facts.numerics.store)}


def _masked_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    words = "rows of the window that are not there yet count as zeros"
    yield FaultVariant(words, with_function(context, partial(_zero_rows, None)))
    for count in (1, 63):
        words = f"{count} rows of padding count as zeros"
        yield FaultVariant(
            words, with_function(context, partial(_zero_rows, count)), {"rows": count}
        )


def _last_tile(value: float, tile: int, _inputs: Tensors, outputs: Tensors) -> Tensors:
    """Set the rows that share their tile with padding to `value`."""
    made = outputs["out"].clone()
    rows = flat(made)
    rows[len(rows) // tile * tile :] = value
    return {**outputs, "out": made}


def _tile_variants(_context: ComponentContext) -> Iterator[FaultVariant]:
    for tile in TILES:
        words = f"NaN in the last, unfilled tile of {tile} rows"
        yield FaultVariant(words, with_outputs(partial(_last_tile, math.nan, tile)), {"tile": tile})
    words = "zeros in the last, unfilled tile of 128 rows"
    yield FaultVariant(words, with_outputs(partial(_last_tile, 0.0, 128)), {"tile": 128})


def _tiles(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    """Propose tiles only if some row is all NaN or zero."""
    rows = flat(record.outputs["out"])
    if bool((rows.isnan() | (rows == 0)).all(1).any()):
        yield from _tile_variants(context)


def _column(context: ComponentContext, factor: float) -> FaultVariant:
    def change(x: Tensor) -> Tensor:
        last = x[..., -_PADDED_K:].double() * factor
        return torch.cat((x[..., :-_PADDED_K].double(), last), dim=-1)

    words = f"the scale of the last {_PADDED_K} of K is {number(factor)} times its own"
    return FaultVariant(words, with_x(context, change), {"factor": factor})


def _column_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    for factor in (0.0, 8.0, 448.0):
        yield _column(context, factor)


def _columns(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    """Propose the fitted factor of the last block of K."""
    c, e = record.outputs["out"].double(), record.expected["out"].double()
    if c.shape != e.shape or not bool(c.isfinite().all()):
        return
    exact = with_facts(context, unrounded)(context.call)
    whole, without = (
        call(record.inputs, context.weights)["out"].double()
        for call in (exact, _column(context, 0.0).apply(exact))
    )
    part = (whole - without).flatten()
    energy = float(part @ part)
    if not energy:
        return
    factor = 1 + float((c - e).flatten() @ part) / energy
    if not math.isfinite(factor):
        return  # the twin is not finite where the candidate is
    short = dict.fromkeys((float(f"{factor:.2g}"), float(f"{factor:.3g}"), round(factor)))
    for value in (*short, factor):
        yield _column(context, float(value))


def _scale_variants(_context: ComponentContext) -> Iterator[FaultVariant]:
    """Yield variants with other scales in the last row, which shares its tile with padding."""
    for words, code in (("448", 0x7E), ("NaN", 0x7F), ("0", 0x00)):
        text = f"scales of the last row: {words}, as padding holds"
        yield FaultVariant(text, with_outputs(partial(_last_scales, code)))
    yield FaultVariant("scales of a row are the larger of a pair of rows", with_outputs(_paired))


def _last_scales(code: int, _inputs: Tensors, outputs: Tensors) -> Tensors:
    codes = outputs["block_scale"].view(torch.uint8).clone()
    flat(codes)[-1] = code
    return {**outputs, "block_scale": codes.view(outputs["block_scale"].dtype)}


def _paired(_inputs: Tensors, outputs: Tensors) -> Tensors:
    """Give both rows of a pair the larger scale; positive E4M3 and E8M0 codes sort like values."""
    codes = outputs["block_scale"].view(torch.uint8)
    rows = flat(codes)
    even = len(rows) // 2 * 2
    made = codes.clone()
    pairs = rows[:even].reshape(-1, 2, rows.shape[1])
    largest = pairs.amax(1, keepdim=True).expand(pairs.shape)
    flat(made)[:even] = largest.reshape(even, rows.shape[1])
    return {**outputs, "block_scale": made.view(outputs["block_scale"].dtype)}


def _lists(context: ComponentContext) -> bool:
    names = {each.name for each in context.component.inputs}
    return context.role == "attn.attend" and "chosen" in names


_REMEDY = "Fill padding with NaN once and require that outputs stay the same."

POISON_FAULTS = (
    ModelFault(
        id="M35.null_slot",
        title="Empty slots of the selection are read",
        effect="tokens that see little attend to row 0, or become NaN",
        remedy="Guard the load of data as well as that of scales and logits.",
        applies_to=_lists,
        variants=_null_variants,
    ),
    ModelFault(
        id="M35.first_slot",
        title="Empty places of the lists of slots are read as the first slot",
        effect="tokens attend many times to a row of whoever has the cache's first slot",
        remedy="-1 is no slot: mask its logit, and do not clamp it to 0.",
        applies_to=lambda context: context.role == "attn.attend" and has_window(context),
        variants=_slot_variants,
    ),
    ModelFault(
        id="M35.masked_rows",
        title="Rows that do not exist take part in the softmax",
        effect="the first tokens of a sequence are too quiet",
        remedy="Mask rows in front of the sequence to -inf before the maximum.",
        applies_to=lambda context: context.role == "attn.attend" and has_window(context),
        variants=_masked_variants,
    ),
    ModelFault(
        id="M35.shared_tile",
        title="Padding rows spoil the rows in the same tile",
        effect="the last rows are NaN or lost, full tiles are exact",
        remedy=_REMEDY,
        applies_to=lambda context: context.role in PRODUCTS,
        variants=_tile_variants,
        signature=_tiles,
    ),
    ModelFault(
        id="M35.padded_column",
        title="A padded column of scales is read from stale memory",
        effect="the last block of K counts too much or not at all",
        remedy="Write padded columns of scales, or make K a multiple of what is padded to.",
        applies_to=lambda context: (
            context.role in PRODUCTS and context.role not in {"head", "ffn.gate"}
        ),
        variants=_column_variants,
        signature=_columns,
    ),
    ModelFault(
        id="M35.padded_scales",
        title="Scales of padding rows reach real rows",
        effect="a row is decoded with a scale that is not its own",
        remedy=_REMEDY,
        applies_to=lambda context: (
            context.role.endswith("act_quant") and "block_scale" in context.component.outputs
        ),
        variants=_scale_variants,
    ),
)


# --------------------------------------------------------------------------------------------------
# M36: a CUDA graph is replayed with the metadata or buffers of its capture.
#
# Metadata that is allocated anew in every step is read at its address in the first step; a
# workspace is not cleared between replays; an output is not written again (vllm issues 35175, 46329
# and 44988). The first call is exact. Stale values are recognised among those that the same place
# had in earlier calls.


_METADATA = ("positions", "chosen", "experts", "weights", "tokens")
_READERS = (
    "attn.q_head_norm_rope", "attn.kv_norm_rope", "attn.inverse_rope", "attn.rope",
    "attn.indexer.q", "attn.attend", "ffn.experts.w13", "ffn.experts.w2", "ffn.experts.combine",
)  # fmt: skip
_SPLIT = (
    "attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wkv_a", "attn.wo", "attn.wo_b", "attn.wo_a",
    "ffn.shared.w13", "ffn.shared.w2", "ffn.w13", "ffn.w2", "ffn.experts.combine", "ffn.gate",
)  # fmt: skip
_LATEST = 3  # earlier calls that are looked at


def _captured(name: str) -> Any:
    """Keep the first value of each shape, and pass it on in all later calls."""

    def apply(call: Any) -> Any:
        kept: dict[tuple[int, ...], Tensor] = {}

        def faulty(inputs: Tensors, weights: Mapping[str, Any]) -> Any:
            if name not in inputs:
                return call(inputs, weights)
            own = inputs[name]
            # By shape, as a serving engine captures one graph for each batch size.
            stale = kept.setdefault(tuple(own.shape), own.clone())
            return call({**inputs, name: stale}, weights)

        return faulty

    return apply


def _stale_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    names = {each.name for each in context.component.inputs}
    for name in _METADATA:
        # Trap: memory is cut by positions; with stale ones rows would be missing.
        if name in names and not (name == "positions" and context.role == "attn.attend"):
            words = f"the {name} of the captured step in every later one"
            yield FaultVariant(words, _captured(name), {"input": name})


def _stale(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    for variant in _stale_variants(context):
        name = str(variant.where["input"])
        arrived, implied = record.inputs.get(name), record.implied.get(name)
        if arrived is None or implied is None or torch.equal(arrived, implied):
            continue
        for other in _latest(record):
            old = other.inputs.get(name)
            if old is not None and torch.equal(old, arrived):
                words = f"the {name} of step {other.step}"
                change = with_inputs(partial(_given, name, old))
                yield FaultVariant(words, change, {"input": name, "step": other.step})
                break


def _latest(record: CallRecord) -> list[CallRecord]:
    """Return the earlier calls, the captured one first."""
    return list(record.earlier)


def _given(name: str, value: Tensor, inputs: Tensors) -> Tensors:
    return {**inputs, name: value}


def _carrying(change: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Change an output by that of the previous call of the same shape."""

    def apply(call: Any) -> Any:
        kept: dict[tuple[int, ...], Tensor] = {}

        def faulty(inputs: Tensors, weights: Mapping[str, Any]) -> Any:
            outputs = dict(call(inputs, weights))
            shape = tuple(outputs["out"].shape)
            if shape in kept:
                outputs["out"] = change(outputs["out"], kept[shape])
            kept[shape] = outputs["out"].clone()
            return outputs

        return faulty

    return apply


def _added(out: Tensor, before: Tensor) -> Tensor:
    return (out.double() + before.double()).to(out.dtype)


def _kept(_out: Tensor, before: Tensor) -> Tensor:
    return before.clone()


def _half_kept(out: Tensor, before: Tensor) -> Tensor:
    """Leave the second half of the columns as in the previous call."""
    half = out.shape[-1] // 2
    return torch.cat((out[..., :half], before[..., half:]), dim=-1)


_CARRIED = (
    ("a workspace that still holds the call before", _added),
    ("the output of the call before", _kept),
    ("the second half of columns of the call before", _half_kept),
)


def _carried_variants(_context: ComponentContext) -> Iterator[FaultVariant]:
    for words, change in _CARRIED:
        yield FaultVariant(words, _carrying(change))


def _carried(_context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    shape = record.outputs["out"].shape
    same = [other for other in record.earlier if other.outputs["out"].shape == shape]
    for other in same[::-1][:_LATEST]:
        for words, change in _CARRIED:
            made = with_outputs(partial(_changed, change, other.outputs["out"]))
            yield FaultVariant(f"{words}, of step {other.step}", made, {"step": other.step})


def _changed(
    change: Callable[[Tensor, Tensor], Tensor], before: Tensor, _inputs: Tensors, outputs: Tensors
) -> Tensors:
    if outputs["out"].shape != before.shape:
        return outputs
    return {**outputs, "out": change(outputs["out"], before)}


GRAPH_STALENESS_FAULTS = (
    ModelFault(
        id="M36.metadata",
        title="A captured graph reads the metadata of the step that it was captured in",
        effect="the first step of a shape is exact; later ones take its positions or choices",
        remedy="Write metadata into persistent buffers that the graph knows.",
        applies_to=lambda context: context.role in _READERS,
        variants=_stale_variants,
        signature=_stale,
        reach=Reach.EDGE,
        per_call=True,
    ),
    ModelFault(
        id="M36.workspace",
        title="A workspace or an output of the call before is still there",
        effect="outputs hold what an earlier token produced",
        remedy="Clear workspaces inside the graph; write every output in every replay.",
        applies_to=lambda context: context.role in _SPLIT,
        variants=_carried_variants,
        signature=_carried,
        per_call=True,
    ),
)
