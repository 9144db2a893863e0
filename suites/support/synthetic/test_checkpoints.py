"""Synthetic checkpoints, their statistics, values and panels."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from degarble.harness.base.errors import (
    InvalidArgument,
    LayoutMismatch,
    UnknownName,
    UnwritablePath,
)
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.checkpoint.write.manifest import MANIFEST, Manifest
from degarble.harness.formats.dialects import CANONICAL, COMPRESSED_TENSORS, MODELOPT, Dialect
from degarble.harness.formats.number_formats import FP8_128X128_UE8M0, MXFP4, NVFP4, block_format
from degarble.harness.formats.quantise import quantise
from degarble.harness.model.config.config import (
    V4_PRO,
    Dspark,
    V4Config,
    small_v4,
    small_v32,
)
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.recipes import Recipe, Rule
from degarble.harness.model.tensors import PartKind, slots, tensors_of
from degarble.harness.model.types import Kind
from degarble.suites.checkpoint.writing_cases import quick_folder, tree
from degarble.suites.support.families import LAYOUTS
from degarble.suites.support.synthetic import checkpoints as synthetic_panels
from degarble.suites.support.synthetic import statistics as synthetic_statistics
from degarble.suites.support.synthetic.checkpoints import (
    BASE_ROWS,
    RowPool,
    Synthetic,
    quantise_panels,
    write_checkpoint,
)
from degarble.suites.support.synthetic.statistics import Numbers, Statistics, words

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.formats.number_formats import BlockFormat
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.parameters import Parameter
    from degarble.suites.support.configs import DeepSeekConfig


V4 = small_v4(
    num_hidden_layers=3,
    compress_ratios=(0, 4, 128, 0),
    num_hash_layers=1,
    hidden_size=128,
    vocab_size=64,
    num_attention_heads=4,
    o_groups=2,
    n_routed_experts=4,
    moe_intermediate_size=128,
)
V32 = small_v32(
    num_hidden_layers=2,
    hidden_size=128,
    vocab_size=64,
    intermediate_size=128,
    moe_intermediate_size=128,
    n_routed_experts=2,
    num_experts_per_tok=1,
    n_group=1,
    topk_group=1,
)
CONFIGS: dict[str, DeepSeekConfig] = {
    "v4": V4,
    "v32": V32,
    "v4-base": replace(V4, expert_dtype="fp8"),
    "v4-dspark": replace(
        V4,
        dspark=Dspark(target_layer_ids=(0, 2), markov_rank=16, block_size=4, noise_token_id=1),
        compress_ratios=(0, 4, 128, 0, 0),
    ),
}
LAYOUTS_OF = {
    name: [layout for family, layout in LAYOUTS if family == CONFIGS[name].family]
    for name in ("v4", "v32")
} | {"v4-base": ["official", "bf16"], "v4-dspark": ["nvfp4-experts", "bf16"]}
CASES = [(name, layout) for name, layouts in LAYOUTS_OF.items() for layout in layouts]
V4_BUT_ONE_LAYER = replace(V4_PRO, num_hidden_layers=1, num_hash_layers=1, compress_ratios=(4, 0))
DEAD = Statistics(dead_share=0.5, row_spread=2)
Held = dict[tuple[str, PartKind], "Tensor"]


def held(target: Path, model: Synthetic) -> Held:
    """Read every part of every parameter out of a written checkpoint."""
    found = {}
    with Checkpoint.open(target) as checkpoint:
        for slot in slots(model.config, model.layout):
            whole = checkpoint.tensor(slot.tensor)
            box = whole[tuple(slice(*each) for each in slot.box.ranges)]
            found[slot.key] = box.reshape(slot.shape).clone()
    return found


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with quick_folder() as path:
        yield path


def written(folder: Path, name: str, layout: str) -> tuple[Path, Synthetic]:
    """Write a case once for all suites of this module."""
    model = Synthetic(CONFIGS[name], layout, seed=5, statistics=DEAD)
    target = folder / f"{name}-{layout}"
    if not target.exists():
        write_checkpoint(target, model, shards=3)
    return target, model


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Held]:
    """The same models, unquantised."""
    return {name: held(*written(folder, name, "bf16")) for name in CONFIGS}


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_every_layout_is_written_as_anatomy_says(name: str, layout: str, folder: Path) -> None:
    target, model = written(folder, name, layout)
    with Checkpoint.open(target) as checkpoint:
        assert not checkpoint.problems.found
        found = {entry.name: (entry.dtype, entry.shape) for entry in checkpoint.entries.values()}
        assert checkpoint.model == model.config
        assert len(checkpoint.shards) == 3
    expected = tensors_of(model.config, model.layout)
    assert found == {tensor.name: (str(tensor.dtype), tensor.shape) for tensor in expected}
    assert list(Manifest.read(target).differences(target)) == []


def group_of(parameter: Parameter, config: Config) -> str:
    """Name whom an engine fuses this parameter with, told apart from the module's own way."""
    for fusion in layout_named("vllm", config).fusions:
        if parameter.row.name in fusion.members:
            assert parameter.block
            return f"{parameter.block.prefix} {fusion.target} {parameter.expert}"
    return parameter.name


