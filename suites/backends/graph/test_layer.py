"""Layers, matrices and V3.2's decoder, by stand-ins."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.backends.cutedsl import kernels as cutedsl_kernels
from degarble.harness.backends.cutedsl.backend import CONVENTIONS, use_kernels
from degarble.harness.backends.cutedsl.kernels import NoKernelError
from degarble.harness.backends.cutedsl.linears import LinearKernel
from degarble.harness.backends.graph import layers as layer_module
from degarble.harness.backends.graph import matrices as layer_matrices
from degarble.harness.backends.graph.decoder import PIECE, Decoder, DecoderLogitsModel, entry_of
from degarble.harness.backends.graph.matrices import (
    ALONE,
    FEW_ROWS,
    TILES,
    VERY_FEW_ROWS,
    W4A16,
    CodedGroups,
    Experts,
    Matrix,
    coded_product,
    few_rows_product,
    for_few_rows,
    groups_of,
)
from degarble.harness.backends.graph.steps import (
    BRANCHES,
    CACHE,
    CHOICE,
    KEYS,
    PAGE,
    PRIORITIES,
    DecoderSteps,
    MemorySize,
    tables_of,
)
from degarble.harness.backends.graph.weights import AttentionWeights, V4Layout
from degarble.harness.base.errors import DegarbleError, InvalidArgument, NotBuilt, UnknownName
from degarble.harness.inference.model import OpenModel, open_model
from degarble.harness.model.recipes import Recipe, Rule
from degarble.kernels.attention.problem import choose_splits
from degarble.kernels.gemm.problem import GemmProblem
from degarble.kernels.moe import by_row_problem
from degarble.references.binding import BoundModel
from degarble.references.model import Sequence
from degarble.references.numerics import KeyValueCache
from degarble.suites.backends import cutedsl_cases as cases
from degarble.suites.backends import cutedsl_standin as standing_in
from degarble.suites.backends.cutedsl_standin import StandIn
from degarble.suites.commands.calls import call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from degarble.harness.inference.model import LogitsModel


# --------------------------------------------------------------------------------------------------
# Whole layers, a token a step, by stand-ins equal the same parts one by one, bit for bit.
#
# That this says something is shown by handing a kernel of the step the wrong tensor: it tells.

TOKENS = (9, 12, 7, 7, 31)  # the fourth completes an entry, the fifth sees it
LATER = 2  # where a second sequence begins
POSITIONS = 192


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenModel]:
    model = cases.write_model(tmp_path_factory.mktemp("decoder"), "v4", "nvfp4-full")
    with open_model(model.checkpoint, switches=CONVENTIONS) as found, torch.inference_mode():
        yield found


def said(model: LogitsModel) -> torch.Tensor:
    """Logits of two sequences, of which one begins later; a lane more than needed rests."""
    first, second = Sequence(), Sequence()
    made = []
    for number, token in enumerate(TOKENS):
        live = [first] if number < LATER else [first, second]
        made.append(model.next_logits(live, [torch.tensor([token + n]) for n in range(len(live))]))
    return torch.cat(made)


def by_steps(
    opened: OpenModel,
    seen: Callable[..., None] | None = None,
    products: str = TILES,
    lanes: int = 3,
) -> torch.Tensor:
    bound = opened.logits_model.bound
    decoder = Decoder.from_model(
        StandIn(seen), bound, opened.recipe, lanes, POSITIONS, products=products
    )
    return said(DecoderLogitsModel(bound, decoder))


def by_parts(opened: OpenModel) -> torch.Tensor:
    bound, calls = opened.logits_model.bound, dict(opened.logits_model.bound.calls)
    use_kernels(bound, opened.recipe, StandIn())
    try:
        return said(opened.logits_model)
    finally:
        bound.calls.update(calls)


@pytest.fixture(scope="module")
def one_by_one(opened: OpenModel) -> torch.Tensor:
    return by_parts(opened)


def test_a_step_is_its_parts_bit_by_bit(opened: OpenModel, one_by_one: torch.Tensor) -> None:
    assert torch.equal(by_steps(opened), one_by_one)


BY_TILES = {"sm90_gemm_nvfp4", "sm90_shared_expert", "sm90_moe_nvfp4"}
# What very few rows launch, and what more of them launch in its place.
JOINED = {"simt_mhc_onward", "simt_mhc_norm", "sm90_moe_by_row.PRODUCTS"}
APART = {"simt_inverse_rope"}


@pytest.mark.parametrize("lanes", [3, 5])
def test_products_of_few_rows_have_the_arithmetic_of_tiles(
    opened: OpenModel, one_by_one: torch.Tensor, lanes: int
) -> None:
    """Stand-ins add up in one order: then decoded activations give the bits that codes give."""
    launched: set[str] = set()

    def seen(kernel: str, _problem: Any, _given: dict[str, Any]) -> None:
        launched.add(kernel)

    assert torch.equal(by_steps(opened, seen, FEW_ROWS, lanes), one_by_one)
    assert "sm90_gemm_w4a16" in launched
    assert launched & BY_TILES == (set() if lanes <= VERY_FEW_ROWS else {"sm90_moe_nvfp4"})
    assert launched & {*JOINED, *APART} == (JOINED if lanes <= VERY_FEW_ROWS else APART)


def test_a_wrong_factor_of_few_rows_changes_what_is_said(
    opened: OpenModel, one_by_one: torch.Tensor
) -> None:
    def seen(kernel: str, _problem: Any, given: dict[str, Any]) -> None:
        if kernel == "sm90_gemm_w4a16":
            given["decode_scale"] = given["decode_scale"] * 2

    assert not torch.equal(by_steps(opened, seen, FEW_ROWS), one_by_one)


def test_few_rows_are_few_and_have_normal_factors(opened: OpenModel) -> None:
    def decoder(lanes: int, products: str) -> Decoder:
        bound = opened.logits_model.bound
        return Decoder.from_model(StandIn(), bound, opened.recipe, lanes, 8, products=products)

    with pytest.raises(InvalidArgument, match=r"lanes of a decoder .*= 65: expected at most 64"):
        decoder(65, FEW_ROWS)
    with pytest.raises(UnknownName, match="products of a decoder"):
        decoder(1, "few")
    problem = GemmProblem(1, 16, 32, "nvfp4", "e4m3")
    small = {"b_decode_scale": torch.tensor([1e-30])}
    matrix = Matrix(LinearKernel("sm90_gemm_nvfp4", problem), small, torch.tensor([1e-10]))
    with pytest.raises(NoKernelError, match=r"tensor scales of wo, \S+e-41, is no normal number"):
        for_few_rows(matrix, "wo")
    plain = Matrix(LinearKernel("sm90_gemm_bf16", GemmProblem(1, 16, 32)), {})
    assert for_few_rows(plain, "wo") is plain


def test_caches_are_written_aside_and_meet_before_attention(
    opened: OpenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins have no further streams: what a GPU would order is noted."""
    noted: list[tuple[str, str]] = []
    where = [""]

    @contextmanager
    def aside(_self: DecoderSteps, branch: str) -> Iterator[None]:
        where[0] = branch
        yield
        where[0] = ""

    def meet(_self: DecoderSteps, *branches: str) -> None:
        noted.append((f"meet {' '.join(branches)}", where[0]))

    monkeypatch.setattr(DecoderSteps, "aside", aside)
    monkeypatch.setattr(DecoderSteps, "meet", meet)
    by_steps(opened, lambda kernel, *_: noted.append((kernel, where[0])))
    choosers = {"simt_indexer_topk", "sm90_indexer_scores"}
    writers = {"simt_kv_write", "simt_compressor"}
    assert {branch for kernel, branch in noted if kernel in writers} == {CACHE, KEYS}
    assert {branch for kernel, branch in noted if kernel in choosers} == {CHOICE}
    elsewhere = {*writers, *choosers, *BESIDE, f"meet {KEYS}"}
    assert not any(branch for kernel, branch in noted if kernel not in elsewhere)
    # Keys are there before they are scored, all is before attention.
    for waiting, waited, branch in (
        ("sm90_sparse_attention", "meet ", ""), ("sm90_indexer_scores", f"meet {KEYS}", CHOICE),
    ):  # fmt: skip
        begun = 0
        for at in [at for at, (name, _) in enumerate(noted) if name == waiting]:
            met = noted.index((waited, branch), begun, at)
            assert any(other for _, other in noted[begun:met])
            assert {other for _, other in noted[met:at]} == {branch}
            begun = at + 1


