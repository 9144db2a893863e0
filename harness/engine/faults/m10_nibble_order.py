"""M10: the two nibbles of every packed byte are swapped.

One producer puts the even K index into the high half, the reader expects it in the low half
(sglang issue 23625). The values stay finite and in range, so nothing crashes: the text is garbled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from degarble.harness.engine.faults.family import Fault, Match, Part, element_codes, reproduction
from degarble.harness.record.wording import share

if TYPE_CHECKING:
    from degarble.harness.engine.faults.family import Case
    from degarble.harness.formats.quantised import QuantisedTensor


def inject(tensor: QuantisedTensor) -> QuantisedTensor | None:
    """Swap the halves of every byte and leave the label as it was."""
    if not tensor.format.packed:
        return None
    return replace(tensor, codes=(tensor.codes << 4) | (tensor.codes >> 4))


def signature(case: Case) -> Match | None:
    """Compare the codes with those of the twin, neighbours exchanged."""
    fault = inject(case.twin)
    if fault is None:
        return None
    reproduced, untouched = reproduction(case, fault, Part.CODES)
    count = int(case.rows.sum()) * element_codes(case.twin).shape[-1]
    return Match(
        reproduced,
        untouched,
        "Swapping the two nibbles of every byte reproduces "
        f"{share(reproduced)} of {count:,} codes; "
        f"in the order as declared {share(untouched)} agree.",
    )


FAULTS = (
    Fault(
        id="M10.nibble_order",
        title="The two nibbles of every byte are swapped",
        effect="neighbouring values change places: text is garbled, nothing is NaN",
        remedy="Pack the even K index into the low half, or declare the order as high_even.",
        part=Part.CODES,
        inject=inject,
        signature=signature,
    ),
)