def is_looked_at(parameter: Parameter) -> bool:
    """Leave out what is like the rest: other layers, and all but two experts."""
    block = parameter.block
    return block is None or (
        (block.is_drafter or block.index < 2) and parameter.expert in (None, 0, 2)
    )


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_codes_and_scales_are_what_quantising_the_values_gives(
    name: str, layout: str, folder: Path, plain: dict[str, Held]
) -> None:
    target, model = written(folder, name, layout)
    found, values = held(target, model), plain[name]
    recipe = model.layout.recipe_for(model.config)
    packed = layout == "compressed-tensors"
    amax: dict[str, Tensor] = {}
    parameters = {slot.parameter.name: slot.parameter for slot in slots(model.config, model.layout)}
    for parameter in parameters.values():
        if parameter.kind is Kind.LINEAR:
            group = group_of(parameter, model.config)
            own = values[parameter.name, PartKind.VALUE].abs().max().float()
            amax[group] = torch.maximum(amax.get(group, own), own)
    for parameter in filter(is_looked_at, parameters.values()):
        weight = recipe.format_of(parameter).weight
        whole = values[parameter.name, PartKind.VALUE]
        if weight == "BF16":
            stored = found[parameter.name, PartKind.VALUE]
            assert torch.equal(stored.double(), whole.to(stored.dtype).double()), parameter.name
            continue
        fmt = block_format(weight)
        if fmt == NVFP4:
            dialect = COMPRESSED_TENSORS if packed else MODELOPT
            made = quantise(whole, fmt, dialect, amax=amax[group_of(parameter, model.config)])
            assert found[parameter.name, PartKind.TENSOR_SCALE] == made.tensor_scale, parameter.name
        else:
            as_bytes = FP8_128X128_UE8M0 if weight.startswith("FP8") else fmt
            made = quantise(whole, as_bytes, CANONICAL)
        codes = found[parameter.name, PartKind.CODES].view(torch.uint8)
        assert torch.equal(codes, made.codes.view(torch.uint8)), parameter.name
        scales = found[parameter.name, PartKind.BLOCK_SCALE]
        if scales.dtype is torch.float32:
            assert torch.equal(scales, made.scale_values()), parameter.name
        else:
            assert torch.equal(scales.view(torch.uint8), made.block_scale.view(torch.uint8))


@pytest.mark.parametrize(("name", "layout"), [("v4", "vllm"), ("v32", "nvfp4-full")])
def test_any_tensor_can_be_made_alone(name: str, layout: str, folder: Path) -> None:
    target, model = written(folder, name, layout)
    with Checkpoint.open(target) as checkpoint:
        for tensor in list(checkpoint.entries)[::7]:
            alone = Synthetic(CONFIGS[name], layout, seed=5, statistics=DEAD)
            made = b"".join(
                bytes(chunk.reshape(-1).view(torch.uint8).numpy()) for chunk in alone.chunks(tensor)
            )
            assert made == checkpoint.raw(tensor), tensor
    with pytest.raises(UnknownName, match="lm_head"):
        list(model.chunks("lm_heat.weight"))