def test_what_attention_waits_for_longest_goes_first() -> None:
    assert PRIORITIES.keys() == set(BRANCHES)
    assert PRIORITIES[CHOICE] < PRIORITIES[KEYS] < PRIORITIES[CACHE] == 0, "torch: lower is sooner"


# Launched on any stream.
BESIDE = {
    "simt_slots", "simt_indexer_operand", "simt_gemv_bf16", "sm90_gemm_bf16", "sm90_gemm_nvfp4",
    "sm90_gemm_grouped", "simt_quantise_nvfp4", "simt_scale",
}  # fmt: skip


def test_one_row_walks_a_matrix_of_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    kernels = StandIn(lambda kernel, *_: launched.append(kernel))
    drawn = torch.Generator().manual_seed(5)
    operands = {
        "b": torch.randint(0, 256, (64, 64), generator=drawn, dtype=torch.uint8),
        "b_scales": torch.randint(0x30, 0x40, (128 * 8,), generator=drawn, dtype=torch.uint8),
        "b_decode_scale": torch.tensor([0.75]),
    }
    problem = GemmProblem(1, 64, 128, "nvfp4", "e4m3")
    plain = Matrix(LinearKernel("sm90_gemm_nvfp4", problem), operands, torch.tensor([0.5]))
    rows = torch.randn(2, 128, generator=drawn).bfloat16()
    apart = for_few_rows(plain, "wq_b")
    want = few_rows_product(kernels, apart, rows[:1], W4A16)
    monkeypatch.setattr(by_row_problem, "WAVE", 63)
    walked = for_few_rows(plain, "wq_b")
    assert torch.equal(few_rows_product(kernels, walked, rows[:1], W4A16), want)
    assert few_rows_product(kernels, walked, rows, W4A16).shape == (2, 64)
    assert launched == [W4A16, ALONE, W4A16]


