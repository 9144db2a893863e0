"""Unpack the words of integer checkpoints into codes, scales and zero points of a Weight.

Every scheme ends in the same fields: codes [N, K] along K (two 4-bit codes a byte, low nibble
first), scales and zero points [N, G] in float32, and the group of each column where it is stored.
Shape letters as in schemes.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.checkpoint.view.schemes import WORD
from degarble.harness.formats.codec import pack_nibbles
from degarble.harness.formats.number_formats import scale_shape
from degarble.harness.model.tensors import PartKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.checkpoint.view.modules import StoredForm


def unpack_words(
    words: Tensor, bits: int, axis: int, order: tuple[int, ...] | None, word: int = WORD
) -> Tensor:
    """Return the codes in words, uint8, that follow each other along an axis.

    `order` names the place of each code of a word, lowest bits first.
    """
    count = word // bits
    places = range(count) if order is None else order
    shifts = [0] * count
    for position, place in enumerate(places):
        shifts[place] = position * bits
    mask = (1 << bits) - 1
    codes = [((words >> shift) & mask).to(torch.uint8) for shift in shifts]
    # [..., W, ...] of `count` codes each: the codes of a word become neighbours.
    return torch.stack(codes, dim=axis + 1).flatten(axis, axis + 1)


def unpack_module(form: StoredForm, tensors: Mapping[PartKind, Tensor]) -> dict[str, Tensor]:
    """Return the fields of a Weight from the stored tensors of an integer module."""
    scheme, fmt = form.scheme, form.format
    assert scheme is not None
    assert fmt is not None
    bits, (rows, columns) = fmt.element.bits, form.shape
    extents = scale_shape(form.shape, fmt)
    scale = tensors[PartKind.BLOCK_SCALE].float()
    fields = {"block_scale": (scale.T if scheme.transposed else scale).reshape(extents)}
    # Signed integers become unsigned ones with the zero point moved as far, where there is one.
    half = 1 << (bits - 1) if scheme.signed else 0
    if scheme.packed_along is None:
        codes = tensors[PartKind.CODES].view(torch.uint8)
        codes = codes ^ half if fmt.zero_point else codes
    else:
        words = tensors[PartKind.CODES]
        codes = unpack_words(words, bits, scheme.packed_along, scheme.order, scheme.word)
        codes = (codes.T if scheme.transposed else codes)[:rows, :columns]
        codes = codes if fmt.zero_point or scheme.twos_complement else codes ^ half
    codes = codes.contiguous()
    fields["codes"] = pack_nibbles(codes) if fmt.packed else codes
    if fmt.zero_point:
        zero = tensors[PartKind.ZERO_POINT]
        if scheme.zeros_along is None:
            zero = zero.float() + half
        else:
            zero = unpack_words(zero, bits, scheme.zeros_along, scheme.order).float()
            zero = (zero.T if scheme.transposed else zero)[: extents[0], : extents[1]]
        fields["zero_point"] = (zero + scheme.zero_added).reshape(extents).contiguous()
    index = tensors.get(PartKind.GROUP_INDEX)
    if index is not None:
        fields["group_index"] = _group_index(form, index, extents[1])
    return {name: tensor.contiguous() for name, tensor in fields.items()}


def _group_index(form: StoredForm, index: Tensor, groups: int) -> Tensor:
    """Return the group of each column; raise for a group that has no scale."""
    wrong = (index < 0) | (index >= groups)
    if bool(wrong.any()):
        column = int(wrong.nonzero()[0])
        raise InvalidArgument(
            f"{shown(form.parts[PartKind.GROUP_INDEX].name)}[{column}]",
            int(index[column]),
            f"a group from 0 to {groups - 1}, as there are scales",
            "Check that the tensors are of one module; act-order needs the index it was written"
            " with.",
        )
    return index.to(torch.int32)
