"""A row of Blackwell's FC1 epilogue on any GPU: byte for byte what the quantising kernel makes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, ShapeMismatch
from degarble.harness.formats.layouts import SWIZZLE_128X4, ceil_div, round_up
from degarble.kernels.moe import problem as moe
from degarble.kernels.runtime.compiling import cubin_facts, unstated_roundings
from degarble.kernels.runtime.targets import target_of_device
from degarble.suites.kernels.moe import moe_checks as checks

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

WIDTHS = (32, 96, 128, 416, 3072)
EXPERTS, TILES = 3, 4
EXPERT_OF_TILE = (0, 2, 2, 1)
ZEROS = (slice(100, 128), slice(300, 384))  # rows at the end of a group


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.suites.support.probes.simt_probe_requantise")


def given_of(kernels: ModuleType, width: int, device: str) -> Any:
    """Draw sums; columns beyond the width hold NaN, rows of zeros are zeros."""
    generator = torch.Generator(device).manual_seed(width)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device)

    count, columns = TILES * kernels.ROWS, ceil_div(width, 128)
    sums = torch.randn(count, columns, 2, 128, generator=generator, device=device) * 200
    slots = torch.randperm(count, generator=generator, device=device).int()
    for rows in ZEROS:
        sums[rows], slots[rows] = 0, moe.NONE
    beyond = torch.arange(columns * 128, device=device).reshape(columns, 128) >= width
    sums.masked_fill_(beyond[None, :, None], torch.nan)
    experts = torch.tensor(EXPERT_OF_TILE, dtype=torch.int32, device=device)
    weights = torch.exp2(torch.floor(4 * uniform(count)) - 2)  # rounding and they change places
    return kernels.Given(
        sums.reshape(count, columns, 256),
        uniform(EXPERTS) * 0.002 + 0.001,
        slots,
        weights,
        uniform(EXPERTS) * 0.02 + 0.01,
        uniform(EXPERTS, 2) + 0.5,
        experts,
    )


def poisoned(width: int, count: int, device: str) -> Any:
    """Allocate what is written, full of poison."""
    made = checks.Nvfp4Rows(
        torch.empty(count, width // 2, dtype=torch.uint8, device=device),
        torch.empty(moe.scale_bytes(count, width), dtype=torch.uint8, device=device),
    )
    for each in made:
        each.fill_(checks.POISON)
    return made


def wanted(given: Any, form: Any, tile: int, width: int) -> Any:
    """Quantise a tile's rows by the kernel that does nothing else."""
    expert, rows = EXPERT_OF_TILE[tile], slice(tile * 128, tile * 128 + 128)
    factors = given.scale_a[expert] * given.scale_b[expert]
    both = given.sums[rows].unflatten(2, (2, 128)).transpose(1, 2).flatten(2)[..., :width]
    halves = (both * factors[None, :, None]).bfloat16().flatten(1)
    scale = given.hidden_scale[expert : expert + 1]
    made = checks.quantised(halves, scale, source="swiglu", limit=form.limit, keeps_values=True)
    if form.weighted:
        slots = given.slots[rows].long()
        weights = torch.where(slots >= 0, given.weights[slots.clamp(min=0)], 0.0)
        made = checks.quantised((made[2].float() * weights[:, None]).bfloat16(), scale)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_compiles_without_spills(kernels: ModuleType, target: str) -> None:
    kernel = kernels.compile_form(kernels.form_of(target, 10.0, weighted=True), checks.SETTINGS)
    (code,) = cubin_facts(kernel.cubin)
    assert not code.spills
    assert not unstated_roundings(kernel.ptx)
    assert (kernel.ptx.count("st.global.v4.b32"), kernel.ptx.count("st.global.b32")) == (4, 2)
    assert ("cvt.rn.satfinite.e2m1x2.f32" in kernel.ptx) == (target == "sm_100a")


def test_refuses_by_name(kernels: ModuleType) -> None:
    given, form = given_of(kernels, 96, "cpu"), kernels.form_of("sm_90a", None, weighted=False)
    out = poisoned(96, 512, "cpu")
    for error, name, other in (
        (DtypeMismatch, "sums", given._replace(sums=given.sums.half())),
        (ShapeMismatch, "sums", given._replace(slots=given.slots[:128])),
        (ShapeMismatch, "sums", given._replace(sums=given.sums.flatten(1))),
        (ShapeMismatch, "rows and width", given._replace(slots=given.slots[:100])),
        (ShapeMismatch, "scales of x", given._replace(scale_a=given.scale_a[:2])),
        (ShapeMismatch, "scales of w13", given._replace(scale_b=given.scale_b[:, :1])),
        (DtypeMismatch, "routing weights", given._replace(weights=given.weights.double())),
        (InvalidArgument, "devices of the tensors", given),
    ):
        with pytest.raises(error, match=name):
            kernels.requantise(other, 96, form, checks.SETTINGS, out)
    for width, name in ((160, "sums"), (104, "rows and width")):
        with pytest.raises(ShapeMismatch, match=name):
            kernels.requantise(given, width, form, checks.SETTINGS, out)


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("limit", [None, 10.0])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_byte_is_that_of_the_quantising_kernel(
    kernels: ModuleType, width: int, limit: float | None, weighted: bool
) -> None:
    given, blocks = given_of(kernels, width, "cuda"), width // 16
    form = kernels.form_of(target_of_device().name, limit, weighted=weighted)
    out = poisoned(width, len(given.sums), "cuda")
    kernels.requantise(given, width, form, checks.SETTINGS, out)
    for tile in range(TILES):
        rows = (tile * 128, tile * 128 + 128)
        codes, scales, *_ = wanted(given, form, tile, width)
        assert torch.equal(out.codes[slice(*rows)], codes), tile
        want = checks.scale_codes(scales, (0, 128), width)
        assert torch.equal(checks.scale_codes(out.scales, rows, width), want), tile
    padding = torch.arange(blocks, round_up(blocks, 4), device="cuda")
    rows_R1 = torch.arange(len(given.sums), device="cuda")[:, None]
    at = SWIZZLE_128X4.offset_of(rows_R1, padding, None, blocks)
    assert not bool(out.scales[at].any())


@pytest.mark.h200
@pytest.mark.b200
def test_gate_is_not_up(kernels: ModuleType) -> None:
    """What is compared above differs where the halves are exchanged."""
    given, form = (
        given_of(kernels, 128, "cuda"),
        kernels.form_of(target_of_device().name, 10.0, weighted=False),
    )
    out = poisoned(128, len(given.sums), "cuda")
    changed = given._replace(sums=given.sums.unflatten(2, (2, 128)).flip(2).flatten(2).contiguous())
    kernels.requantise(changed, 128, form, checks.SETTINGS, out)
    assert not torch.equal(out.codes[:128], wanted(given, form, 0, 128)[0])
