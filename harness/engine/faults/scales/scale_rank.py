"""O06: block scales have another rank or dtype than the kernel reads.

Found in the first field report: a scale with one dimension where a formatted block scale belongs,
and E4M3 scales where float32 or exponents belong. Broadcasting makes it fit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.engine.faults.weight_faults import Words, has_codes, of_scales, weight_fault
from degarble.harness.formats.codec import decode_array, encode_array
from degarble.harness.formats.number_formats import E4M3

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import ModelFault
    from degarble.harness.engine.faults.weight_faults import Change, Kept
    from degarble.harness.formats.quantise import QuantisedTensor


def _one(_tensor: QuantisedTensor, scales: Tensor) -> Tensor:
    return scales[..., :1, :1].expand_as(scales)


def _of_rows(_tensor: QuantisedTensor, scales: Tensor) -> Tensor:
    return scales[..., :, :1].expand_as(scales)


def _of_columns(_tensor: QuantisedTensor, scales: Tensor) -> Tensor:
    return scales[..., :1, :].expand_as(scales)


def _in_e4m3(tensor: QuantisedTensor, scales: Tensor) -> Tensor | None:
    if tensor.format.scale == E4M3:
        return None
    return decode_array(encode_array(scales, E4M3), E4M3)


def _has_other_scales(kept: Kept) -> bool:
    return kept.form is not None and kept.form.scale != E4M3


def _fault(variant: str, title: str, doing: str, change: Change, *, other: bool) -> ModelFault:
    words = Words(
        f"O06.{variant}",
        title,
        "every block but the first is wrong by a factor of its own",
        "Check rank, extents and dtype of scales where they are read; broadcast nothing.",
        doing,
    )
    return weight_fault(words, change, _has_other_scales if other else has_codes)


MODEL_FAULTS = (
    _fault(
        "one_scale", "One block scale serves the whole matrix", "the first block scale for all of",
        of_scales(_one), other=False,
    ),
    _fault(
        "one_a_row", "One block scale serves a row of blocks",
        "the first block scale of each row for all of", of_scales(_of_rows), other=False,
    ),
    _fault(
        "one_a_column", "One block scale serves a column of blocks",
        "the first block scale of each column for all of", of_scales(_of_columns), other=False,
    ),
    _fault(
        "in_e4m3", "Block scales are cast to E4M3", "block scales cast to E4M3 on",
        of_scales(_in_e4m3), other=True,
    ),
)  # fmt: skip