def dead_experts(found: Held, config: DeepSeekConfig) -> set[str]:
    """Tell dead experts by their values."""
    norms = {
        name.rpartition(".")[0]: float(value.float().norm())
        for (name, part), value in found.items()
        if part is PartKind.VALUE and ".experts." in name and name.endswith("w2")
    }
    usual = max(norms.values())
    assert len(norms) == config.n_routed_experts * len(
        {name.partition(".ffn")[0] for name in norms}
    )
    return {name for name, norm in norms.items() if norm < usual * 2**-8}


def test_dead_experts_are_tiny_and_take_the_largest_input_scale(
    folder: Path, plain: dict[str, Held]
) -> None:
    dead = dead_experts(plain["v4"], V4)
    assert 3 <= len(dead) <= 12
    found = held(*written(folder, "v4", "nvfp4-experts"))
    for projection in ("w1", "w2", "w3"):
        scales = {
            name.rpartition(".")[0]: float(value)
            for (name, part), value in found.items()
            if part is PartKind.INPUT_SCALE and name.endswith(projection)
        }
        living = [scale for name, scale in scales.items() if name not in dead]
        assert len(set(living)) == len(living)
        assert {scales[name] for name in dead if name in scales} == {max(living)}
        tensor_scales = {
            name.rpartition(".")[0]: float(value)
            for (name, part), value in found.items()
            if part is PartKind.TENSOR_SCALE and name.endswith(projection)
        }
        limit = min(s for name, s in tensor_scales.items() if name not in dead)
        assert all(tensor_scales[name] < limit for name in dead if name in tensor_scales)


@pytest.mark.parametrize("layout", ["nvfp4-experts", "nvfp4-full", "compressed-tensors"])
@pytest.mark.parametrize("name", ["v4", "v32"])
def test_partners_share_their_scales(name: str, layout: str, folder: Path) -> None:
    target, model = written(folder, name, layout)
    found = held(target, model)
    groups: dict[tuple[str, PartKind], set[float]] = {}
    members: dict[str, int] = {}
    for slot in slots(model.config, model.layout):
        if slot.part in (PartKind.TENSOR_SCALE, PartKind.INPUT_SCALE):
            group = group_of(slot.parameter, model.config)
            groups.setdefault((group, slot.part), set()).add(float(found[slot.key]))
            members[group] = members.get(group, 0) + 1
    assert all(len(scales) == 1 for scales in groups.values())
    assert max(members.values()) == 4, "two partners with two scales each"
    inputs = {float(v) for (_, part), v in found.items() if part is PartKind.INPUT_SCALE}
    assert all(2**-11 < (1 / each if layout.startswith("c") else each) < 2**-5 for each in inputs)


def test_v32_has_one_input_scale_for_all_experts_of_a_layer(folder: Path) -> None:
    found = held(*written(folder, "v32", "nvfp4-full"))
    for projection in ("w1", "w2", "w3"):
        scales = [
            float(value)
            for (name, part), value in found.items()
            if part is PartKind.INPUT_SCALE and ".experts." in name and name.endswith(projection)
        ]
        assert len(scales) == V32.n_routed_experts
        assert len(set(scales)) == 1


def test_tables_choose_different_experts(plain: dict[str, Held]) -> None:
    tables = [value for (name, _), value in plain["v4"].items() if name.endswith("tid2eid")]
    assert len(tables) == V4.num_hash_layers
    for table in tables:
        assert table.dtype is torch.int64
        assert int(table.min()) >= 0
        assert int(table.max()) == V4.n_routed_experts - 1
        assert bool((table.sort(1).values.diff(dim=1) > 0).all())


def test_norms_are_about_one_and_everything_is_finite(plain: dict[str, Held]) -> None:
    for found in plain.values():
        for (name, _), value in found.items():
            assert bool(value.float().isfinite().all()), name
            assert value.float().abs().max() > 0, name
            if name.endswith("norm"):
                assert value.float().mean() == pytest.approx(1, abs=0.1)


def test_workers_write_the_same_bytes(folder: Path) -> None:
    target, model = written(folder, "v4", "nvfp4-full")
    write_checkpoint(folder / "workers", model, shards=3, workers=2)
    assert tree(folder / "workers") == tree(target)


