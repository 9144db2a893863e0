"""Problems and rules that kernels share: entries of caches, latent rows, quantising; refusals."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.formats import scalar_ops as codecs
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives import quantise_problem as quantising
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
from degarble.kernels.primitives.quantise_problem import (
    LAYOUTS,
    SWIGLU,
    TACTICS,
    Fp8Problem,
    QuantiseProblem,
    QuantiseTactic,
    choose_form,
    choose_tactic,
    grid,
    place_of,
    registers_allowed,
    tiles,
)
from degarble.references import attention, elementary, numerics
from degarble.references.numerics import HeadNorm, Numerics
from degarble.suites.kernels import cache_checks
from degarble.suites.kernels import latent_checks as plain

if TYPE_CHECKING:
    from collections.abc import Callable

PAGES = Pages("fp8", 64, 4)


@pytest.mark.parametrize(
    ("error", "name", "wrong"),
    [
        (UnknownName, "cache entry format", lambda: Pages("fp7", 64, 4)),
        (ShapeMismatch, "width of a row", lambda: Pages("fp8", 64, 4, width=256)),
        (ShapeMismatch, "width of a row", lambda: Pages("fp8", 64, 4, width=576)),
        (ShapeMismatch, "width of a row", lambda: Pages("bf16", 64, 4, width=577)),
        (ShapeMismatch, "width of a row of fp8-v32", lambda: Pages("fp8-v32", 64, 4)),
        (ShapeMismatch, "width of a row of fp8-key", lambda: Pages("fp8-key", 64, 4)),
        (ShapeMismatch, "width of a row", lambda: rows.geometry(256)),
        (ShapeMismatch, "entries of a page", lambda: Pages("fp8", 0, 4)),
        (ShapeMismatch, "slots of a cache", lambda: Pages("fp8", 1 << 20, 1 << 12)),
        (ShapeMismatch, "pieces of a cache", lambda: Pages("fp8", 64, 1 << 20)),
        (ShapeMismatch, "bytes of a page", lambda: Pages("fp8", 64, 4, 37_424)),
        (ShapeMismatch, "bytes of a page", lambda: Pages("fp8", 64, 4, 37_448)),
        (ShapeMismatch, "tokens", lambda: WriteProblem(-1, PAGES, 1)),
        (InvalidArgument, "positions", lambda: WriteProblem(1, PAGES, 0)),
        (InvalidArgument, "positions", lambda: WriteProblem(1, PAGES, 1, source="row")),
        (UnknownName, "source", lambda: WriteProblem(1, PAGES, 1, source="rows")),
        (UnknownName, "weight", lambda: WriteProblem(1, PAGES, 1, weight="fp8")),
        (UnknownName, "duplicate", lambda: WriteProblem(1, PAGES, 1, duplicates="first")),
        (InvalidArgument, "epsilon", lambda: WriteProblem(1, PAGES, 1, epsilon=2.0)),
        (ShapeMismatch, "entries to read", lambda: ReadProblem(1 << 31, PAGES)),
        *(
            (ShapeMismatch, "tokens", lambda extent=extent: rows.require_extent("tokens", extent))
            for extent in (-1, 1 << 31)
        ),
        *(
            (InvalidArgument, "epsilon", lambda epsilon=epsilon: rows.require_epsilon(epsilon))
            for epsilon in (-1e-6, 1.0, float("nan"))
        ),
        *(
            (ShapeMismatch, "matrix to quantise", lambda shape=shape: QuantiseProblem(*shape))
            for shape in ((4, 24), (4, 0), (-1, 16), (1 << 31, 16))
        ),
        (UnknownName, "128x4", lambda: QuantiseProblem(1, 16, "128x5")),
        (UnknownName, "scale layout of a kernel", lambda: QuantiseProblem(1, 16, "packed_mn")),
        (UnknownName, "swiglu", lambda: QuantiseProblem(1, 16, source="swigl")),
        *(
            (
                InvalidArgument, "limit",
                lambda of=of: QuantiseProblem(1, 16, source=of[0], limit=of[1]),
            )
            for of in (("values", 10.0), ("swiglu", 0.0), ("swiglu", 10.01))
        ),
        *(
            (ShapeMismatch, "matrix to quantise", lambda shape=shape: Fp8Problem(*shape))
            for shape in ((1, 96), (1, 0), (-1, 128), (1 << 31, 128))
        ),
        (UnknownName, "format of block scales", lambda: Fp8Problem(1, 128, "e4m3")),
        (UnknownName, "source of a kernel", lambda: Fp8Problem(1, 128, source="gelu")),
        (InvalidArgument, "limit", lambda: Fp8Problem(1, 128, limit=10.0)),
        (
            ShapeMismatch, "values in front of which",
            lambda: Fp8Problem(1, 640, turned=512, positions=9),
        ),
        (
            ShapeMismatch, "values in front of which",
            lambda: Fp8Problem(1, 512, source="swiglu", turned=512, positions=9),
        ),
        (ShapeMismatch, "positions of the table", lambda: Fp8Problem(1, 512, turned=512)),
    ],
)  # fmt: skip
def test_what_no_kernel_holds_is_refused(
    error: type[Exception], name: str, wrong: Callable[[], object]
) -> None:
    with pytest.raises(error, match=name):
        wrong()


# ---- entries of the caches -----------------------------------------------------------------------


ALL = [rows.entry_format(name, width) for name in ENTRIES for width in (512, 128)]
ALL += [rows.entry_format(name, 576) for name in cache_checks.WITH_KEY]
ALL.append(rows.entry_format(rows.KEY, rows.KEY_WIDTH))


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
    assert [rows.entry_format(name, 128).entry_bytes for name in ENTRIES] == [194, 168, 72, 256]
    assert [entry.scales for entry in (FP8, NVFP4, NVFP4_V41, BF16)] == [7, 28, 32, 0]
    for name in ("fp8-v32", "fp8-v32-ue8m0"):  # FlashMLA: 512 codes, 16 bytes of scales, a key
        entry = rows.entry_format(name, 576)
        assert (entry.code_bytes, entry.rest_at, entry.step, entry.scales) == (512, 528, 656, 4)
        assert entry.page_bytes(64) == 64 * 656
    key = rows.entry_format(rows.KEY, rows.KEY_WIDTH)  # DeepGEMM: rows, then a scale for each
    assert (key.entry_bytes, key.scales, key.page_bytes(64)) == (132, 1, 64 * 132)


@pytest.mark.parametrize("entry", ALL, ids=lambda entry: f"{entry.name}-{entry.width}")
@pytest.mark.parametrize("entries", [1, 2, 3, 64])
def test_every_byte_of_a_page_belongs_to_one_entry(entry: rows.EntryFormat, entries: int) -> None:
    stride, page = entry.page_bytes(entries), 5
    owners = np.zeros(stride, dtype=int)
    for within in range(entries):
        start = 16 * rows.value_piece((page, within), stride // 16, entry) - page * stride
        owners[start : start + entry.code_bytes] += 1
        rest = start + entry.rest_at
        owners[rest : rest + entry.value_bytes - entry.code_bytes] += 1
        start = rows.scale_within(within, entries, entry)
        owners[start : start + entry.scale_bytes] += 1
    used = entries * entry.entry_bytes
    assert (owners[:used] == 1).all()
    assert not owners[used:].any()
    assert stride % rows.VECTOR == 0
    assert entry.value_bytes % rows.VECTOR == 0
    assert entry.code_bytes % rows.VECTOR == 0


def test_slots_are_divided_by_any_page_size() -> None:
    for entries in (1, 2, 3, 5, 7, 64, 100, 127, 256, 641, (1 << 20) + 1, (1 << 31) - 1):
        magic = rows.page_magic(entries)
        assert magic[0] < 1 << 32
        edges = [n for k in (1, 2, (1 << 31) // entries) for n in (k * entries - 1, k * entries)]
        for slot in (0, 1, *edges, (1 << 31) - 1):
            if slot < 1 << 31:
                place = rows.place_of(slot, magic, entries, lambda a, b: a * b >> 32)
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
        got = cache_checks.decoded(*cache_checks.coded(x, entry), entry)
        assert torch.equal(plain.bits(got), plain.bits(want)), entry.name


def test_forms_know_no_extents_and_bytes_count_everything_once() -> None:
    problems = [cache_checks.write_problem("fp8", *extents) for extents in ((1, 1), (9, 64))]
    assert len({rows.choose_write_form(problem, "sm_90a") for problem in problems}) == 1
    assert problems[1].bytes_moved == 9 * (1024 + 8 + 8 + 256 + 584)
    assert ReadProblem(3, Pages("nvfp4", 64, 1)).bytes_moved == 3 * (4 + 384 + 1024)
    assert [rows.grid(count) for count in (1, 4, 5)] == [1, 1, 2]
    forms = [
        rows.choose_write_form(cache_checks.write_problem("fp8", tokens), "sm_90a")
        for tokens in (rows.FEW_TOKENS, rows.FEW_TOKENS + 1)
    ]
    assert [form.few for form in forms] == [True, False]
    assert [rows.bound_blocks(form) for form in forms] == [0, 16]


# ---- rules of entries: scales, quotients and codes of every BF16 number --------------------------


ALL_BF16 = torch.arange(0x8000, dtype=torch.int64)  # magnitudes


def test_the_fp8_scale_of_every_magnitude() -> None:
    code = rows.fp8_scale_code(ALL_BF16)
    amax = codecs.bf16_decode(ALL_BF16)
    finite = ALL_BF16 < 0x7F80
    scaled = amax[finite].clamp(min=numerics.FP8_FLOOR) * (1.0 / numerics.E4M3_LARGEST)
    want = numerics.power_of_two_above(scaled)
    assert torch.equal(codecs.ue8m0_decode(code[finite]), want)
    assert torch.equal(rows.fp8_factor(code[finite]), 1 / want)
    assert (code[~finite] == 255).all()
    assert rows.fp8_factor(code[~finite]).isnan().all()


def test_the_float32_scale_of_every_magnitude() -> None:
    amax, finite = codecs.bf16_decode(ALL_BF16), ALL_BF16 < 0x7F80
    for name, width, powers in (
        ("fp8-v32", 576, False), ("fp8-v32-ue8m0", 576, True), (rows.KEY, 128, True),
    ):  # fmt: skip
        entry = rows.entry_format(name, width)
        assert entry.powers == powers
        scale = rows.fp32_scale_bits(ALL_BF16, entry).int().view(torch.float32)
        want = amax[finite].clamp(min=numerics.FP8_FLOOR) / torch.tensor(numerics.E4M3_LARGEST)
        if powers:
            scaled = amax[finite].clamp(min=numerics.FP8_FLOOR) * (1.0 / numerics.E4M3_LARGEST)
            want = numerics.power_of_two_above(scaled)
        assert torch.equal(scale[finite], want)
        assert scale[~finite].isnan().all()


def test_the_nvfp4_scale_of_every_magnitude() -> None:
    bits = ALL_BF16[ALL_BF16 <= 0x7F80]
    got = codecs.e4m3_encode(rows.nvfp4_scale_number(codecs.bf16_decode(bits)))
    amax = codecs.bf16_decode(bits).clamp(min=6.0 * numerics.NVFP4_SCALE_FLOOR)
    want = numerics.round_e4m3(amax / 6.0).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(got, want.to(got.dtype))


@pytest.mark.parametrize("off", [-2, 0, 2])
def test_every_quotient_rounds_as_the_true_one(off: int) -> None:
    """All BF16 below saturation, all scales, and estimates that are off by two steps."""
    code = torch.arange(1, 0x7F)[:, None]
    scale = codecs.e4m3_decode(code)
    estimate = ((1 / scale).view(torch.int32) + off).view(torch.float32)
    magnitudes = torch.cat((ALL_BF16[:1], ALL_BF16[0x3A00:0x4528]))  # others are 0, or bounded
    number = codecs.bf16_decode(torch.cat((magnitudes, magnitudes + 0x8000)))[None]
    most = scale * codecs.E2M1_MAX
    assert torch.equal(most, codecs.bf16_round(most))
    bounded = torch.copysign(number.abs().minimum(most), number)
    inverse = rows.nvfp4_inverse(scale, estimate)
    assert (inverse[1] > 0).all()
    got = rows.nvfp4_quotient(bounded, inverse)
    assert (got.abs() <= codecs.E2M1_MAX).all()
    want = (number.double() / scale.double()).float()
    assert torch.equal(codecs.e2m1_encode(got), codecs.e2m1_encode(want))
    product = codecs.e2m1_encode(number * estimate)
    assert (product != codecs.e2m1_encode(got)).any()  # hence the second term


def test_words_of_codes_decode_in_python_and_on_tensors() -> None:
    for scale in (2.0**-9, 1.0, 448.0):
        for word in (0x7654_3210, 0xFEDC_BA98):
            want = [codecs.e2m1_decode(word >> 4 * i & 15) * np.float32(scale) for i in range(8)]
            got = rows.e2m1_numbers(word, np.float32(scale))
            assert [float(n) for n in got] == [float(n) for n in want]
            assert [np.signbit(n) for n in got] == [np.signbit(n) for n in want]
            tensors = rows.e2m1_numbers(torch.tensor([word]), torch.tensor([scale]))
            assert [float(n) for n in tensors] == [float(n) for n in got]


# ---- latent rows and heads: lanes and values meet once, the order is near the references ---------


FINITE = [spread for spread in plain.SPREADS if spread not in {"special", "tiny"}]


def values_of(lane: int, slot: int) -> range:
    """Return the values that a lane holds, as the kernels compute it."""
    first = rows.HALF * (slot * rows.LANES + lane)
    return range(first, first + rows.HALF)


@pytest.mark.parametrize("width", [128, 512])
def test_every_value_has_one_lane_and_turned_ones_are_the_last(width: int) -> None:
    row = rows.geometry(width)
    places = [(lane, slot) for lane in range(row.lanes) for slot in range(row.slots)]
    held = [(value, *place) for place in places for value in values_of(*place)]
    assert sorted(value for value, _, _ in held) == list(range(width))
    last, first = row.slots - 1, row.first_turned_lane
    turned = {value for value, lane, slot in held if slot == last and lane >= first}
    assert turned == set(range(row.plain, width))


@pytest.mark.parametrize("spread", FINITE)
@pytest.mark.parametrize("width", [128, 512])
def test_latent_rows_are_those_of_the_references(width: int, spread: str) -> None:
    x = plain.drawn(spread, (200, width), 3)
    weight = plain.drawn("ordinary", (width,), 4)
    positions = torch.arange(200) * 37
    numerics = Numerics.bf16()
    table = elementary.rotation_table(plain.ROPE, positions, numerics)
    want = attention.latent(x, weight, table, 1e-6, numerics)
    made = plain.normed_rows(x, weight, 1e-6).bfloat16()
    got = plain.turned_tail(made.float(), torch.cat((table.cos, table.sin), -1))
    assert plain.steps_apart(got[:, :-64], want[:, :-64]) <= 1
    exact = plain.turned_tail(
        want_before_the_turn(x, weight).float(), torch.cat((table.cos, table.sin), -1)
    )
    assert near(exact[:, -64:], want[:, -64:])


def want_before_the_turn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return elementary.rms_norm(x, weight, 1e-6, Numerics.bf16())


def near(got: torch.Tensor, want: torch.Tensor) -> bool:
    """At most one BF16 step, or, where a difference cancels, 2**-23 of the row's largest."""
    apart = (got.double() - want.double()).abs()
    step = torch.exp2(torch.floor(torch.log2(want.double().abs().clamp(min=2.0**-126))) - 7)
    largest = want.double().abs().amax(-1, keepdim=True)
    return bool((apart <= step.maximum(largest * 2.0**-23)).all())


