"""M10: the two nibbles of every packed byte are swapped.

One producer stores the even K index in the high nibble, the reader expects it in the low nibble
(sglang issue 23625). The values stay finite and in range, so nothing crashes: the text is garbled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from degarble.harness.engine.faults import operand_faults as operands
from degarble.harness.engine.faults.family import Fault, Match, Part, element_codes, reproduction
from degarble.harness.engine.faults.weight_faults import (
    Words,
    is_packed,
    of_fault,
    of_tensor,
    weight_fault,
)
from degarble.harness.report.number_text import share

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.family import Case
    from degarble.harness.engine.faults.model_faults import Scene
    from degarble.harness.formats.quantise import QuantisedTensor


def inject(tensor: QuantisedTensor) -> QuantisedTensor | None:
    """Swap the nibbles of every byte; the label stays as it was."""
    if not tensor.format.packed:
        return None
    return replace(tensor, codes=(tensor.codes << 4) | (tensor.codes >> 4))


def signature(case: Case) -> Match | None:
    """Compare the codes with the twin's after exchanging neighbours."""
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


def _words_turned(tensor: QuantisedTensor, count: int, swap: bool) -> QuantisedTensor | None:
    """Reverse the bytes of every run of `count`, and optionally the nibbles within them."""
    if not tensor.format.packed or tensor.codes.shape[-1] % count:
        return None
    runs = tensor.codes.unflatten(-1, (-1, count)).flip(-1)
    runs = (runs << 4) | (runs >> 4) if swap else runs
    return replace(tensor, codes=runs.flatten(-2).contiguous())


def _read_swapped(_scene: Scene, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {**inputs, "codes": (inputs["codes"] << 4) | (inputs["codes"] >> 4)}


def _blocks_changed(
    scene: Scene, _inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
) -> Mapping[str, Tensor] | None:
    """Exchange codes and scales of blocks j and j ^ 1."""
    form = operands.activation_format(scene)
    if form is None or outputs["block_scale"].shape[-1] % 2:
        return None
    wide = {"codes": form.block[1] // (2 if form.packed else 1), "block_scale": 1}
    changed = {
        name: outputs[name].unflatten(-1, (-1, 2, width)).flip(-2).flatten(-3)
        for name, width in wide.items()
    }
    return {**outputs, **changed}


MODEL_FAULTS = (
    of_fault(FAULTS[0], "a nibble swap on", is_packed),
    weight_fault(
        Words(
            "M10.bytes_swapped",
            "The bytes of every 16-bit word are swapped",
            "pairs of neighbouring values change places: text is garbled, nothing is NaN",
            "Read packed codes byte by byte, never as 16-bit words of another byte order.",
            "swapping neighbouring bytes on",
        ),
        of_tensor(lambda tensor: _words_turned(tensor, 2, swap=False)),
        is_packed,
    ),
    weight_fault(
        Words(
            "M10.word_reversed",
            "The eight codes of every 32-bit word stand in reversed order",
            "values change places within runs of eight: text is garbled, nothing is NaN",
            "Unpack 32-bit words from the low end: code j is shifted by 4 j.",
            "reversing the eight codes of every word on",
        ),
        of_tensor(lambda tensor: _words_turned(tensor, 4, swap=True)),
        is_packed,
    ),
    operands.reading_fault(
        Words(
            "M10.activation_order",
            "The nibbles of packed activations are read in the other order",
            "neighbouring inputs change places: outputs are noise of the right size",
            "Producer and consumer of activations must agree: low half, even index.",
            "a nibble swap of the activations of",
        ),
        _read_swapped,
        operands.is_packed,
    ),
    operands.making_fault(
        Words(
            "M10.activation_blocks",
            "Neighbouring blocks of activations change places",
            "inputs meet the weights of others: outputs are noise of the right size",
            "Block j of a row holds its numbers from j times the block on.",
            "neighbouring blocks in each other's place at",
        ),
        _blocks_changed,
        operands.is_packed,
    ),
)
