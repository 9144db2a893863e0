"""Prove which bytes reach which parameter, against loaders that really move them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from degarble.harness.base.errors import InvalidArgument, LayoutMismatch, ShapeMismatch, UnknownName
from degarble.harness.checkpoint.audit.loader import targets
from degarble.harness.checkpoint.audit.loader.engine_maps import Ranks, engine_map
from degarble.harness.checkpoint.audit.loader.findings import (
    NO_SLOT,
    fits,
    judge_dtype,
    judge_write,
    piece,
)
from degarble.harness.checkpoint.audit.loader.map_files import loader_map_from_text
from degarble.harness.checkpoint.audit.loader.maps import (
    ListedParameter,
    LoaderMap,
    Rename,
    Split,
    Stack,
)
from degarble.harness.checkpoint.audit.loader.proof import (
    KINDS,
    SHARE_HEADER,
    RankShare,
    prove,
    rank_shares,
    share_rows,
)
from degarble.harness.checkpoint.audit.loader.routes import Writer
from degarble.harness.checkpoint.audit.loader.sources import SourceTensor
from degarble.harness.checkpoint.audit.loader.targets import (
    EngineTargets,
    ExpectedContent,
    Member,
    byte_runs,
    cover,
    joined,
    listed_targets,
    ranks_of,
)
from degarble.harness.checkpoint.read.types import DTYPE_BITS, TensorEntry
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.model.config.config import V4Config
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.parameters import parameter_named
from degarble.harness.model.sharding import plan, rank_tensors
from degarble.harness.model.tensors import PartKind
from degarble.harness.model.types import Box
from degarble.suites.checkpoint.audit.loader.loader_cases import (
    FIELD,
    inventory_of,
    map_of,
    moved,
    numbered,
    proven,
    require_claims,
    sliced,
)
from degarble.suites.checkpoint.audit.loader.loader_vllm import Rank, loaded, v4_place, v32_place
from degarble.suites.checkpoint.structure_cases import V4, V32, errors, replant, told, write
from degarble.suites.support.families import LAYOUTS
from degarble.suites.support.thinned import thinned

if TYPE_CHECKING:
    from collections.abc import Callable

    from degarble.harness.model.parameters import Parameter
    from degarble.suites.checkpoint.audit.loader.loader_vllm import Place
    from degarble.suites.support.configs import DeepSeekConfig


# --------------------------------------------------------------------------------------------------
# Boxes against arrays that are painted element by element.

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def covered(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Box, ...]]:
    shape = draw(SHAPES)
    box = st.tuples(
        *(
            st.tuples(st.integers(0, extent), st.integers(0, extent)).map(
                lambda pair: (min(pair), max(pair))
            )
            for extent in shape
        )
    )
    return shape, tuple(map(Box, draw(st.lists(box, max_size=6))))


def painted(shape: tuple[int, ...], held: tuple[Box, ...]) -> np.ndarray:
    found = np.zeros(shape, dtype=int)
    for box in held:
        found[tuple(slice(*each) for each in box.ranges)] += 1
    return found


@given(covered())
def test_cover_is_what_painting_shows(case: tuple[tuple[int, ...], tuple[Box, ...]]) -> None:
    shape, held = case
    counts = painted(shape, held)
    found = cover(shape, held)
    missing, twice = painted(shape, found.missing), painted(shape, found.twice)
    assert ((counts == 0) == (missing == 1)).all()
    assert ((counts >= 2) == (twice == 1)).all()
    assert max(missing.max(initial=0), twice.max(initial=0)) <= 1
    union = painted(shape, joined(shape, held))
    assert ((counts > 0) == (union == 1)).all()


def test_a_planted_gap_of_one_element_is_found() -> None:
    experts = [
        Box(((e, e + 1), (half * 6, half * 6 + 6), (0, 8))) for e in range(48) for half in (0, 1)
    ]
    assert cover((48, 12, 8), tuple(experts)) == ((), ())
    experts[17] = Box(((8, 9), (6, 12), (0, 7)))
    assert cover((48, 12, 8), tuple(experts)).missing == (Box(((8, 9), (6, 12), (7, 8))),)
    experts[17] = Box(((8, 9), (5, 12), (0, 8)))
    assert cover((48, 12, 8), tuple(experts)).twice == (Box(((8, 9), (5, 6), (0, 8))),)


def test_slabs_that_are_alike_are_worked_out_once() -> None:
    experts = [Box(((e, e + 1), (h, h + 1), (0, 8))) for e in range(384) for h in (0, 1)]
    targets._sweep.cache_clear()
    assert cover((384, 2, 8), tuple(experts)) == ((), ())
    assert targets._sweep.cache_info().misses < 10


def test_a_box_outside_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="leaves"):
        cover((4,), (Box(((0, 5),)),))


@given(covered())
def test_runs_are_the_bytes_that_painting_shows(
    case: tuple[tuple[int, ...], tuple[Box, ...]],
) -> None:
    shape, held = case
    count = int(np.prod(shape))
    entry = TensorEntry("t", "F32", shape, Path("f"), 100, 100 + 4 * count)
    for box in held:
        runs = byte_runs(entry, box)
        found = np.zeros(4 * count, dtype=int)
        for begin, end in runs:
            assert end - begin == runs.length
            found[begin - 100 : end - 100] += 1
        inside = np.repeat(painted(shape, (box,)).reshape(-1), 4)
        assert (found == inside).all()
        assert runs.nbytes == 4 * box.count


def test_rows_of_a_matrix_are_one_run() -> None:
    entry = TensorEntry("t", "BF16", (512, 64), Path("f"), 1000, 1000 + 512 * 128)
    runs = byte_runs(entry, Box(((128, 256), (0, 64))))
    assert (runs.count, runs.first, runs.nbytes) == (1, 1000 + 128 * 128, 128 * 128)
    assert byte_runs(entry, Box(((0, 512), (0, 32)))).count == 512


def test_half_a_byte_is_refused() -> None:
    entry = TensorEntry("t", "F4", (2, 6), Path("f"), 0, 6)
    assert byte_runs(entry, Box(((1, 2), (2, 4)))).first == 4
    with pytest.raises(ShapeMismatch, match="whole bytes of F4"):
        byte_runs(entry, Box(((0, 2), (1, 3))))


# --------------------------------------------------------------------------------------------------
# What ranks hold: anatomy's own list of a rank, and where each element belongs.

RANKS = [(1, 1, 1), (2, 1, 1), (2, 2, 1), (1, 4, 1), (2, 4, 2), (2, 1, 3)]
ENGINES: list[tuple[DeepSeekConfig, str]] = [
    (V4 if family == V4Config.family else V32, name) for family, name in LAYOUTS if name == "vllm"
]


@pytest.mark.parametrize(
    ("config", "name", "ranks"),
    [
        (config, name, ranks)
        for config, name in ENGINES
        for ranks in RANKS
        if ranks[2] <= config.num_hidden_layers
    ],
)
def test_a_rank_has_what_anatomy_lists(
    config: DeepSeekConfig, name: str, ranks: tuple[int, int, int]
) -> None:
    layout, sharding_plan = layout_named(name, config), plan(config, *ranks)
    found = EngineTargets(config, layout, sharding_plan)(range(sharding_plan.ranks))
    for held in found:
        listed = rank_tensors(sharding_plan, layout, held.rank)
        assert sorted(
            (tensor.name, str(tensor.dtype), tensor.shape) for tensor in listed
        ) == sorted((target.name, target.dtype, target.shape) for target in held.targets.values())
        assert not any(any(target.cover_of_all) for target in held.targets.values())


@pytest.mark.parametrize("ranks", RANKS)
def test_truths_of_all_ranks_tile_every_part(ranks: tuple[int, int, int]) -> None:
    sharding_plan = plan(V4, *ranks)
    boxes: dict[tuple[str, PartKind], set[Box]] = {}
    for held in EngineTargets(V4, layout_named("vllm", V4), sharding_plan)(
        range(sharding_plan.ranks)
    ):
        for target in held.targets.values():
            for member in target.members.values():
                truth = held.truth(member)
                assert truth is not None
                assert truth.box.count == member.box.count
                boxes.setdefault((truth.parameter.name, truth.part), set()).add(truth.box)
    for key, box in boxes.items():
        ranges = zip(*(box.ranges for box in box), strict=True)
        ends = [max(stop for _, stop in each) for each in ranges]
        missing, twice = cover(tuple(ends), tuple(box))
        assert not missing, key
        assert not twice, key


def test_ranks_that_are_alike_share_their_targets() -> None:
    ranks = list(EngineTargets(V4, layout_named("vllm", V4), plan(V4, 1, 4))(range(4)))
    assert all(rank.targets is ranks[0].targets for rank in ranks)
    assert [rank.first_expert for rank in ranks] == [0, 1, 2, 3]
    stacks = [
        target_parameter
        for target_parameter in ranks[0].targets.values()
        if target_parameter.stacked
    ]
    for held in ranks:
        for target in stacks:
            for member in target.members.values():
                truth = held.truth(member)
                assert truth is not None
                assert truth.parameter.expert == held.first_expert


def test_one_rank_can_be_requested_alone() -> None:
    assert ranks_of(LoaderMap("m", (ListedParameter("a", "U8", (1,)),), tp=2, ep=4, pp=3)) == range(
        12
    )
    one = LoaderMap("m", (ListedParameter("a", "U8", (1,)),), tp=2, ep=4, pp=3, rank=7)
    assert ranks_of(one) == range(7, 8)


def test_a_list_becomes_slots_and_experts() -> None:
    listed = (
        ListedParameter("stack", "U8", (2, 6, 5), (4, 2), experts=True),
        ListedParameter("fused", "BF16", (6, 5), (1, 5)),
        ListedParameter("plain", "BF16", (3,)),
        ListedParameter("scalar", "F32", ()),
        ListedParameter("scalars", "F32", (2,), experts=True),
    )
    loader_map = LoaderMap("m", listed, tp=2, ep=4)
    ranks = list(listed_targets(loader_map, ranks_of(loader_map)))
    assert [(rank.tp_rank, rank.first_expert) for rank in ranks] == [
        (0, 0),
        (1, 2),
        (0, 4),
        (1, 6),
    ]
    targets = ranks[0].targets
    stack = targets["stack"]
    assert {key: member.box.ranges for key, member in stack.members.items()} == {
        (0, 0): ((0, 1), (0, 4), (0, 5)),
        (0, 1): ((0, 1), (4, 6), (0, 5)),
        (1, 0): ((1, 2), (0, 4), (0, 5)),
        (1, 1): ((1, 2), (4, 6), (0, 5)),
    }
    assert [member.box.shape for member in targets["fused"].members.values()] == [(1, 5), (5, 5)]
    assert list(targets["scalar"].members) == [(None, 0)]
    assert list(targets["scalars"].members) == [(0, 0), (1, 0)]
    for listed_parameter, target in zip(listed, targets.values(), strict=True):
        assert (target.name, target.dtype, target.shape) == (
            listed_parameter.name,
            listed_parameter.dtype,
            listed_parameter.shape,
        )
        assert sum(member.box.count for member in target.members.values()) == prod(
            listed_parameter.shape
        )
        assert ranks[0].truth(next(iter(target.members.values()))) is None


# --------------------------------------------------------------------------------------------------
# One tensor into one slot: cuts, extents, types and identities, one by one.


@given(
    st.integers(0, 300), st.integers(1, 9), st.integers(1, 130), st.sampled_from([(), (3,), (2, 5)])
)
def test_pieces_tile_a_tensor(
    extent: int, ranks: int, multiple: int, rest: tuple[int, ...]
) -> None:
    shape = (*rest, extent)
    split = Split("x", len(rest), multiple)
    pieces = tuple(piece(shape, split, ranks, rank) for rank in range(ranks))
    assert cover(shape, pieces) == ((), ())
    inner = [box.ranges[len(rest)][0] for box in pieces if box.count]
    assert all(begin % multiple == 0 for begin in inner)


def test_what_has_no_such_dimension_is_repeated() -> None:
    for split in (None, Split("x", 1), Split("x", 2)):
        assert piece((8,), split, 4, 3) == Box.whole((8,))
    assert piece((), Split("x", 0), 4, 3) == Box(())


@pytest.mark.parametrize(
    ("taken", "slot", "expected"),
    [
        ((4, 2), (4, 2), True),
        ((4, 2), (1, 4, 2), True),  # an expert's rows in a stack
        ((4, 2), (2, 4, 2), False),
        ((4, 2), (2, 4), False),
        ((), (1,), True),
        ((), (1, 1), True),
        ((), (2,), False),
        ((1,), (), True),
        ((1, 1), (1,), True),
        ((2,), (), False),
        ((4, 1), (4,), False),
    ],
)
def test_pieces_fit_slots_of_their_extents(
    taken: tuple[int, ...], slot: tuple[int, ...], expected: bool
) -> None:
    assert fits(Box.whole(taken), Box.whole(slot)) is expected


def parameter(name: str) -> Parameter:
    return parameter_named(V4, name)


def source(name: str, part: PartKind, dtype: str, shape: tuple[int, ...]) -> SourceTensor:
    return SourceTensor(f"{name}.x", dtype, shape, parameter(name), part)


WQ_B = "layers.1.attn.wq_b"
E1 = "layers.1.ffn.experts.1"
INPUT_SCALE = "loader.input_scale_in_weight"
CODES = (PartKind.CODES, "F8_E4M3", (8, 4))


def rule(
    given: SourceTensor, wanted: str, part: PartKind, dtype: str, box: Box | None = None
) -> str | None:
    """Judge the write of a whole tensor to a slot of its own extents."""
    whole = Box.whole(given.shape)
    truth = ExpectedContent(parameter(wanted), part, box or whole)
    wrong = judge_write(given, whole, dtype, Member(whole), truth)
    return None if wrong is None else wrong.rule.id


def test_what_belongs_there_is_right() -> None:
    assert rule(source(WQ_B, *CODES), WQ_B, PartKind.CODES, "F8_E4M3") is None
    assert (
        rule(source(WQ_B, *CODES)._replace(parameter=None), WQ_B, PartKind.CODES, "F8_E4M3") is None
    )


@pytest.mark.parametrize(
    ("mine", "part", "wanted", "wanted_part", "expected"),
    [
        (f"{E1}.w1", PartKind.CODES, f"{E1}.w3", PartKind.CODES, "loader.swapped_partners"),
        (f"{E1}.w1", PartKind.CODES, f"{E1}.w2", PartKind.CODES, "loader.wrong_parameter"),
        (
            f"{E1}.w1",
            PartKind.CODES,
            "layers.1.ffn.experts.2.w1",
            PartKind.CODES,
            "loader.wrong_parameter",
        ),
        (WQ_B, PartKind.CODES, "layers.2.attn.wq_b", PartKind.CODES, "loader.wrong_parameter"),
        (f"{E1}.w1", PartKind.TENSOR_SCALE, f"{E1}.w1", PartKind.BLOCK_SCALE, "loader.wrong_part"),
        (
            f"{E1}.w1",
            PartKind.INPUT_SCALE,
            f"{E1}.w1",
            PartKind.TENSOR_SCALE,
            INPUT_SCALE,
        ),
        (
            f"{E1}.w1",
            PartKind.INPUT_SCALE,
            f"{E1}.w2",
            PartKind.TENSOR_SCALE,
            INPUT_SCALE,
        ),
        (
            f"{E1}.w1",
            PartKind.INPUT_SCALE,
            f"{E1}.w2",
            PartKind.INPUT_SCALE,
            "loader.wrong_parameter",
        ),
        (
            "layers.1.attn.compressor.wkv",
            PartKind.VALUE,
            "layers.1.attn.indexer.compressor.wkv",
            PartKind.VALUE,
            "loader.prefix",
        ),
        (
            "layers.1.attn.indexer.compressor.wgate",
            PartKind.VALUE,
            "layers.1.attn.compressor.wgate",
            PartKind.VALUE,
            "loader.prefix",
        ),
    ],
)
def test_a_tensor_that_belongs_elsewhere_is_reported(
    mine: str, part: PartKind, wanted: str, wanted_part: PartKind, expected: str
) -> None:
    assert rule(source(mine, part, "F32", ()), wanted, wanted_part, "F32") == expected


def test_wrong_rows_are_reported_although_the_shape_fits() -> None:
    given = source(WQ_B, PartKind.CODES, "F8_E4M3", (4, 4))
    other = Box(((4, 8), (0, 4)))
    assert rule(given, WQ_B, PartKind.CODES, "F8_E4M3", other) == "loader.wrong_rows"


@pytest.mark.parametrize(
    ("stored", "built", "part", "expected", "written"),
    [
        ("F8_E8M0", "U8", PartKind.BLOCK_SCALE, None, True),
        ("I8", "U8", PartKind.CODES, None, True),
        ("I64", "I32", PartKind.VALUE, None, True),
        ("BF16", "F32", PartKind.VALUE, None, True),
        ("F16", "F32", PartKind.VALUE, None, True),
        ("F32", "BF16", PartKind.VALUE, "loader.narrowed", True),
        ("F16", "BF16", PartKind.VALUE, "loader.narrowed", True),
        ("BF16", "F16", PartKind.VALUE, "loader.narrowed", True),
        ("F32", "BF16", PartKind.TENSOR_SCALE, "loader.narrowed", True),
        ("F8_E4M3", "BF16", PartKind.CODES, "loader.dtype", False),
        ("U8", "BF16", PartKind.CODES, "loader.dtype", False),
        ("F8_E4M3", "U8", PartKind.CODES, "loader.dtype", False),
        ("F8_E4M3", "F32", PartKind.BLOCK_SCALE, "loader.scale_dtype", False),
        ("F8_E8M0", "F32", PartKind.BLOCK_SCALE, "loader.scale_dtype", False),
        ("F32", "F8_E8M0", PartKind.BLOCK_SCALE, "loader.scale_dtype", False),
    ],
)
def test_types_that_cannot_be_copied_are_reported(
    stored: str, built: str, part: PartKind, expected: str | None, written: bool
) -> None:
    wrong = judge_dtype(source(WQ_B, part, stored, (4, 4)), built, None)
    if expected is None:
        assert wrong is None
    else:
        assert wrong is not None
        assert (wrong.rule.id, wrong.written) == (expected, written)
        assert stored in wrong.text
        assert built in wrong.text


def test_a_slot_that_is_not_there_takes_nothing() -> None:
    given = source(WQ_B, *CODES)
    wrong = judge_write(given, Box.whole(given.shape), "F8_E4M3", NO_SLOT, None)
    assert wrong is not None
    assert (wrong.rule.id, wrong.written) == ("loader.shape", False)


def test_extents_are_reported_and_so_is_the_rank_of_a_scale() -> None:
    slot = Member(Box.whole((8, 4)))
    for part, shape, expected in (
        (PartKind.CODES, (2, 4), "loader.shape"),
        (PartKind.BLOCK_SCALE, (2, 4), "loader.shape"),
        (PartKind.BLOCK_SCALE, (8,), "loader.scale_rank"),
        (PartKind.BLOCK_SCALE, (), "loader.scale_rank"),
    ):
        given = source(WQ_B, part, "F32", shape)
        wrong = judge_write(given, Box.whole(shape), "F32", slot, None)
        assert wrong is not None
        assert (wrong.rule.id, wrong.written) == (expected, False)
        assert str(list(shape)) in wrong.text
        assert "[8, 4]" in wrong.text


def test_of_two_errors_the_one_of_the_tensor_comes_first() -> None:
    given = source(f"{E1}.w1", PartKind.CODES, "U8", (2, 4))
    truth = ExpectedContent(parameter(f"{E1}.w3"), PartKind.CODES, Box.whole((8, 4)))
    wrong = judge_write(given, Box.whole((2, 4)), "BF16", Member(Box.whole((8, 4))), truth)
    assert wrong is not None
    assert wrong.rule.id == "loader.swapped_partners"
    assert not wrong.written  # its type and extents keep it out


# --------------------------------------------------------------------------------------------------
# Shares of ranks: the bytes of a sharding plan, against anatomy's own list of a rank.


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("shares") / "c", V4, "official")


@pytest.mark.parametrize("ranks", [Ranks(), Ranks(tp=2), Ranks(tp=2, ep=4), Ranks(2, 2, 3)])
def test_a_share_has_the_bytes_that_anatomy_lists(official: Path, ranks: Ranks) -> None:
    shares = rank_shares(proven(official, {"base": "vllm", **ranks._asdict()}))
    sharding_plan = plan(V4, *ranks)
    assert [rank_share.rank for rank_share in shares] == list(range(sharding_plan.ranks))
    for share in shares:
        listed = rank_tensors(sharding_plan, layout_named("vllm", V4), share.rank)
        assert share.parameters == len(listed)
        assert share.nbytes == sum(
            prod(tensor.shape) * DTYPE_BITS[str(tensor.dtype)] // 8 for tensor in listed
        )
        assert range(*share.experts) == sharding_plan.experts_of(share.rank)


def test_kinds_are_distinguished(official: Path) -> None:
    whole, *_ = rank_shares(proven(official, {"base": "vllm"}))
    halves = rank_shares(proven(official, {"base": "vllm", "tp": 1, "ep": 2}))
    assert set(whole.by_kind) == set(KINDS)
    assert all(whole.by_kind.values())
    for share in halves:  # experts are spread, and nothing else is
        assert share.by_kind["routed experts"] * 2 == whole.by_kind["routed experts"]
        assert share.by_kind["attention"] == whole.by_kind["attention"]


def test_a_list_of_parameters_has_experts_and_the_rest(official: Path) -> None:
    raw = {
        "ep": 2,
        "parameters": {
            "a.w2": {"dtype": "U8", "shape": [2, 4, 6], "experts": True},
            "b.weight": {"dtype": "BF16", "shape": [3, 5]},
        },
    }
    first, second = rank_shares(proven(official, raw))
    assert first.by_kind == {**dict.fromkeys(KINDS, 0), "routed experts": 48, "other": 30}
    assert (first.experts, second.experts) == ((0, 2), (2, 4))
    assert first.to_json()["bytes"] == 78


def test_ranks_alike_are_one_row() -> None:
    kinds = dict(zip(KINDS, (4_000_000_000, 3, 2, 1), strict=True))
    one = RankShare(0, (0, 48), 1200, kinds)
    rows = share_rows([one, one._replace(rank=1, experts=(48, 96)), one._replace(rank=5)])
    assert rows == (("0-1, 5", "48 each", "1,200", "4.000", "0.000", "0.000", "0.000", "4.000"),)
    assert len(rows[0]) == len(SHARE_HEADER)
    other = one._replace(rank=2, experts=(0, 0))
    assert [row[1] for row in share_rows([one, other])] == ["0-47", "none"]


# --------------------------------------------------------------------------------------------------
# The loader proof: its moves carried out on numbered elements, against vLLM's loaders and itself.
#
# Every stored element gets a number of its own. The moves that a proof claims are carried out for
# every rank; what then lies where is compared with an independent loader (loader_vllm.py), and what
# is left over on either side with what the proof says is unread and unwritten.

if TYPE_CHECKING:
    Write = Callable[[DeepSeekConfig, str], Path]

# Wide enough to be cut into eight: whole blocks, heads and groups for every rank.
WIDE_V4 = replace(V4, num_attention_heads=8, o_groups=8, n_routed_experts=8)
WIDE_V32 = replace(
    V32,
    num_attention_heads=16,
    qk_nope_head_dim=128,
    v_head_dim=128,
    n_routed_experts=8,
    n_group=4,
    intermediate_size=1024,
    moe_intermediate_size=1024,
)
SPREADS = [Ranks(), Ranks(tp=2), Ranks(tp=8), Ranks(tp=2, ep=4), Ranks(tp=8, ep=8)]
FUSED = {"transformers"}  # as an engine does that has no map here


@pytest.fixture(scope="module")
def proof_written(tmp_path_factory: pytest.TempPathFactory) -> Write:
    made: dict[tuple[DeepSeekConfig, str], Path] = {}

    def write_once(config: DeepSeekConfig, layout: str) -> Path:
        if (config, layout) not in made:
            made[config, layout] = write(tmp_path_factory.mktemp("proof") / "c", config, layout)
        return made[config, layout]

    return write_once


def places(names: list[str], config: DeepSeekConfig, layout: str) -> dict[str, Place]:
    """Say where vLLM puts every stored tensor of a layout that it reads itself."""
    if isinstance(config, V4Config):
        nvfp4 = layout == "nvfp4-experts"
        found = {name: v4_place(name, config.num_hidden_layers, nvfp4) for name in names}
        if nvfp4:  # the drafter is built in another format than it is stored in
            found = {k: v for k, v in found.items() if ".mtp_block.ffn.experts." not in v[0]}
        return found
    each = {name: v32_place(name, config.num_hidden_layers) for name in names}
    return {name: place for name, place in each.items() if place is not None}


@pytest.mark.parametrize("ranks", SPREADS, ids=str)
@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (WIDE_V4, "official"),
        (WIDE_V4, "nvfp4-experts"),
        (WIDE_V4, "bf16"),
        (WIDE_V32, "official"),
        (WIDE_V32, "nvfp4-full"),
    ],
    ids=["V4", "V4 NVFP4", "V4 BF16", "V3.2", "V3.2 NVFP4"],
)
def test_every_element_lies_where_vllm_puts_it(
    proof_written: Write, config: DeepSeekConfig, layout: str, ranks: Ranks
) -> None:
    proof = proven(proof_written(config, layout), {"base": "vllm", **ranks._asdict()})
    stored = numbered(proof)
    memories = moved(proof, stored)
    wanted = {
        name: (place, stored[name])
        for name, place in places(list(stored), config, layout).items()
        if proof.outcomes[name] == "placed"
    }
    compared = 0
    for held in proof.rank_parameters():
        rank = Rank(held.rank, ranks.tp, ranks.ep, config.n_routed_experts)
        for name, parts in loaded(wanted, rank).items():
            target = held.targets.get(name)
            for (expert, slot), part in parts.items():
                if target is None:  # a shared expert's padding fills all of this rank's share
                    assert (part == -2).all(), name
                    continue
                member = target.members[expert if target.stacked else None, slot]
                memory = memories[held.rank, name][sliced(member.box)]
                np.testing.assert_array_equal(
                    memory.ravel(), part[part != -2].ravel(), err_msg=f"{name} {expert} {slot}"
                )
                compared += 1
    assert compared >= len(wanted)


@pytest.mark.parametrize(
    "ranks", thinned([Ranks(tp=2, ep=4), Ranks(), Ranks(tp=8), Ranks(tp=2)]), ids=str
)
@pytest.mark.parametrize(
    ("family", "layout"), [key for key in LAYOUTS if key[1] not in FUSED], ids=str
)
def test_healthy_checkpoints_raise_no_error(
    proof_written: Write, family: str, layout: str, ranks: Ranks
) -> None:
    config = WIDE_V4 if family == V4Config.family else WIDE_V32
    raw = {"base": "vllm"}
    if (family, layout) == (V4Config.family, "nvfp4-full"):  # as its engine was built
        raw = FIELD
    proof = proven(proof_written(config, layout), {**raw, **ranks._asdict()})
    assert errors(proof.findings) == set()
    assert proof.unread == {} or told(proof.findings, "loader.drafter_format")
    assert proof.unwritten == {} or told(proof.findings, "loader.drafter_format")


@pytest.mark.parametrize(
    "ranks", [Ranks(tp=2), Ranks(tp=2, ep=4), Ranks(tp=2, ep=2, pp=3)], ids=str
)
@pytest.mark.parametrize("layout", ["official", "nvfp4-experts", "nvfp4-full", "vllm"])
def test_claims_hold_for_healthy_maps(proof_written: Write, layout: str, ranks: Ranks) -> None:
    raw = FIELD if layout == "nvfp4-full" else {"base": "vllm"}
    require_claims(proven(proof_written(V4, layout), {**raw, **ranks._asdict()}))


SPOILT: dict[str, dict[str, object]] = {
    "skipped": {"skip": [r"layers\.1\.attn\.wq_b"]},
    "dropped": {"rename": [{"match": r"\.wo_a\.scale$", "to": ".wo_a.lost"}]},
    "partners swapped": {
        "stack": [
            {"match": rf"\.experts\.(?P<expert>\d+)\.{w}\.", "into": ".experts.w13_", "slot": slot}
            for w, slot in (("w1", 1), ("w3", 0))
        ],
    },
    "slot that is not there": {
        "stack": [{"match": r"\.attn\.wkv\.", "into": ".attn.fused_wqa_wkv.", "slot": 7}],
    },
    "both to one slot": {
        "stack": [{"match": r"_experts\.w3\.", "into": "_experts.gate_up_proj.", "slot": 0}],
    },
    "cut along the other dimension": {"split": [{"match": r"\.attn\.wq_b\.", "dim": 1}]},
    "not cut": {"split": [{"match": r"\.attn\.wo_a\.", "dim": 9}]},
    "cut in large pieces": {"split": [{"match": "attn_sink$", "dim": 0, "multiple": 64}]},
    "everything to one": {"rename": [{"match": "^.*", "to": "norm.weight"}]},
    "nothing known": {"rename": [{"match": "^", "to": "x."}]},
}


@pytest.mark.parametrize("what", SPOILT)
def test_claims_hold_for_spoilt_maps(proof_written: Write, what: str) -> None:
    raw = {"base": "vllm", "tp": 2, "ep": 1, **SPOILT[what]}
    proof = proven(proof_written(V4, "official"), raw)
    assert errors(proof.findings)
    # Where two tensors go to one place, the order of files decides which of them is read.
    require_claims(proof, sources=what not in {"both to one slot", "everything to one"})


def test_alike_writes_are_the_single_ones(
    proof_written: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    def summary(ranks: Ranks, **changes: object) -> object:
        raw = {"base": "vllm", **ranks._asdict(), **changes}
        proof = proven(proof_written(V4, "official"), raw)
        return proof.findings, proof.unread, proof.unwritten, proof.summary()

    cases: list[tuple[Ranks, dict[str, object]]] = [
        (ranks, {}) for ranks in (Ranks(), Ranks(tp=2), Ranks(tp=2, ep=4), Ranks(2, 2, 3))
    ]
    cases += [(Ranks(tp=2), change) for change in list(SPOILT.values())[::2]]
    together = [summary(ranks, **changes) for ranks, changes in cases]
    monkeypatch.setattr(Writer, "fill_once", lambda *_: ())
    assert [summary(ranks, **changes) for ranks, changes in cases] == together


# --------------------------------------------------------------------------------------------------
# What a loader proof answers when it is asked: of a tensor, a parameter, a list, one rank.


@pytest.fixture(scope="module")
def loader_queries_written(tmp_path_factory: pytest.TempPathFactory) -> Write:
    made: dict[tuple[DeepSeekConfig, str], Path] = {}

    def write_once(config: DeepSeekConfig, layout: str) -> Path:
        if (config, layout) not in made:
            made[config, layout] = write(tmp_path_factory.mktemp("queries") / "c", config, layout)
        return made[config, layout]

    return write_once


def test_where_a_tensor_goes_and_what_a_parameter_holds(loader_queries_written: Write) -> None:
    name, fused = "layers.1.attn.wkv.weight", "model.layers.1.attn.fused_wqa_wkv.weight"
    proof = proven(loader_queries_written(V4, "official"), {"base": "vllm", "tp": 2})
    found = list(proof.reaches(name))
    assert [(rank, parameter) for rank, parameter, _ in found] == [(0, fused), (1, fused)]
    rows = V4.q_lora_rank
    for rank, parameter, move in found:
        assert move in proof.fills(parameter, rank)
        assert move.source_box.ranges == ((0, V4.head_dim), (0, V4.hidden_size))
        assert move.target_box.ranges == ((rows, rows + V4.head_dim), (0, V4.hidden_size))


def test_bytes_are_those_of_the_file(loader_queries_written: Write) -> None:
    folder, name = loader_queries_written(V4, "official"), "layers.1.attn.wo_b.weight"
    with Checkpoint.open(folder) as checkpoint:
        proof = prove(checkpoint, map_of(checkpoint, {"base": "vllm", "tp": 2}))
        whole = bytes(checkpoint.tensor(name).view(dtype=torch.uint8).numpy())
        entry = checkpoint.entries[name]
    columns = entry.shape[1]
    for rank, _, move in proof.reaches(name):
        (runs,) = proof.bytes_of(move)
        assert runs.nbytes * 2 == len(whole)
        taken = b"".join(whole[begin - entry.begin : end - entry.begin] for begin, end in runs)
        expected = np.frombuffer(whole, np.uint8).reshape(entry.shape)
        half = expected[:, rank * columns // 2 : (rank + 1) * columns // 2]
        assert taken == half.tobytes()


def test_a_conversion_reads_its_tensors_as_wholes(loader_queries_written: Write) -> None:
    proof = proven(loader_queries_written(V4, "nvfp4-full"), FIELD)
    (move,) = proof.fills("model.layers.1.attn.wo_b.weight", 0)
    names = {"weight", "weight_scale", "weight_scale_2"}
    module = "model.layers.1.self_attn.o_b_proj"
    assert set(move.made_from) == {f"{module}.{name}" for name in names}
    for name in move.made_from:
        assert proof.outcomes[name] == "converted"
        assert list(proof.reaches(name))
    sizes = [runs.nbytes for runs in proof.bytes_of(move)]
    assert sizes == [proof.entries[name].nbytes for name in move.made_from]


def test_unknown_names_are_refused(loader_queries_written: Write) -> None:
    proof = proven(loader_queries_written(V4, "official"), {"base": "vllm", "tp": 2, "rank": 1})
    with pytest.raises(UnknownName, match=r"stored tensor = 'layers\.9\.x'"):
        list(proof.reaches("layers.9.x"))
    with pytest.raises(UnknownName, match="parameter of rank 1"):
        proof.fills("model.norm.weights", 1)
    with pytest.raises(InvalidArgument, match=r"rank = 0: expected one of \[1\]"):
        proof.fills("model.norm.weight", 0)


def test_one_rank_alone_leaves_the_others_rows_unjudged(loader_queries_written: Write) -> None:
    proof = proven(loader_queries_written(V4, "official"), {"base": "vllm", "tp": 2, "rank": 1})
    assert proof.findings == []
    assert proof.unread == {}
    assert proof.summary()["ranks"] == 1


def test_a_list_of_parameters_is_judged_by_shapes_and_names(loader_queries_written: Write) -> None:
    folder = loader_queries_written(V4, "official")
    with Checkpoint.open(folder) as checkpoint:
        inventory = inventory_of(checkpoint)
        engine = prove(checkpoint, engine_map(inventory, "vllm"))
        (held,) = engine.rank_parameters()
        parameters = {}
        for target in held.targets.values():
            first = 1 if target.stacked else 0
            slots = {key[1]: member.box for key, member in target.members.items()}
            rows = [slots[number].shape[first] for number in sorted(slots) if len(slots) > 1]
            parameters[target.name] = {
                "dtype": target.dtype,
                "shape": list(target.shape),
                "slots": rows,
                "experts": target.stacked,
            }
        base = engine.map
        raw = {
            "parameters": parameters,
            "rename": [vars(rename) for rename in base.rename],
            "stack": [vars(stack) for stack in base.stack],
        }
        proof = prove(checkpoint, map_of(checkpoint, raw))
    assert proof.findings == []
    assert proof.summary() == engine.summary()
    require_claims(proof)


def test_a_checkpoint_of_no_known_model_can_be_proven_against_a_list(
    tmp_path: Path, loader_queries_written: Write
) -> None:
    folder = shutil.copytree(loader_queries_written(V4, "bf16"), tmp_path / "c")
    (folder / "config.json").write_text('{"model_type": "unheard_of"}', encoding="utf-8")
    half = {"dtype": "BF16", "shape": [V4.vocab_size // 2, V4.hidden_size]}
    with Checkpoint.survey(folder) as checkpoint:
        assert checkpoint.names is None
        raw = {
            "tp": 2,
            "parameters": {"embed.weight": half, "extra.weight": {**half, "shape": [3, 5]}},
            "split": [{"match": "^embed", "dim": 0}],
        }
        loader_map = loader_map_from_text(yaml.safe_dump(raw), None)
        proof = prove(checkpoint, loader_map)
        with pytest.raises(InvalidArgument, match="cannot be derived"):
            loader_map_from_text("base: vllm", None)
    assert set(proof.unwritten) == {(0, "extra.weight"), (1, "extra.weight")}
    assert proof.outcomes["embed.weight"] == "placed"
    assert errors(proof.findings) == {"loader.unwritten"}


def test_an_expert_beyond_every_rank_is_unread(loader_queries_written: Write) -> None:
    folder = loader_queries_written(V4, "official")
    raw = {
        "parameters": {"w1": {"dtype": "I8", "shape": [2, 256, 64], "experts": True}},
        "stack": [{"match": r"layers\.1\..*experts\.(?P<expert>\d+)\.w1\.weight", "into": "w1"}],
    }
    proof = proven(folder, raw)
    names = [f"layers.1.ffn.experts.{expert}.w1.weight" for expert in (2, 3)]
    assert set(proof.unread) == set(names)
    (finding,) = told(proof.findings, "loader.unread")
    assert finding.count == 2
    require_claims(proof)


def test_fused_checkpoints_of_transformers_are_refused(loader_queries_written: Write) -> None:
    raw = {"parameters": {"a": {"dtype": "U8", "shape": [1]}}}
    with pytest.raises(LayoutMismatch, match="prove the checkpoint that it was made from"):
        proven(loader_queries_written(V4, "transformers"), raw)


def test_rules_are_records(loader_queries_written: Write) -> None:
    """Maps that are made in Python, without text, are proven like any other."""
    with Checkpoint.open(loader_queries_written(V4, "official")) as checkpoint:
        loader_map = engine_map(inventory_of(checkpoint), "vllm")
        changed = replace(
            loader_map,
            rename=(Rename("a", "a"), *loader_map.rename),
            stack=(Stack("never", "x"), *loader_map.stack),
            split=(Split("never", 0), *loader_map.split),
        )
        findings = prove(checkpoint, changed).findings
    assert {finding.rule for finding in findings} == {"loader.dead_rule"}
    assert sum(finding.count for finding in findings) == 2


def test_hostile_names_are_reported_and_nothing_else_happens(
    tmp_path: Path, loader_queries_written: Write
) -> None:
    hostile = ("layers." + "9" * 5000, "layers.1.ffn.experts." + "1" * 4400 + ".w1.weight")

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: torch.zeros(2) for name in hostile})

    folder = replant(loader_queries_written(V4, "official"), tmp_path / "c", add)
    with Checkpoint.survey(folder) as checkpoint:
        proof = prove(checkpoint, map_of(checkpoint, {"base": "vllm", "tp": 2}))
    assert errors(proof.findings) == set()
    assert sum(finding.count for finding in told(proof.findings, "loader.extra_dropped")) == len(
        hostile
    )
    assert {proof.outcomes[name] for name in hostile} == {"dropped"}
