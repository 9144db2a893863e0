"""Flip one bit of one element of a weight, and see whether row, column, bit and codes are named.

    python -m degarble.suites.campaigns.causes.flipped_bits [--count N]

Planted into the linears of the small V4 (NVFP4), a tiny Llama and a tiny Qwen3-MoE of transformers
(NVFP4, FP8; Llama also INT8, INT4). Exactly 8 rows are kept that reach the element: their outputs
in its row differ by more than a healthy kernel may be off. Outcomes: `ok`; `place`, row and column
are named, but other codes or elements that fit as well; `silent`; `false`, something else is named;
`unseen`, fewer rows reach it.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.diagnose.trial import together
from degarble.harness.engine.faults.model_faults import CallRecord
from degarble.harness.engine.recover.described import describe
from degarble.harness.engine.recover.products import FEWEST_ROWS, views_of
from degarble.harness.formats.codec import pack_nibbles
from degarble.suites.campaigns.runner import CaseResult, arguments, run_campaign
from degarble.suites.museum.random_faults.stages import stage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import ComponentContext
    from degarble.harness.formats.weight import Weight
    from degarble.suites.museum.random_faults.stages import Stage

ROWS = 8
KINDS = (
    "v4 nvfp4-full", "llama nvfp4", "llama fp8", "llama int8", "llama int4", "qwen3_moe nvfp4",
    "qwen3_moe fp8",
)  # fmt: skip
CALLS = 3  # of each component: prompts, and a step of decoding


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


def in_model(kind: str, drawn: random.Random) -> tuple[str, str]:
    """Flip a bit in a model's weight, and return the outcome on 8 rows that reach it."""
    model = stage(kind)
    name, of = drawn.choice(_weights(kind))
    context = model.context(name)
    weight = model.candidate.weights_of(name)[of]
    row, column = (drawn.randrange(extent) for extent in weight.shape)
    bit = drawn.randrange(weight.quantised().format.element.bits)
    (call,) = together(context, _recorded(model, name, {of: flipped(weight, row, column, bit)}))
    rows = reaching(context, call, row)
    if len(rows) < ROWS:
        return "unseen", name
    kept = rows[torch.randperm(len(rows))[:ROWS]].sort().values
    return _outcome(context, [_cut(call, kept)], weight, (row, column, bit))


@cache
def _weights(kind: str) -> list[tuple[str, str]]:
    """The quantised matrices of components whose rows are tokens: component, and name in it."""
    model = stage(kind)
    return [
        (name, of)
        for name in model.calls
        for of, weight in model.candidate.weights_of(name).items()
        if ".experts." not in name and weight.is_quantised and len(weight.shape) == 2
        and list(views_of(model.context(name), _recorded(model, name, {})[0]))
    ]  # fmt: skip


def _recorded(model: Stage, name: str, changed: dict[str, Weight]) -> list[CallRecord]:
    """Compute a component's calls with other weights, and what the twin returns."""
    weights = {**model.candidate.weights_of(name), **changed}
    right = model.context(name)
    found = []
    with torch.inference_mode():
        for call in model.calls[name][:CALLS]:
            inputs = model.healthy.inputs(call)
            outputs = dict(model.candidate.calls[name](inputs, weights))
            expected = dict(right.call(inputs, right.weights))
            found.append(CallRecord(inputs, outputs, expected, {}, call.step))
    return found


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
    several = " or 0x" in said or "it as well" in said
    named = words in said and f", bit {bit})" in said and not several
    return "ok" if named else "place", detail


def flip(seed: int) -> CaseResult:
    """Flip one bit, and judge what is reported."""
    drawn, kind = random.Random(f"flipped {seed}"), KINDS[seed % len(KINDS)]
    torch.manual_seed(seed)
    return CaseResult(seed, kind, *in_model(kind, drawn))


def main() -> int:
    """Run the campaign; the exit status is 1 where another place is named."""
    asked = arguments((__doc__ or "").partition("\n")[0], count=300).parse_args()
    wanted = ("ok", "place", "silent", "unseen")
    return run_campaign("flipped_bits", flip, asked, wanted=wanted)


if __name__ == "__main__":
    sys.exit(main())