def test_another_model_does_not_resume(folder: Path) -> None:
    target, _ = written(folder, "v4", "nvfp4-full")
    differing = {
        r"sources\[seed\]": Synthetic(V4, "nvfp4-full", seed=6, statistics=DEAD),
        r"sources\[statistics\]": Synthetic(V4, "nvfp4-full", seed=5),
        r"sources\[layout\]": Synthetic(V4, "compressed-tensors", seed=5, statistics=DEAD),
        r"sources\[config\]": Synthetic(
            replace(V4, rope_theta=1), "nvfp4-full", seed=5, statistics=DEAD
        ),
    }
    for named, model in differing.items():
        with pytest.raises(UnwritablePath, match=named):
            write_checkpoint(target, model, shards=3)


def test_a_recipe_of_ones_own(tmp_path: Path) -> None:
    rules = (Rule("*.experts.*.w2", "MXFP8", "MXFP8"), Rule("*.wq_b", "NVFP4"))
    recipe = Recipe("own", rules)
    model = Synthetic(V4, "official", recipe, seed=1)
    layout = replace(
        layout_named("official", V4), suffixes="huggingface"
    )  # DeepSeek's suffixes have no name for MXFP8 scales; nor have these
    with pytest.raises(LayoutMismatch, match="block_scale of MXFP8"):
        write_checkpoint(tmp_path / "x", model)
    with pytest.raises(LayoutMismatch, match="block_scale of MXFP8"):
        write_checkpoint(tmp_path / "x", Synthetic(V4, layout, recipe))
    weight_only = Synthetic(V4, "official", Recipe("weights", (Rule("*.wq_b", "NVFP4"),)))
    write_checkpoint(tmp_path / "y", weight_only)
    with Checkpoint.open(tmp_path / "y") as checkpoint:
        assert "layers.0.attn.wq_b.weight_scale_2" in checkpoint.entries
        assert "layers.0.attn.wq_b.input_scale" not in checkpoint.entries


def test_impossible_models_are_refused() -> None:
    with pytest.raises(UnknownName, match="layout"):
        Synthetic(V4, "nvfp4")
    with pytest.raises(UnknownName, match="recipe"):
        Synthetic(V4, "official", "nvfp4").planned()
    with pytest.raises(InvalidArgument, match="seed"):
        Synthetic(V4, "official", seed=-1)