@pytest.mark.parametrize("spread", FINITE)
@pytest.mark.parametrize("back", [False, True])
def test_heads_are_those_of_the_references(spread: str, back: bool) -> None:
    x = plain.drawn(spread, (120, rows.WIDTH), 5)
    numerics = Numerics.bf16(head_norm=HeadNorm.ONCE)
    table = elementary.rotation_table(plain.ROPE, torch.arange(120) * 91, numerics)
    turns = torch.cat((table.cos, table.sin), -1)
    if back:
        want = attention.unrotate(x[:, None], table, numerics)[:, 0]
        got = plain.turned_tail(x.float(), turns, back=True)
    else:
        want = attention.query_heads(x[:, None], table, 1e-6, numerics)[:, 0]
        got = plain.turned_tail(plain.normed_rows(x, None, 1e-6), turns)
    assert plain.steps_apart(got[:, :-64], want[:, :-64]) <= (0 if back else 1)
    assert near(got[:, -64:], want[:, -64:])


def test_the_turn_is_the_same_in_python_and_on_tensors() -> None:
    generator = np.random.default_rng(1)
    numbers, cos, sin = (generator.standard_normal(n).astype(np.float32) for n in (8, 4, 4))
    for back in (False, True):
        got = rows.turned(list(numbers), list(cos), list(sin), back=back)
        tensors = (list(torch.from_numpy(each)) for each in (numbers, cos, sin))
        assert [float(n) for n in got] == [float(n) for n in rows.turned(*tensors, back=back)]
    assert rows.turned([1.0, 0.0], [0.0], [1.0], back=False) == [0.0, 1.0]
    assert rows.turned([1.0, 0.0], [0.0], [1.0], back=True) == [0.0, -1.0]


