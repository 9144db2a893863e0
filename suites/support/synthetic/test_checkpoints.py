from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

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
from degarble.harness.formats.dialects import CANONICAL, COMPRESSED_TENSORS, MODELOPT
from degarble.harness.formats.number_formats import FP8_128X128_UE8M0, NVFP4, block_format
from degarble.harness.formats.quantise import quantise
from degarble.harness.model.config.config import (
    V4_PRO,
    Config,
    Dspark,
    V4Config,
    small_v4,
    small_v32,
)
from degarble.harness.model.layouts import LAYOUTS, layout_named
from degarble.harness.model.recipes import Recipe, Rule
from degarble.harness.model.tensors import PartKind, slots, tensors_of
from degarble.harness.model.types import Kind
from degarble.suites.checkpoint.writing_cases import quick_folder, tree
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint
from degarble.suites.support.synthetic.statistics import Statistics

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.model.parameters import Parameter

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
CONFIGS: dict[str, Config] = {
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
        found = {each.name: (each.dtype, each.shape) for each in checkpoint.entries.values()}
        assert checkpoint.model == model.config
        assert len(checkpoint.shards) == 3
    expected = tensors_of(model.config, model.layout)
    assert found == {each.name: (str(each.dtype), each.shape) for each in expected}
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
    for each in parameters.values():
        if each.kind is Kind.LINEAR:
            group = group_of(each, model.config)
            own = values[each.name, PartKind.VALUE].abs().max().float()
            amax[group] = torch.maximum(amax.get(group, own), own)
    for each in filter(is_looked_at, parameters.values()):
        weight = recipe.format_of(each).weight
        whole = values[each.name, PartKind.VALUE]
        if weight == "BF16":
            stored = found[each.name, PartKind.VALUE]
            assert torch.equal(stored.double(), whole.to(stored.dtype).double()), each.name
            continue
        fmt = block_format(weight)
        if fmt == NVFP4:
            dialect = COMPRESSED_TENSORS if packed else MODELOPT
            made = quantise(whole, fmt, dialect, amax=amax[group_of(each, model.config)])
            assert found[each.name, PartKind.TENSOR_SCALE] == made.tensor_scale, each.name
        else:
            as_bytes = FP8_128X128_UE8M0 if weight.startswith("FP8") else fmt
            made = quantise(whole, as_bytes, CANONICAL)
        codes = found[each.name, PartKind.CODES].view(torch.uint8)
        assert torch.equal(codes, made.codes.view(torch.uint8)), each.name
        scales = found[each.name, PartKind.BLOCK_SCALE]
        if scales.dtype is torch.float32:
            assert torch.equal(scales, made.scale_values()), each.name
        else:
            assert torch.equal(scales.view(torch.uint8), made.block_scale.view(torch.uint8))


@pytest.mark.parametrize(("name", "layout"), [("v4", "vllm"), ("v32", "nvfp4-full")])
def test_any_tensor_can_be_made_alone(name: str, layout: str, folder: Path) -> None:
    target, model = written(folder, name, layout)
    with Checkpoint.open(target) as checkpoint:
        for tensor in list(checkpoint.entries)[::7]:
            alone = Synthetic(CONFIGS[name], layout, seed=5, statistics=DEAD)
            made = b"".join(
                bytes(each.reshape(-1).view(torch.uint8).numpy()) for each in alone.chunks(tensor)
            )
            assert made == checkpoint.raw(tensor), tensor
    with pytest.raises(UnknownName, match="lm_head"):
        list(model.chunks("lm_heat.weight"))


def dead_experts(found: Held, config: Config) -> set[str]:
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
            each.name: (str(each.dtype), each.shape) for each in expected
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