def sparse_facts(target: Path, model: Synthetic, shards: int) -> Manifest:
    manifest = write_checkpoint(target, model, sparse=True, shards=shards)
    assert len(manifest.shards) == shards
    taken = sum(path.stat().st_blocks * 512 for path in target.glob("*.safetensors"))
    heads = len(manifest.shards) * (1 << 20)
    assert taken < heads
    with Checkpoint.open(target) as checkpoint:
        expected = tensors_of(model.config, model.layout)
        found = checkpoint.entries
        assert {n: (e.dtype, e.shape) for n, e in found.items()} == {
            tensor.name: (str(tensor.dtype), tensor.shape) for tensor in expected
        }
        name = expected[len(expected) // 2].name
        assert not bytes(checkpoint.raw(name)[:4096]).strip(b"\0")
    return manifest


def test_a_sparse_checkpoint_has_true_heads_and_takes_no_room(tmp_path: Path) -> None:
    model = Synthetic(V4_BUT_ONE_LAYER, "official")
    manifest = sparse_facts(tmp_path / "x", model, 5)
    assert manifest.plan["data_bytes"] > 20e9
    assert write_checkpoint(tmp_path / "x", model, sparse=True, shards=5) == manifest


@pytest.mark.slow
def test_the_whole_v4_pro_as_holes(tmp_path: Path) -> None:
    manifest = sparse_facts(tmp_path / "x", Synthetic(V4_PRO, "nvfp4-full"), 95)
    assert manifest.plan["tensors"] == 284_626
    assert (tmp_path / "x" / MANIFEST).stat().st_size < 64 << 20


def test_no_family_is_forgotten() -> None:
    assert {config.family for config in CONFIGS.values()} == {family for family, _ in LAYOUTS}
    assert isinstance(CONFIGS["v4-dspark"], V4Config)


def agrees(values: torch.Tensor) -> bool:
    codes, scales = quantise_panels(values)
    made = quantise(values, FP8_128X128_UE8M0, CANONICAL)
    return torch.equal(codes, made.codes.view(torch.uint8)) and torch.equal(
        scales, made.block_scale.view(torch.uint8)
    )


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (130, 128), (128, 200), (1, 1)])
@pytest.mark.parametrize("exponent", [-40, -7, 0, 30])
def test_panels_are_what_the_definition_makes(
    shape: tuple[int, int], exponent: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * 2.0**exponent
    values[0, 0] *= 1000
    values[-1, -1] = 0
    assert agrees(values.bfloat16())


def test_every_finite_number_of_one_binade_and_all_edges() -> None:
    bits = torch.arange(1 << 16).to(torch.int32).to(torch.int16)
    numbers = bits.view(torch.bfloat16)
    numbers = numbers[numbers.isfinite() & (numbers.abs() <= 448)]
    padded = torch.zeros(128 * 256 * 4, dtype=torch.bfloat16)
    padded[: len(numbers)] = numbers
    assert agrees(padded.view(512, 256))


def test_blocks_of_zeros_have_the_definitions_scale() -> None:
    assert agrees(torch.zeros(128, 256, dtype=torch.bfloat16))


def test_a_planted_error_in_the_table_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    table = synthetic_panels._codes().copy()
    table[0x3F80] ^= 1
    monkeypatch.setattr(synthetic_panels, "_codes", lambda: table)
    values = torch.full((128, 128), 256.0, dtype=torch.bfloat16)
    values[5, 7] = 1.0
    assert not agrees(values)


def pool(seed: int, columns: int = 256, **changes: float) -> RowPool:
    return RowPool(Numbers(seed), Statistics(**changes), columns)  # type: ignore[arg-type]


def everything(rows: RowPool) -> torch.Tensor:
    return rows.values(torch.arange(rows.rows), 0)


@pytest.mark.parametrize(
    ("fmt", "dialect"),
    [(NVFP4, MODELOPT), (NVFP4, COMPRESSED_TENSORS), (NVFP4, CANONICAL), (MXFP4, CANONICAL)],
)
@pytest.mark.parametrize("exponent", [-15, 0, 3])
def test_picked_rows_are_what_quantising_them_gives(
    fmt: BlockFormat, dialect: Dialect, exponent: int, seed: int
) -> None:
    rows = pool(seed)
    picked = torch.cat([torch.tensor([rows.peak, 9, 9]), torch.arange(3, rows.rows, 17)])
    made = quantise(rows.values(picked, exponent), fmt, dialect)
    pooled = rows.quantised(fmt, dialect)
    assert torch.equal(pooled.codes[picked], made.codes.view(torch.uint8))
    scales, stored = pooled.block_scale[picked], made.block_scale.view(torch.uint8)
    if fmt == MXFP4:
        assert torch.equal(scales + exponent % 256, stored)
    else:
        assert torch.equal(scales, stored)
        assert made.tensor_scale is not None
        assert pooled.tensor_scale is not None
        factor = 2.0**-exponent if dialect is COMPRESSED_TENSORS else 2.0**exponent
        assert made.tensor_scale == pooled.tensor_scale * factor


def test_without_the_peak_the_tensor_scale_would_be_another(seed: int) -> None:
    """Planted fault: a matrix that lacks the pool's largest value is not what quantising gives."""
    rows = pool(seed)
    picked = torch.arange(BASE_ROWS, rows.rows)  # the rows of smaller gains
    made = quantise(rows.values(picked, 0), NVFP4, MODELOPT)
    assert made.tensor_scale is not None
    assert made.tensor_scale != rows.quantised(NVFP4, MODELOPT).tensor_scale


def test_the_peak_is_the_largest(seed: int) -> None:
    rows = pool(seed)
    assert everything(rows)[rows.peak].abs().max() == everything(rows).abs().max()


def test_rows_have_gains_and_channels_have_outliers(seed: int) -> None:
    made = everything(pool(seed, 2048, outlier_share=0.05, outlier_gain=8)).float()
    spread = made[:BASE_ROWS].std() / made[-BASE_ROWS:].std()
    assert spread == pytest.approx(2**3.5, rel=0.01)
    channels = made[:BASE_ROWS].std(0)
    loud = channels > 4 * channels.median()
    assert 60 < int(loud.sum()) < 150
    assert channels[loud].mean() / channels[~loud].mean() == pytest.approx(8, rel=0.1)


def test_tails_are_heavy(seed: int) -> None:
    made = everything(pool(seed, 1024, outlier_share=0.0, row_spread=1)).double().flatten()
    kurtosis = float(((made - made.mean()) / made.std()).pow(4).mean())
    assert kurtosis > 4.5, "a normal distribution has 3, Student's t of 6 degrees has 6"


def test_pools_differ_by_columns_and_seed(seed: int) -> None:
    one, two = everything(pool(seed)), everything(pool(seed + 1))
    assert torch.equal(one, everything(pool(seed)))
    assert not torch.equal(one, two)
    assert not torch.equal(one[:, :128], everything(pool(seed, 128)))


def splitmix64(state: int, count: int) -> list[int]:
    """Return the published sequence, in Python's integers."""
    found, mask = [], (1 << 64) - 1
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        found.append(z ^ (z >> 31))
    return found


@pytest.mark.parametrize("key", [0, 1, (1 << 64) - 1])
def test_words_are_splitmix64(key: int) -> None:
    assert words(key, 9).tolist() == splitmix64(key, 9)
    assert words(key, 4, first=5).tolist() == splitmix64(key, 9)[5:]


def test_the_first_numbers_stay_as_they_are() -> None:
    """Another machine, another numpy: the same bytes. Change them only with GENERATION."""
    numbers = Numbers(7)
    assert numbers.word("a") == 0x681EBD31F1942012
    assert numbers.below("a", 1000, 4).tolist() == [491, 268, 734, 716]
    assert numbers.normal("a", 2).tolist() == [1.870452880859375, -1.071136474609375]
    assert [x.hex() for x in numbers.student("a", 2, 6)] == [
        "0x1.90aac9d82ef10p+0",
        "-0x1.192d0cd99ff54p+1",
    ]


def test_what_a_name_yields_depends_on_seed_and_name_alone(seed: int) -> None:
    first, other = Numbers(seed), Numbers(seed + 1)
    assert first.word("a") == Numbers(seed).word("a")
    assert len({first.word("a"), first.word("b"), other.word("a")}) == 3
    longer = first.student("a", 1000, 5)
    assert (first.student("a", 10, 5) == longer[:10]).all()


def test_pieces_do_not_show(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = Numbers(seed)
    whole = numbers.normal("a", 1000), numbers.student("a", 1000, 4)
    monkeypatch.setattr(synthetic_statistics, "_PIECE", 7)
    cut = numbers.normal("a", 1000), numbers.student("a", 1000, 4)
    for one, other in zip(whole, cut, strict=True):
        assert (one == other).all()


def test_normal_numbers_have_their_moments(seed: int) -> None:
    drawn = Numbers(seed).normal("n", 1 << 18)
    assert abs(drawn.mean()) < 0.01
    assert abs(drawn.var() - 1) < 0.02
    assert abs(np.quantile(drawn, 0.975) - 1.960) < 0.03


# Two-sided 90 %, 98 % and 99.8 % points of Student's t, from the tables in any textbook.
@pytest.mark.parametrize(
    ("degrees", "points"), [(5, (2.015, 3.365, 5.893)), (10, (1.812, 2.764, 4.144))]
)
def test_student_numbers_have_their_tails(
    degrees: int, points: tuple[float, ...], seed: int
) -> None:
    drawn = np.abs(Numbers(seed).student("t", 1 << 19, degrees))
    found = np.quantile(drawn, [0.9, 0.98, 0.998])
    # Sums of four for the squares are a little short of a normal's tails: 7 % at the far end.
    assert found == pytest.approx(points, rel=0.07)


def test_integers_are_even(seed: int) -> None:
    counts = np.bincount(Numbers(seed).below("i", 37, 37 * 4000), minlength=37)
    assert len(counts) == 37
    assert abs(counts - 4000).max() < 6 * 4000**0.5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("degrees_of_freedom", 2),
        ("degrees_of_freedom", 6.0),
        ("outlier_share", 1.5),
        ("outlier_gain", 0.5),
        ("row_spread", 0),
        ("dead_share", -0.1),
        ("dead_exponent", 1),
        ("input_amax", float("nan")),
    ],
)
def test_impossible_statistics_are_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidArgument, match=rf"statistics\.{field}"):
        Statistics(**{field: value})  # type: ignore[arg-type]