# ---- quantising: every block has one thread, padding included; bytes -----------------------------


def walked(problem: QuantiseProblem, tactic: QuantiseTactic) -> list[tuple[int, int]]:
    """Every (row, block) that a launch visits, as the kernel computes it."""
    tile_rows, _ = tiles(problem)
    walkers, columns, _ = grid(problem, tactic, 3)
    visited = []
    for first in range(walkers):
        for tile in range(first, tile_rows, walkers):
            for column in range(columns):
                for thread in range(quantising.THREADS):
                    row, block = place_of(tile, thread % 32, thread // 32, problem.layout)
                    visited.append((row, column * quantising.TILE_BLOCKS + block))
    return visited


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("walkers", [0, 1])
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (9, 528), (129, 80), (256, 1024)])
def test_every_scale_byte_has_one_thread(
    layout: str, walkers: int, rows: int, columns: int
) -> None:
    problem = QuantiseProblem(rows, columns, layout)
    visited = walked(problem, QuantiseTactic(float("inf"), walkers))
    assert len(set(visited)) == len(visited)
    record = problem.scale_layout
    high = -(-rows // record.row_tile) * record.row_tile
    wide = -(-problem.blocks // record.column_tile) * record.column_tile
    written = [
        record.offset_of(row, block, rows, problem.blocks)
        for row, block in visited
        if row < high and block < wide
    ]
    assert sorted(written) == list(range(problem.scale_bytes))
    inside = {(row, block) for row, block in visited if row < rows and block < problem.blocks}
    assert len(inside) == rows * problem.blocks


@pytest.mark.parametrize("layout", ["128x4", "8x4"])
def test_a_warp_fills_one_sector_of_scales(layout: str) -> None:
    record = LAYOUTS[layout]
    for warp in range(quantising.WARPS):
        places = [place_of(5, lane, warp, layout) for lane in range(32)]
        offsets = sorted(record.offset_of(row, block, 256, 64) for row, block in places)
        assert offsets[0] % 32 == 0
        assert offsets == list(range(offsets[0], offsets[0] + 32))


def test_bytes_at_the_shape_of_the_bench() -> None:
    problem = QuantiseProblem(8192, 7168)
    assert problem.scale_bytes == 8192 * 448
    assert problem.bytes_moved == 117_440_512 + 29_360_128 + 3_670_016
    fused = QuantiseProblem(8192, 7168, source=SWIGLU.name, limit=10.0)
    assert fused.bytes_moved - problem.bytes_moved == 117_440_512
    assert QuantiseProblem(1, 16).scale_bytes == 512
    assert QuantiseProblem(1, 16, "8x4").scale_bytes == 32
    assert QuantiseProblem(1, 16, "linear").scale_bytes == 1


def test_grid_and_table() -> None:
    problem = QuantiseProblem(8192, 7168)
    assert tiles(problem) == (1024, 14)
    assert grid(problem, QuantiseTactic(float("inf"), 8), 132) == (75, 14, 1)
    assert grid(problem, QuantiseTactic(float("inf"), 0), 132) == (1024, 14, 1)
    assert choose_tactic(problem) is TACTICS[-1]
    assert choose_tactic(QuantiseProblem(1, 7168)) is TACTICS[0]
    assert grid(QuantiseProblem(8, 16, "8x4"), TACTICS[-1], 132) == (1, 1, 1)
    assert [registers_allowed(blocks) for blocks in (8, 5, 1)] == [32, 48, 255]


def test_extents_are_no_part_of_a_form() -> None:
    problems = [QuantiseProblem(m, k) for m in (1, 5000) for k in (16, 7168)]
    assert len({choose_form(problem, "sm_90a") for problem in problems}) == 1
    assert choose_form(QuantiseProblem(1, 16, experts=3), "sm_90a").by_expert
