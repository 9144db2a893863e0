"""Flip one bit of one element of a weight, and see whether row, column, bit and codes are named.

    python -m degarble.suites.campaigns.causes.flipped_bits [--count N]

Planted into the small V4 (NVFP4) and a tiny Llama of transformers (NVFP4, FP8, INT8, INT4). At
least 8 rows have to reach the element: their outputs in its row differ by more than a healthy
kernel may be off. Of V4 exactly 8 such rows are kept. Outcomes: `ok`; `place`, row and column are
named, the value without its code or with another one that fits as well; `silent`; `false`, another
place is named; `unseen`, fewer rows reach it.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.diagnose.trial import most_telling, together
from degarble.harness.engine.faults.model_faults import FaultVariant, with_weights
from degarble.harness.engine.recover.described import describe
from degarble.harness.engine.recover.products import FEWEST_ROWS, views_of
from degarble.harness.formats.codec import pack_nibbles
from degarble.suites.campaigns.causes.recovered_weights import edited, places
from degarble.suites.campaigns.runner import CaseResult, arguments, run_campaign
from degarble.suites.campaigns.traced_plants import AT, judged
from degarble.suites.engine.diagnosing import double

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext
    from degarble.harness.formats.weight import Weight

ROWS = 8
KINDS = ("small V4, nvfp4", "llama, nvfp4", "llama, fp8", "llama, int8", "llama, int4")
LINEARS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
RECIPE = "nvfp4-full"


def flipped(weight: Weight, row: int, column: int, bit: int) -> Weight:
    """Return a weight with one bit of one element's code flipped."""
    tensor = weight.quantised()
    codes = tensor.element_codes().clone()
    codes[row, column] ^= 1 << bit
    held = codes if tensor.nibble_order is None else pack_nibbles(codes, tensor.nibble_order)
    return replace(weight, codes=held, _decoded={})


def reaching(context: ComponentContext, record: CallRecord, row: int) -> Tensor:
    """The rows whose outputs show that a row of the first weight is another one."""
    for view in views_of(context, record):
        inside = view.first_row <= row < view.first_row + view.seen.shape[1]
        if inside and bool(view.wrong[:, row - view.first_row].any()):
            return view.at[view.wrong[:, row - view.first_row]]
    return torch.empty(0, dtype=torch.int64)


def _cut(record: CallRecord, rows: Tensor) -> CallRecord:
    def side(tensors: Any) -> dict[str, Tensor]:
        return {name: x[rows] if x.ndim else x for name, x in tensors.items()}

    inputs, outputs, expected = map(side, (record.inputs, record.outputs, record.expected))
    return replace(record, inputs=inputs, outputs=outputs, expected=expected, rows=(), owners=())


def in_v4(drawn: random.Random) -> tuple[str, str]:
    """Flip a bit in the small V4, and return the outcome on 8 rows that reach it."""
    model = double("v4", RECIPE)
    name = drawn.choice([each for each in places() if ".experts." not in each])
    planting = model.planting(name)
    of = drawn.choice(list(planting.weights))
    weight = planting.weights[of]
    row, column = (drawn.randrange(extent) for extent in weight.shape)
    bit = drawn.randrange(4)
    flip = partial(_xored, (row, column), 1 << bit)
    way = with_weights(lambda each, own: edited(own, flip) if each == of else own)
    records = model.sights(name, FaultVariant("a bit", way))
    context = model.naming(name)
    (call,) = together(context, records)
    context_rows = reaching(context, call, row)
    if len(context_rows) < ROWS:
        return "unseen", name
    kept = context_rows[torch.randperm(len(context_rows))[:ROWS]].sort().values
    return _outcome(context, [_cut(call, kept)], weight, (row, column, bit))


def _xored(at: tuple[int, int], bit: int, codes: Tensor, _scales: Tensor) -> None:
    codes[at] ^= bit


def in_llama(run: str, drawn: random.Random) -> tuple[str, str]:
    """Flip a bit in a linear of a tiny Llama, run it, and return the outcome where it differs."""
    path = drawn.choice(LINEARS)
    stored = weights(run)[f"layers.{AT}.{path}.weight"]
    tensor = stored.quantised()
    row, column = (drawn.randrange(extent) for extent in stored.shape)
    bit = drawn.randrange(tensor.format.element.bits)

    def plant(model: Any) -> None:
        made = flipped(stored, row, column, bit).values(torch.float32)
        module = model.model.layers[AT].get_submodule(path)
        module.weight.data = made.to(module.weight.dtype)

    origins = judged("llama", run, plant).origins
    known = [each for each in origins if each.component == f"layers.{AT}.{path}"]
    record = known[0].record if known else None
    if record is None:
        return "unseen", path
    origin = known[0]
    calls = together(origin.context, [record, *origin.more])
    calls = sorted(calls, key=lambda call: call is not most_telling(calls))
    if len(reaching(origin.context, calls[0], row)) < ROWS:
        return "unseen", path
    return _outcome(origin.context, calls, stored, (row, column, bit))


@cache
def weights(run: str) -> dict[str, Weight]:
    """What is stored of the tiny Llama, by the name of a parameter."""
    held: dict[str, Weight] = {}

    def look(model: Any) -> None:
        held.update(model.stored)

    judged("llama", run, look)
    return held


def _outcome(
    context: ComponentContext,
    calls: Sequence[CallRecord],
    weight: Weight,
    at: tuple[int, int, int],
) -> tuple[str, str]:
    row, column, bit = at
    assert FEWEST_ROWS <= ROWS
    with torch.no_grad():
        found = describe(context, calls)
    if found is None:
        return "silent", f"{context.name}: {at}"
    code = int(weight.quantised().element_codes()[row, column])
    words = f"(code {code:#x} became {code ^ (1 << bit):#x}"
    said = found.sentence
    detail = f"{context.name}: {at}: {said}"
    if f"row {row} of" not in said or f"in column {column} " not in said:
        return "false", detail
    named = words in said and f", bit {bit})" in said and " or 0x" not in said
    return "ok" if named else "place", detail


def flip(seed: int) -> CaseResult:
    """Flip one bit, and judge what is reported."""
    drawn, kind = random.Random(f"flipped {seed}"), KINDS[seed % len(KINDS)]
    torch.manual_seed(seed)
    run = kind.rpartition(" ")[2]
    outcome, detail = in_v4(drawn) if kind == KINDS[0] else in_llama(run, drawn)
    return CaseResult(seed, kind, outcome, detail)


def main() -> int:
    """Run the campaign; the exit status is 1 where another place is named."""
    asked = arguments((__doc__ or "").partition("\n")[0], count=300).parse_args()
    wanted = ("ok", "place", "silent", "unseen")
    return run_campaign("flipped_bits", flip, asked, wanted=wanted)


if __name__ == "__main__":
    sys.exit(main())
