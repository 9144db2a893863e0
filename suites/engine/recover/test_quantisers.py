"""What was done to a quantiser's input is read off the codes that were made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.engine.faults.model_faults import FaultVariant, with_inputs, with_outputs
from degarble.suites.engine.recover.test_described import told

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

NAME = "layers.1.attn.wkv.act_quant"


def test_a_factor_on_a_part_of_the_input_is_told() -> None:
    def scaled(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        x = given["x"].double()
        x[:, 32:64] *= 0.7
        return {**given, "x": x.to(given["x"].dtype)}

    found = told(NAME, FaultVariant("scaled", with_inputs(scaled)))
    assert found is not None
    assert "in the input x, the numbers of columns 32 to 63 are multiplied by 0.7" in found.sentence


def test_flipped_bits_of_codes_are_told() -> None:
    def turned(_: object, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        codes = made["codes"].clone()
        codes[:, 25:] ^= 8
        return {**made, "codes": codes}

    found = told(NAME, FaultVariant("turned", with_outputs(turned)))
    assert found is not None
    assert "columns 25 to 63 have bits 0x08 turned" in found.sentence
