"""Edit weights at random places as no known fault does, and see what is recovered and described.

    python -m degarble.suites.campaigns.causes.recovered_weights [--count N]

An edit is planted into one linear, projection in groups or expert of a small V4: a flipped bit, a
bit of a block scale, rows copied from another place, a row left out, two signs. Outcomes: `ok`,
described by the weight, the row and what was edited; `silent`, nothing is said; `false`, something
else is said; `no effect`, within the budget. A false sentence is the only failure.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.engine.diagnose.trial import most_telling, together
from degarble.harness.engine.faults.model_faults import FaultVariant, with_weights
from degarble.harness.engine.faults.regions import full_name
from degarble.harness.engine.recover.described import describe
from degarble.harness.formats.codec import pack_nibbles
from degarble.suites.campaigns.runner import CaseResult, arguments, run_campaign
from degarble.suites.engine.diagnosing import double

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from degarble.harness.formats.weight import Weight

ROLES = frozenset({
    "attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_b", "attn.compressor.proj", "ffn.shared.w13",
    "ffn.shared.w2", "ffn.experts.w13", "ffn.experts.w2",
})  # fmt: skip
KINDS = ("bit", "scale bit", "rows copied", "row left out", "two signs")
RUN = 8  # rows that are copied
RECIPE = "nvfp4-full"


class Edit(NamedTuple):
    """A change of codes [N, K] and block scales [N, C], and what has to be said of it."""

    apply: Callable[[Tensor, Tensor], None]
    said: tuple[str, ...]


@cache
def places() -> list[str]:
    """Components whose weights are edited."""
    model = double("v4", RECIPE)
    return [name for name in model.calls if model.naming(name).role in ROLES]


def edit_of(kind: str, weight: Weight, drawn: random.Random) -> Edit:
    """Draw an edit of a kind."""
    rows, columns = weight.shape
    tensor = weight.quantised()
    codes, scales = tensor.element_codes(), tensor.linear_scale_codes()
    row, column = drawn.randrange(rows), drawn.randrange(columns)
    if kind == "bit":
        bit = 1 << drawn.randrange(4)
        used = int(codes[row, column]) ^ bit
        return Edit(
            _xored((row, column), bit), (f"row {row} of", f"in column {column} ", f"{used:#x}")
        )
    if kind == "scale bit":
        wide = tensor.format.block[1]
        block, bit = column // wide, 1 << drawn.randrange(6)
        used = int(scales[row, block]) ^ bit
        where = f"in columns {block * wide} to {block * wide + wide - 1} "
        return Edit(
            _xored((row, block), bit, of_scales=True), (f"row {row} of", where, f"{used:#04x}")
        )
    if kind == "rows copied":
        to, source = drawn.sample(range(0, rows - RUN, RUN), 2)
        moved = (f"rows {to} to {to + RUN - 1} of", f"rows {source} to {source + RUN - 1}")
        return Edit(_copied(to, source), moved)
    if kind == "row left out":
        return Edit(_left_out(row), (f"row {row} of", "is left out"))
    other = (column + drawn.randrange(1, columns)) % columns
    turned = [at for at in (column, other) if int(codes[row, at]) & 7]  # a zero has no sign
    words = tuple(f"in column {at} " for at in turned)
    return Edit(_signs(row, turned), (f"row {row} of", *words))


def _xored(at: tuple[int, int], bit: int, *, of_scales: bool = False) -> Any:
    def apply(codes: Tensor, scales: Tensor) -> None:
        (scales if of_scales else codes)[at] ^= bit

    return apply


def _copied(to: int, source: int) -> Any:
    def apply(codes: Tensor, scales: Tensor) -> None:
        for part in (codes, scales):
            part[to : to + RUN] = part[source : source + RUN].clone()

    return apply


def _left_out(row: int) -> Any:
    def apply(codes: Tensor, _scales: Tensor) -> None:
        codes[row] = 0

    return apply


def _signs(row: int, columns: list[int]) -> Any:
    def apply(codes: Tensor, _scales: Tensor) -> None:
        for column in columns:
            codes[row, column] ^= 8

    return apply


def edited(weight: Weight, edit: Callable[[Tensor, Tensor], None]) -> Weight:
    """Return a weight whose codes and block scales were edited."""
    tensor = weight.quantised()
    codes, scales = tensor.element_codes().clone(), tensor.linear_scale_codes().clone()
    edit(codes, scales)
    assert tensor.nibble_order is not None
    packed = pack_nibbles(codes, tensor.nibble_order)
    return replace(weight, codes=packed, block_scale=scales, _decoded={})


def recovered(seed: int) -> CaseResult:
    """Plant one edit, and judge what is said of it."""
    drawn, kind = random.Random(f"recovered {seed}"), KINDS[seed % len(KINDS)]
    model, name = double("v4", RECIPE), drawn.choice(places())
    planting = model.planting(name)
    of = drawn.choice(list(planting.weights))
    edit = edit_of(kind, planting.weights[of], drawn)
    variant = FaultVariant(
        "an edit", with_weights(lambda each, own: edited(own, edit.apply) if each == of else own)
    )
    records = model.sights(name, variant)
    if not model.differs(name, records):
        return CaseResult(seed, kind, "no effect")
    context = model.naming(name)
    calls = together(context, records)
    found = describe(context, sorted(calls, key=lambda call: call is not most_telling(calls)))
    if found is None:
        return CaseResult(seed, kind, "silent", name)
    true = all(words in found.sentence for words in (full_name(context, of), *edit.said))
    return CaseResult(
        seed, kind, "ok" if true else "false", f"{name}: {edit.said}: {found.sentence}"
    )


def main() -> int:
    """Run the campaign; the exit status is 1 where something false is said."""
    asked = arguments((__doc__ or "").partition("\n")[0], count=500).parse_args()
    return run_campaign("recovered_weights", recovered, asked, wanted=("ok", "silent", "no effect"))


if __name__ == "__main__":
    sys.exit(main())
