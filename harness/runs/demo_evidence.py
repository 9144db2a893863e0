"""What a reader can check by eye: the first bytes that are wrong, and which scale each block got.

Owns two blocks of the demonstration's page, both read from the tensors themselves.
What keeps it honest: suites/runs/test_demo_evidence.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.engine.faults.family import Part, element_codes, read_scales
from degarble.harness.formats.arrays import decode_array
from degarble.harness.record.blocks import Column, ColumnKind, HeatMap, HeatScale, Table

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.engine.packing_compare import PartDifference
    from degarble.harness.formats.quantised import QuantisedTensor
    from degarble.harness.record.blocks import Block, Cell
    from degarble.harness.runs.demo import Copy

_SAMPLE = 8  # wrong numbers that are shown
_MAP = (32, 32)  # rows and block columns of the map of scales
_DARKEST = 3.0  # doublings between the scale that a block got and its own


def evidence_blocks(copy: Copy) -> list[Block]:
    """Give the blocks that show each part of `copy` that differs."""
    blocks: list[Block] = []
    differences = [cause.difference for cause in copy.diagnosis.causes]
    differences += [part.difference for part in copy.diagnosis.unexplained]
    for difference in differences:
        if difference.part is not Part.TENSOR_SCALE:
            blocks.append(_first_wrong(copy.tensor, copy.diagnosis.twin, difference))
        if difference.part is Part.BLOCK_SCALE:
            blocks.append(_scale_map(copy.tensor, copy.diagnosis.twin))
    return blocks


def _first_wrong(
    suspect: QuantisedTensor, twin: QuantisedTensor, difference: PartDifference
) -> Table:
    """Show the first numbers of the first row that differs, as code and value."""
    row = int(difference.rows.nonzero()[0])
    read = element_codes if difference.part is Part.CODES else read_scales
    fmt = suspect.format.element if difference.part is Part.CODES else suspect.format.scale
    found, expected = read(suspect)[row, :_SAMPLE], read(twin)[row, :_SAMPLE]
    digits = fmt.bits // 4

    def cells(index: int) -> tuple[Cell, ...]:
        codes = [int(found[index]), int(expected[index])]
        values = [float(decode_array(side[index : index + 1], fmt)) for side in (found, expected)]
        return (
            f"[{row}, {index}]",
            f"0x{codes[0]:0{digits}x}",
            f"0x{codes[1]:0{digits}x}",
            values[0],
            values[1],
        )

    columns = (
        Column("index"),
        Column("code found", ColumnKind.CODE),
        Column("code expected", ColumnKind.CODE),
        Column("value found", ColumnKind.NUMBER),
        Column("value expected", ColumnKind.NUMBER),
    )
    rows = tuple(cells(index) for index in range(found.numel()))
    return Table(f"The first {difference.part} of row {row}", columns, rows)


def _scale_map(suspect: QuantisedTensor, twin: QuantisedTensor) -> HeatMap:
    """Show by how many doublings the scale that each block is read with is off."""
    tall, wide = _MAP

    def doublings(tensor: QuantisedTensor) -> Tensor:
        corner = read_scales(tensor)[:tall, :wide]
        return decode_array(corner, tensor.format.scale).double().clamp(min=2.0**-9).log2()

    off = (doublings(suspect) - doublings(twin)).abs()
    return HeatMap(
        f"By how many doublings the scale of each block is off (first {off.shape[0]} rows, "
        f"first {off.shape[1]} blocks of {suspect.format.block[1]} columns)",
        "row",
        "block",
        tuple(str(index) for index in range(off.shape[0])),
        tuple(str(index) for index in range(off.shape[1])),
        tuple(tuple(float(value) for value in row) for row in off),
        HeatScale(0.0, _DARKEST, "doublings"),
    )
