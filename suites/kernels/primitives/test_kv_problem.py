"""The latent cache as arithmetic: bytes of pages, addresses, refusals."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.kernels.primitives import kv_problem as facts
from degarble.kernels.primitives.kv_problem import (
    BF16,
    ENTRIES,
    FP8,
    NVFP4,
    NVFP4_V41,
    Pages,
    ReadProblem,
    WriteProblem,
)
from degarble.references import numerics
from degarble.suites.kernels import cache_checks as checks
from degarble.suites.kernels import latent_checks as plain

ALL = [facts.entry_format(name, width) for name in ENTRIES for width in (512, 128)]
ALL += [facts.entry_format(name, 576) for name in checks.WITH_KEY]
ALL.append(facts.entry_format(facts.KEY, facts.KEY_WIDTH))


def test_entries_have_the_bytes_that_others_read() -> None:
    found = {entry.name: entry.entry_bytes for entry in ENTRIES.values()}
    assert found == {"fp8": 584, "nvfp4": 384, "nvfp4-v41": 288, "bf16": 1024}
    # FlashMLA: 64 entries of FP8 take 37,376 bytes, padded to 37,440; two take 1,168 in 1,728.
    assert FP8.page_bytes(64) == 37_440
    assert FP8.page_bytes(2) == 1_728
    assert (FP8.code_bytes, NVFP4.code_bytes, NVFP4_V41.code_bytes, BF16.code_bytes) == (
        448,
        224,
        256,
        0,
    )
    assert [facts.entry_format(name, 128).entry_bytes for name in ENTRIES] == [194, 168, 72, 256]
    assert [entry.scales for entry in (FP8, NVFP4, NVFP4_V41, BF16)] == [7, 28, 32, 0]
    for name in ("fp8-v32", "fp8-v32-ue8m0"):  # FlashMLA: 512 codes, 16 bytes of scales, a key
        entry = facts.entry_format(name, 576)
        assert (entry.code_bytes, entry.rest_at, entry.step, entry.scales) == (512, 528, 656, 4)
        assert entry.page_bytes(64) == 64 * 656
    key = facts.entry_format(facts.KEY, facts.KEY_WIDTH)  # DeepGEMM: rows, then a scale for each
    assert (key.entry_bytes, key.scales, key.page_bytes(64)) == (132, 1, 64 * 132)


@pytest.mark.parametrize("entry", ALL, ids=lambda entry: f"{entry.name}-{entry.width}")
@pytest.mark.parametrize("entries", [1, 2, 3, 64])
def test_every_byte_of_a_page_belongs_to_one_entry(entry: facts.EntryFormat, entries: int) -> None:
    stride, page = entry.page_bytes(entries), 5
    owners = np.zeros(stride, dtype=int)
    for within in range(entries):
        start = 16 * facts.value_piece((page, within), stride // 16, entry) - page * stride
        owners[start : start + entry.code_bytes] += 1
        rest = start + entry.rest_at
        owners[rest : rest + entry.value_bytes - entry.code_bytes] += 1
        start = facts.scale_within(within, entries, entry)
        owners[start : start + entry.scale_bytes] += 1
    used = entries * entry.entry_bytes
    assert (owners[:used] == 1).all()
    assert not owners[used:].any()
    assert stride % facts.VECTOR == 0
    assert entry.value_bytes % facts.VECTOR == 0
    assert entry.code_bytes % facts.VECTOR == 0


def test_slots_are_divided_by_any_page_size() -> None:
    for entries in (1, 2, 3, 5, 7, 64, 100, 127, 256, 641, (1 << 20) + 1, (1 << 31) - 1):
        magic = facts.page_magic(entries)
        assert magic[0] < 1 << 32
        edges = [n for k in (1, 2, (1 << 31) // entries) for n in (k * entries - 1, k * entries)]
        for slot in (0, 1, *edges, (1 << 31) - 1):
            if slot < 1 << 31:
                place = facts.place_of(slot, magic, entries, lambda a, b: a * b >> 32)
                assert place == divmod(slot, entries)


@pytest.mark.parametrize("spread", [s for s in plain.SPREADS if s != "special"])
def test_entries_decode_to_what_the_references_read(spread: str) -> None:
    for entry in ALL:
        x = plain.drawn(spread, (50, entry.width), 9)
        width = entry.quantised
        through: dict[int, Any] = {
            8: lambda v: numerics.through_fp8(v, 64),
            4: numerics.through_nvfp4_row,
        }
        if entry.numbers:
            rule = numerics.through_fp8 if entry.powers else numerics.through_fp8_f32
            through[8] = partial(rule, block=128)
        want = x.clone()
        if width:
            want[:, :width] = through[entry.code_bits](x[:, :width]).bfloat16()
        got = checks.decoded(*checks.coded(x, entry), entry)
        assert torch.equal(plain.bits(got), plain.bits(want)), entry.name


def test_refuses_by_name() -> None:
    pages = Pages("fp8", 64, 4)
    for wrong, error, name in (
        (lambda: Pages("fp7", 64, 4), UnknownName, "cache entry format"),
        (lambda: Pages("fp8", 64, 4, width=256), ShapeMismatch, "width of a row"),
        (lambda: Pages("fp8", 64, 4, width=576), ShapeMismatch, "width of a row"),
        (lambda: Pages("bf16", 64, 4, width=577), ShapeMismatch, "width of a row"),
        (lambda: Pages("fp8-v32", 64, 4), ShapeMismatch, "width of a row of fp8-v32"),
        (lambda: Pages("fp8-key", 64, 4), ShapeMismatch, "width of a row of fp8-key"),
        (lambda: Pages("fp8", 0, 4), ShapeMismatch, "entries of a page"),
        (lambda: Pages("fp8", 1 << 20, 1 << 12), ShapeMismatch, "slots of a cache"),
        (lambda: Pages("fp8", 64, 1 << 20), ShapeMismatch, "pieces of a cache"),
        (lambda: Pages("fp8", 64, 4, 37_424), ShapeMismatch, "bytes of a page"),
        (lambda: Pages("fp8", 64, 4, 37_448), ShapeMismatch, "bytes of a page"),
        (lambda: WriteProblem(-1, pages, 1), ShapeMismatch, "tokens"),
        (lambda: WriteProblem(1, pages, 0), InvalidArgument, "positions"),
        (lambda: WriteProblem(1, pages, 1, source="row"), InvalidArgument, "positions"),
        (lambda: WriteProblem(1, pages, 1, source="rows"), UnknownName, "source"),
        (lambda: WriteProblem(1, pages, 1, weight="fp8"), UnknownName, "weight"),
        (lambda: WriteProblem(1, pages, 1, duplicates="first"), UnknownName, "duplicate"),
        (lambda: WriteProblem(1, pages, 1, epsilon=2.0), InvalidArgument, "epsilon"),
        (lambda: ReadProblem(1 << 31, pages), ShapeMismatch, "entries to read"),
    ):
        with pytest.raises(error, match=name):
            wrong()


def test_forms_know_no_extents_and_bytes_count_everything_once() -> None:
    problems = [checks.write_problem("fp8", *extents) for extents in ((1, 1), (9, 64))]
    assert len({facts.choose_write_form(problem, "sm_90a") for problem in problems}) == 1
    assert problems[1].bytes_moved == 9 * (1024 + 8 + 8 + 256 + 584)
    assert ReadProblem(3, Pages("nvfp4", 64, 1)).bytes_moved == 3 * (4 + 384 + 1024)
    assert [facts.grid(count) for count in (1, 4, 5)] == [1, 1, 2]
    forms = [
        facts.choose_write_form(checks.write_problem("fp8", tokens), "sm_90a")
        for tokens in (facts.FEW_TOKENS, facts.FEW_TOKENS + 1)
    ]
    assert [form.few for form in forms] == [True, False]
    assert [facts.bound_blocks(form) for form in forms] == [0, 16]