@pytest.mark.slow
def test_a_step_equals_its_parts_with_fp8_linears(tmp_path: Path) -> None:
    model = cases.write_model(tmp_path, "v4", "nvfp4-experts")
    with open_model(model.checkpoint, switches=CONVENTIONS) as found, torch.inference_mode():
        kinds = {attention_weights.wo_a.__class__ for attention_weights in layers_of(found)}
        assert kinds == {CodedGroups}
        assert torch.equal(by_steps(found), by_parts(found))


@pytest.mark.slow
def test_so_it_is_with_as_many_heads_of_the_indexer_as_the_releases_have(tmp_path: Path) -> None:
    """Their weights' factor is no power of two: a kernel multiplies by it."""
    config = replace(cases.CONFIG_V4, index_n_heads=64)
    model = cases.write_model(tmp_path, "v4", "nvfp4-full", config=config)
    scaled: list[str] = []

    def seen(kernel: str, problem: Any, _given: dict[str, Any]) -> None:
        if kernel == "simt_scale":
            scaled.append(f"{problem.source} to {problem.out} by {problem.factor:.6f}")

    with open_model(model.checkpoint, switches=CONVENTIONS) as found, torch.inference_mode():
        assert torch.equal(by_steps(found, seen), by_parts(found))
    assert set(scaled) == {"bf16 to bf16 by 0.011049"}


def layers_of(opened: OpenModel) -> list[AttentionWeights]:
    laying = V4Layout(
        opened.logits_model.bound, cases.CONFIG_V4, opened.recipe, torch.device("cpu")
    )
    return [laying.layer(block).attn for block in cases.CONFIG_V4.layers]


WRONG: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "own slot": ("simt_kv_write", lambda x: x.flip(0), "slots"),
    "bias of gates": ("simt_compressor", lambda x: x.roll(1, 0).contiguous(), "ape"),
    "positions of heads": ("simt_qnorm_rope", lambda x: x + 1, "positions"),
    "shared expert left out": ("sm90_moe_nvfp4", lambda x: x * 0, "shared"),
    "turned forth": ("simt_inverse_rope", lambda x: x.abs(), "turns"),
    "chosen by another": ("simt_slots", lambda x: x.flip(1).contiguous() - 1, "numbers"),
}
IN_CI = ("own slot",)


@pytest.mark.parametrize(
    "what", [pytest.param(each, marks=[pytest.mark.slow] * (each not in IN_CI)) for each in WRONG]
)
def test_a_tensor_at_the_wrong_argument_changes_what_is_said(
    opened: OpenModel, one_by_one: torch.Tensor, what: str
) -> None:
    at, change, name = WRONG[what]

    def seen(kernel: str, _problem: Any, given: dict[str, Any]) -> None:
        if kernel == at and name in given:
            given[name] = change(given[name])

    assert not torch.equal(by_steps(opened, seen), one_by_one)


