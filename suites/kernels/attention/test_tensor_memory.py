"""Sparse attention on sm_100a: what a thread block holds fits, and numbers say what they mean."""

from __future__ import annotations

import pytest

from degarble.kernels.attention import problem as facts
from degarble.kernels.primitives.kv_problem import ENTRIES, EntryFormat, entry_format
from degarble.kernels.runtime.targets import SM100A

FORMATS = [
    *ENTRIES.values(),
    *(entry_format(name, facts.V32.key) for name in ("fp8-v32", "fp8-v32-ue8m0", "bf16")),
]


@pytest.mark.parametrize("entry", FORMATS, ids=lambda entry: f"{entry.name}-{entry.width}")
def test_every_entry_fits_shared_memory(entry: EntryFormat) -> None:
    assert facts.shared_bytes(entry) <= SM100A.shared_memory_bytes


def test_output_and_logits_fit_tensor_memory() -> None:
    first = facts.first_columns()
    # Two halves of 256 columns lie in 16 lanes each of the same columns.
    assert first == (0, 256)
    assert facts.columns_held() == first[1] + 2 * 64
    assert facts.columns_held() <= facts.columns_allocated()
    assert facts.columns_allocated() == SM100A.tensor_memory_columns
    assert 2 * facts.UPPER_LANES == facts.LANES_OF_WARP


def test_rows_of_an_instruction_are_those_of_wgmma() -> None:
    """A warp's 16 lanes are the 16 rows that wgmma gives it: layout F, reads of 256 bits."""
    rows = range(facts.HEADS)
    lanes = [row % 16 + 32 * (row // 16) for row in rows]  # PTX ISA 9.1, layout F
    for warp in range(4):
        held = [lanes.index(warp * facts.LANES_OF_WARP + lane) for lane in range(16)]
        assert held == [*range(16 * warp, 16 * warp + 16)]
    for lane in range(32):
        places = [(lane // 4 + 8 * (r // 2), 2 * (lane % 4) + r % 2) for r in range(4)]
        fragment = [(lane // 4 + 8 * row, 2 * (lane % 4) + i) for row in (0, 1) for i in (0, 1)]
        assert places == fragment
    assert facts.repeats(facts.KEYS) * facts.REPEAT_REGISTERS == 16


@pytest.mark.parametrize("width", facts.FAMILIES)
def test_registers_are_the_processors(width: int) -> None:
    held = facts.REGISTERS[width]
    assert held.total == facts.REGISTER_FILE
    assert facts.LAUNCH_REGISTERS * facts.SM100_THREADS == facts.REGISTER_FILE
    assert all(count % 8 == 0 and 24 <= count <= 256 for count in held)
    assert held.multiplying < held.gathering < facts.LAUNCH_REGISTERS < held.weighing


@pytest.mark.parametrize("width", facts.FAMILIES)
def test_instructions_multiply_what_a_tile_has(width: int) -> None:
    of_logits, of_sums = facts.instructions(width)
    each = facts.HEADS * facts.INSTRUCTION_K
    assert of_logits * each * facts.TILE == facts.HEADS * facts.TILE * width
    assert of_sums * each * facts.COLUMNS == facts.HEADS * facts.TILE * 512