def test_lanes_have_pages_of_their_own_and_come_back() -> None:
    room = MemorySize(3, 700, 128)
    table = tables_of(room, 4, "cpu")
    assert table.slots.shape == (3, 192)
    assert sorted(table.slots.flatten().tolist()) == list(range(3 * 192))
    assert torch.equal(table.slots[:, ::PAGE] // PAGE, table.pages)
    assert room.columns(0) == 128
    with pytest.raises(InvalidArgument, match="lanes of a decoder = 0"):
        MemorySize(0, 700, 128)


def test_more_than_there_is_room_for_is_refused(opened: OpenModel) -> None:
    bound = opened.logits_model.bound
    decoder = Decoder.from_model(StandIn(), bound, opened.recipe, lanes=1, positions=3)
    speaker = DecoderLogitsModel(bound, decoder)
    assert speaker.context == 3
    with pytest.raises(InvalidArgument, match="position = 3"):
        decoder.feed([1], [3])
    first, second = Sequence(), Sequence()
    with pytest.raises(InvalidArgument, match="0 lanes free"):
        speaker.hidden([first, second], [torch.tensor([1])] * 2)
    speaker.hidden([second], [torch.tensor([1])])  # the first has been silent longer
    with pytest.raises(InvalidArgument, match="4 tokens"):
        speaker.hidden([Sequence(length=4)], [torch.tensor([1])])  # begun elsewhere
    del second
    speaker.hidden([Sequence()], [torch.tensor([1])])  # who is gone leaves its lane


@pytest.mark.parametrize(
    ("rules", "weights", "reason"),
    [
        ((Rule("head", "NVFP4"),), {}, "ends of a decoder = 'head is NVFP4'"),
        (
            (Rule("layers.*.ffn.experts.*", "BF16"),),
            {},
            "layers.0 = 'the grouped kernel has NVFP4",
        ),
        (
            (Rule("layers.*.ffn.experts.*.w2", "BF16"),),
            {},
            "layers.0 = 'the grouped kernel has NVFP4 experts",
        ),
        ((), {"layers.0.attn.wo_a": "layers.0.attn.wq_a"}, "values of attn.wo_a .* exactly"),
    ],
    ids=["head", "experts", "second product", "rounded wo_a"],
)
def test_what_would_be_rounded_or_misread_is_refused(
    opened: OpenModel, rules: tuple[Rule, ...], weights: dict[str, str], reason: str
) -> None:
    """The recipe says so, or weights are others than it says."""
    of = opened.logits_model.bound
    recipe = Recipe("other", (*rules, *opened.recipe.rules))
    given = {name: of.weights[weights.get(name, name)] for name in of.weights}
    bound = BoundModel(of.config, of.numerics, given, recipe)
    with pytest.raises(DegarbleError, match=reason):
        Decoder.from_model(StandIn(), bound, recipe, 1, 8)


def test_a_target_without_its_forms_is_refused(opened: OpenModel) -> None:
    kernels = StandIn()
    kernels.target = "sm_100a"
    with pytest.raises(NotBuilt, match="target of a decoder = 'sm_100a'"):
        Decoder.from_model(kernels, opened.logits_model.bound, opened.recipe, 1, 8)


def test_narrow_groups_are_one_matrix_with_zeros_between() -> None:
    weight = torch.randn(64, 8).bfloat16()
    narrow, wide = groups_of(weight, 4), groups_of(torch.randn(128, 8).bfloat16(), 2)
    assert narrow.dense
    assert not wide.dense
    x = torch.randn(3, 32)
    parts = torch.einsum("tgk,gnk->tgn", x.reshape(3, 4, 8), weight.float().reshape(4, 16, 8))
    torch.testing.assert_close(x @ narrow.weight.float().T, parts.flatten(1))


def test_a_command_lets_whole_layers_speak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = cases.write_model(tmp_path, "v4", "nvfp4-full")
    monkeypatch.setattr(cutedsl_kernels, "KernelsOnGpu", lambda _settings, **_how: StandIn())
    monkeypatch.setattr(cutedsl_kernels, "require_gpu", lambda: None)
    line = ("--json", "generate", model.checkpoint, "--prompt", "w7 w8", "--max-new-tokens", 1)
    parts = call(capsys, *line, "--backend", "cutedsl").document
    whole = call(capsys, *line, "--backend", "cutedsl", "--graph", "--strict").document
    assert whole["texts"] == parts["texts"]
    assert whole["backend"]["name"] == "cutedsl-graph"
    assert whole["backend"]["torch"] == []
    refused = call(capsys, *line, "--graph")
    assert refused.status == 2
    assert "--backend cutedsl, which it captures" in refused.err


# --------------------------------------------------------------------------------------------------
# wo_a in FP8 by stand-ins: whole or group by group, turned within or before: one answer.

GROUPS, RANK, INNER, HEAD, MATRICES_POSITIONS = 2, 64, 1024, 512, 40
PRODUCT, CODES = "sm90_gemm_grouped_fp8", "simt_quantise_fp8"


def whole_groups(kind: str) -> CodedGroups:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randn(GROUPS * RANK, INNER, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(1, INNER // 128, generator=generator) + 0.5
    if kind == "ue8m0":
        scales = (127 + 4 * scales).to(torch.uint8)
    kernel = LinearKernel("sm90_gemm_fp8_block", GemmProblem(1, RANK, INNER, "fp8_block", kind))
    return CodedGroups(kernel, ((codes, scales),), GROUPS, whole=True)


def matrices_one_by_one(groups: CodedGroups) -> CodedGroups:
    ((codes, scales),) = groups.parts
    parts = tuple((tensor.contiguous(), scales) for tensor in codes.chunk(GROUPS))
    return replace(groups, parts=parts, whole=False)


def matrices_said(
    groups: CodedGroups, tokens: int, launched: list[str] | None = None
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    heads = torch.randn(tokens, GROUPS * INNER // HEAD, HEAD, generator=generator).bfloat16()
    turns = torch.randn(MATRICES_POSITIONS, 64, generator=generator)
    positions = torch.randint(MATRICES_POSITIONS, (tokens,), generator=generator)

    def seen(kernel: str, _problem: Any, _given: dict[str, Any]) -> None:
        if launched is not None:
            launched.append(kernel)

    return coded_product(StandIn(seen), groups, heads, (turns, positions))


@pytest.mark.parametrize("kind", ["float32", "ue8m0"])
def test_every_way_gives_the_same_result(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, launched = whole_groups(kind), list[str]()
    made = matrices_said(groups, 3, launched)
    assert made.shape == (3, GROUPS * RANK)
    assert launched == [CODES, PRODUCT]
    launched.clear()
    assert torch.equal(matrices_said(matrices_one_by_one(groups), 3, launched), made)
    assert launched == [CODES, *GROUPS * ["sm90_gemm_fp8_block"]]
    launched.clear()
    monkeypatch.setattr(layer_matrices, "turns_first", lambda _: False)
    assert torch.equal(matrices_said(groups, 3, launched), made)
    assert launched == [PRODUCT]


def test_other_weights_give_another_result() -> None:
    groups = whole_groups("float32")
    ((codes, scales),) = groups.parts
    other = replace(groups, parts=((codes.flip(0).contiguous(), scales),))
    assert not torch.equal(matrices_said(other, 3), matrices_said(groups, 3))


# --------------------------------------------------------------------------------------------------
# V3.2's whole layers by stand-ins equal components one by one, bit for bit, also in chunks.
#
# That this says something is shown by handing a kernel of the step the wrong tensor: it tells.

DECODER_V32_POSITIONS = 192
SPOKEN = (9, 12, 7, 7, 31)
PROMPT = tuple(6 + n * n % 50 for n in range(75))  # more than a piece, and than are chosen


def opening(folder: Path, layout: str) -> Iterator[OpenModel]:
    model = cases.write_model(folder, "v32", layout)
    with open_model(model.checkpoint, switches=CONVENTIONS) as found, torch.inference_mode():
        yield found


@pytest.fixture(scope="module")
def decoder_v32_opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenModel]:
    yield from opening(tmp_path_factory.mktemp("decoder"), "nvfp4-full")


def decoder_v32_said(model: LogitsModel) -> torch.Tensor:
    """Logits of two sequences, of which one begins later and with a prompt, then both go on."""
    first, second = Sequence(), Sequence()
    tensors = [model.next_logits([first], [torch.tensor([token])]) for token in SPOKEN]
    both = [torch.tensor([31]), torch.tensor(PROMPT)]
    tensors.append(model.next_logits([first, second], both))
    for token in SPOKEN[:2]:
        both = [torch.tensor([token]), torch.tensor([token + 1])]
        tensors.append(model.next_logits([first, second], both))
    return torch.cat(tensors)


def decoder_of(
    opened: OpenModel,
    seen: Callable[..., None] | None = None,
    lanes: int = 3,
    products: str = TILES,
) -> Decoder:
    bound, positions = opened.logits_model.bound, DECODER_V32_POSITIONS
    return Decoder.from_model(
        StandIn(seen), bound, opened.recipe, lanes, positions, products=products
    )


def decoder_v32_by_steps(
    opened: OpenModel, seen: Callable[..., None] | None = None
) -> torch.Tensor:
    return decoder_v32_said(DecoderLogitsModel(opened.logits_model.bound, decoder_of(opened, seen)))


def decoder_v32_by_parts(opened: OpenModel) -> torch.Tensor:
    bound, calls = opened.logits_model.bound, dict(opened.logits_model.bound.calls)
    paired = use_kernels(bound, opened.recipe, StandIn())
    try:
        paired.require_whole()
        return decoder_v32_said(opened.logits_model)
    finally:
        bound.calls.update(calls)


@pytest.fixture(scope="module")
def decoder_v32_one_by_one(decoder_v32_opened: OpenModel) -> torch.Tensor:
    return decoder_v32_by_parts(decoder_v32_opened)


def test_steps_and_pieces_are_their_parts_bit_by_bit(
    decoder_v32_opened: OpenModel, decoder_v32_one_by_one: torch.Tensor
) -> None:
    assert torch.equal(decoder_v32_by_steps(decoder_v32_opened), decoder_v32_one_by_one)


@pytest.mark.slow
def test_steps_of_few_rows_and_pieces_by_tiles_are_their_parts(
    decoder_v32_opened: OpenModel, decoder_v32_one_by_one: torch.Tensor
) -> None:
    """A piece has 64 rows, and tiles, whatever the steps of decoding have."""
    rows_of: dict[str, set[int]] = {}

    def seen(kernel: str, problem: Any, _given: dict[str, Any]) -> None:
        rows_of.setdefault(kernel, set()).add(getattr(problem, "rows", 0))

    decoder = decoder_of(decoder_v32_opened, seen, products=FEW_ROWS)
    bound = decoder_v32_opened.logits_model.bound
    made = decoder_v32_said(DecoderLogitsModel(bound, decoder))
    assert torch.equal(made, decoder_v32_one_by_one)
    assert rows_of["sm90_gemm_nvfp4"] == {PIECE}
    assert rows_of["sm90_gemm_w4a16"] == {3}


FEW_ROWS_WRONG: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "matrices of other heads": ("weight", lambda x: x.roll(64, 0)),
    "heads of other heads": ("x", lambda x: x.roll(1, 1)),
    "positions": ("positions", lambda x: x + 1),
    "splits of other heads": ("sums", lambda x: x.roll(1, 2)),
    "scale of wo": ("decode_scale", lambda x: x * 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", [None, *FEW_ROWS_WRONG])
def test_heads_of_few_rows_are_multiplied_by_one_launch(
    decoder_v32_opened: OpenModel,
    decoder_v32_one_by_one: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    what: str | None,
) -> None:
    """Merged splits too, which these few keys do not have: they are made to."""
    monkeypatch.setattr(layer_module, "merges_apart", lambda _problem: True)
    monkeypatch.setattr(layer_module, "choose_splits", lambda _problem: 5)
    monkeypatch.setattr(standing_in, "choose_splits", lambda _problem: 5)
    name, change = FEW_ROWS_WRONG[what] if what else ("", lambda x: x)
    launched: set[str] = set()

    def seen(kernel: str, problem: Any, given: dict[str, Any]) -> None:
        if getattr(problem, "tokens", PIECE) == PIECE:
            return
        launched.add(kernel)
        if kernel == "sm90_latent_heads" and name in given:
            given[name] = change(given[name]).contiguous()

    decoder = decoder_of(decoder_v32_opened, seen, products=FEW_ROWS)
    bound = decoder_v32_opened.logits_model.bound
    made = decoder_v32_said(DecoderLogitsModel(bound, decoder))
    assert torch.equal(made, decoder_v32_one_by_one) == (what is None)
    assert {"sm90_latent_heads", "sm90_sparse_attention.SPLITS"} <= launched
    assert not launched & {"sm90_gemm_grouped", "simt_latent_query"}


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_querys_product_of_one_row_spares_processors_for_the_choice_of_keys(
    decoder_v32_opened: OpenModel, lanes: int
) -> None:
    """The indexer's product is launched before it, whose thread blocks would keep it waiting."""
    launched: list[tuple[int, int]] = []  # where weights lie, and what is spared

    def seen(_kernel: str, problem: Any, given: dict[str, Any]) -> None:
        of = given.get("weight", given.get("b"))
        if of is not None:
            launched.append((of.data_ptr(), getattr(problem, "spared", 0)))

    decoder = decoder_of(decoder_v32_opened, seen, lanes=lanes, products=FEW_ROWS)
    bound = decoder_v32_opened.logits_model.bound
    DecoderLogitsModel(bound, decoder).next_logits([Sequence()], [torch.tensor([SPOKEN[0]])])
    sparing = {place for place, spared in launched if spared}
    attentions = [layer.attn for layer in decoder.layers]
    of_queries = [attention.wq_b.operands["b"].data_ptr() for attention in attentions]
    assert sparing == (set(of_queries) if lanes == 1 else set())
    assert sum(spared > 0 for _, spared in launched) == len(sparing)
    places = [place for place, _ in launched]
    for attention, of_query in zip(attentions, of_queries, strict=True):
        of_keys = attention.indexer.wq_b.operands["b"].data_ptr()
        assert places.index(of_keys) < places.index(of_query)


@pytest.mark.slow
def test_matrices_of_several_parts_are_multiplied_by_groups(
    decoder_v32_opened: OpenModel, decoder_v32_one_by_one: torch.Tensor
) -> None:
    """Weights with codes take up to three BF16 matrices side by side; here the second is zero."""
    launched: set[str] = set()

    def seen(kernel: str, _problem: Any, _given: dict[str, Any]) -> None:
        launched.add(kernel)

    decoder = decoder_of(decoder_v32_opened, seen, products=FEW_ROWS)

    def of_two(matrix: torch.Tensor) -> torch.Tensor:
        return torch.cat([matrix, torch.zeros_like(matrix)], 1)

    decoder.layers = tuple(
        replace(
            of, attn=replace(of.attn, key=of_two(of.attn.key), value=of_two(of.attn.value))
        )
        for of in decoder.layers
    )  # fmt: skip
    bound = decoder_v32_opened.logits_model.bound
    made = decoder_v32_said(DecoderLogitsModel(bound, decoder))
    assert torch.equal(made, decoder_v32_one_by_one)
    assert "sm90_gemm_grouped" in launched
    assert "sm90_latent_heads" not in launched


@pytest.mark.slow
def test_steps_equal_their_parts_with_fp8_linears(tmp_path: Path) -> None:
    for model in opening(tmp_path, "nvfp4-experts"):
        dense, scored = decoder_of(model).layers
        assert not isinstance(dense.ffn.gated, Experts), "FP8, not stacked: 192 rows"
        assert scored.ffn.routed is not None
        assert torch.equal(decoder_v32_by_steps(model), decoder_v32_by_parts(model))


DECODER_V32_WRONG: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "residual left out": ("simt_residual_norm", torch.zeros_like, "residual"),
    "own slot": ("simt_kv_write", lambda x: x.flip(0), "slots"),
    "factor of heads": ("simt_scale", lambda x: -x, "values"),
    "positions of queries": ("simt_latent_query", lambda x: x + 1, "positions"),
    "latent of another head": ("simt_latent_query", lambda x: x.roll(1, 1), "latent"),
    "key matrices": ("sm90_gemm_grouped", lambda x: x.roll(64, 0), "b"),
    "chosen one to the left": ("simt_slots", lambda x: x - 1, "numbers"),
    "sequences of keys": ("sm90_indexer_scores", lambda x: 1 - x.clamp(max=1), "sequences"),
    "bias of keys": ("simt_indexer_operand", lambda x: x + 1, "bias"),
    "router's bias": ("simt_router", lambda x: x.roll(1) * -3, "bias"),
    "shared expert left out": ("sm90_moe_nvfp4", lambda x: x * 0, "shared"),
}
DECODER_V32_IN_CI = ("residual left out", "own slot")


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(each, marks=[pytest.mark.slow] * (each not in DECODER_V32_IN_CI))
        for each in DECODER_V32_WRONG
    ],
)
def test_decoder_v32_a_tensor_at_the_wrong_argument_changes_what_is_said(
    decoder_v32_opened: OpenModel, decoder_v32_one_by_one: torch.Tensor, what: str
) -> None:
    at, change, name = DECODER_V32_WRONG[what]

    def seen(kernel: str, _problem: Any, given: dict[str, Any]) -> None:
        if kernel == at and name in given:
            given[name] = change(given[name]).contiguous()

    assert not torch.equal(decoder_v32_by_steps(decoder_v32_opened, seen), decoder_v32_one_by_one)


def test_pieces_end_where_rows_do_and_rest_writes_nothing(decoder_v32_opened: OpenModel) -> None:
    told: list[tuple[int, int]] = []

    def seen(kernel: str, problem: Any, given: dict[str, Any]) -> None:
        if kernel == "simt_slots" and problem.kind == "window":
            told.append((problem.tokens, int((given["owners"] >= 0).sum())))

    decoder = decoder_of(decoder_v32_opened, seen)
    speaker = DecoderLogitsModel(decoder_v32_opened.logits_model.bound, decoder)
    sequences = [Sequence() for _ in range(3)]
    new = [torch.arange(6, 6 + count) for count in (40, 1, 30)]
    hidden = speaker.hidden(sequences, new)
    assert told == [(PIECE, PIECE), (PIECE, 70 - PIECE), (3, 1)]
    assert [sequence.length for sequence in sequences] == [40, 1, 30]
    assert hidden.shape == (71, decoder_v32_opened.config.hidden_size)
    rows = decoder.memories[0].rows.view(torch.bfloat16).reshape(-1, 576)
    assert int((rows != 0).any(1).sum()) == 71


def test_pieces_attend_in_the_order_of_steps(decoder_v32_opened: OpenModel) -> None:
    """Prefill sums in another order on Hopper, which stand-ins do not show."""
    ways: dict[int, set[tuple[str, int]]] = {}

    def seen(kernel: str, problem: Any, _given: dict[str, Any]) -> None:
        if kernel == "sm90_sparse_attention":
            ways.setdefault(problem.tokens, set()).add((problem.mode, choose_splits(problem)))

    decoder = decoder_of(decoder_v32_opened, seen)
    speaker = DecoderLogitsModel(decoder_v32_opened.logits_model.bound, decoder)
    speaker.hidden([Sequence() for _ in range(2)], [torch.full((n,), 7) for n in (70, 1)])
    assert set(ways) == {PIECE, 3}
    assert ways[PIECE] == ways[3]


def test_caches_have_v32s_entries_and_others_are_refused(decoder_v32_opened: OpenModel) -> None:
    bound = decoder_v32_opened.logits_model.bound
    kept = bound.numerics
    try:
        for kind, stride in (("fp8", 656), ("fp8_f32", 656), ("exact", 1152)):
            bound.numerics = kept.with_switches(kv_cache=KeyValueCache(kind))
            rows = decoder_of(decoder_v32_opened).memories[0].rows
            assert rows.shape == (3 * DECODER_V32_POSITIONS // 64, 64 * stride)
        for switches in ({"kv_cache": KeyValueCache.NVFP4}, {"cache_scale_floored": True}):
            bound.numerics = kept.with_switches(**switches)
            with pytest.raises(NotBuilt, match="cache of a decoder"):
                decoder_of(decoder_v32_opened)
    finally:
        bound.numerics = kept
    assert entry_of(kept.switches) == "bf16"


def test_rows_that_do_not_fit_are_refused(decoder_v32_opened: OpenModel) -> None:
    decoder = decoder_of(decoder_v32_opened, lanes=2)
    assert decoder.prompts is not None
    with pytest.raises(InvalidArgument, match="position = 192"):
        decoder.prompts.feed([7] * PIECE, [DECODER_V32_POSITIONS] * PIECE, [0] * PIECE)
    with pytest.raises(InvalidArgument, match="rows of a step = 3"):
        decoder.prompts.feed([7] * 3, [0] * 3, [0] * 3)
    with pytest.raises(InvalidArgument, match="64, of lanes below 2"):
        decoder.prompts.feed([7] * PIECE, [0] * PIECE, [2] * PIECE)


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (Rule("head", "NVFP4"), "ends of a decoder = 'head is NVFP4'"),
        (Rule("layers.*.ffn.experts.*", "BF16"), "layers.1 = 'the grouped kernel has NVFP4"),
        (Rule("layers.*.attn.indexer.weights_proj", "NVFP4"), "weights_proj is NVFP4"),
    ],
    ids=["head", "experts", "weights of heads"],
)
def test_what_no_kernel_computes_is_refused(
    decoder_v32_opened: OpenModel, rule: Rule, reason: str
) -> None:
    of = decoder_v32_opened.logits_model.bound
    recipe = Recipe("other", (rule, *decoder_v32_opened.recipe.rules))
    bound = BoundModel(of.config, of.numerics, dict(of.weights), recipe)
    with pytest.raises(DegarbleError, match=reason):
        Decoder.from_model(StandIn(), bound, recipe, 1, 8)


@pytest.mark.slow
def test_decoder_v32_a_command_lets_whole_layers_speak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = cases.write_model(tmp_path, "v32", "nvfp4-full")
    monkeypatch.setattr(cutedsl_kernels, "KernelsOnGpu", lambda _settings, **_how: StandIn())
    monkeypatch.setattr(cutedsl_kernels, "require_gpu", lambda: None)
    words = " ".join(f"w{7 + n % 3}" for n in range(70))
    line = ("--json", "generate", model.checkpoint, "--prompt", words, "--max-new-tokens", 3)
    parts = call(capsys, *line, "--backend", "cutedsl").document
    whole = call(capsys, *line, "--backend", "cutedsl", "--graph", "--strict").document
    assert whole["texts"] == parts["texts"]
    assert whole["backend"]["name"] == "cutedsl-graph"
    assert whole["backend"]["torch"] == []
