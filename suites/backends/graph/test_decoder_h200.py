"""Whole layers on an H200: a captured step is the eager one bit by bit, and says what parts say."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.backends.cutedsl.backend import CONVENTIONS, use_kernels
from degarble.harness.backends.cutedsl.kernels import KernelsOnGpu
from degarble.harness.backends.graph import layers
from degarble.harness.backends.graph.decoder import Decoder, DecoderLogitsModel
from degarble.harness.backends.graph.matrices import FEW_ROWS, TILES
from degarble.harness.cli.values import settings_here
from degarble.harness.inference.model import open_model
from degarble.kernels.gemm.gemv_problem import GemvProblem
from degarble.kernels.rows.problem import InverseRopeProblem
from degarble.references.model import Sequence
from degarble.references.numerics import KeyValueCache
from degarble.suites.backends import cutedsl_cases as cases

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.harness.backends.cutedsl.kernels import Kernels
    from degarble.harness.backends.graph.matrices import DenseGroups
    from degarble.harness.inference.model import OpenModel

pytestmark = [pytest.mark.h200, pytest.mark.needs("cutlass")]

LENGTHS = (150, 131, 4)  # beyond the window and an entry of 128; a lane that soon rests
POSITIONS = 192


ENTRIES = {"v4": ("exact", "fp8", "nvfp4"), "v32": ("exact", "fp8", "fp8_f32")}
MODELS = [(family, layout) for family in ENTRIES for layout in ("nvfp4-full", "nvfp4-experts")]
HEADS = {"nvfp4-full": 64, "nvfp4-experts": 8}  # of the indexer: a release's, and fewer


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenModel]:
    folder = tmp_path_factory.mktemp("decoder")
    family, layout = request.param
    config = replace(cases.CONFIGS[family], index_n_heads=HEADS[layout])
    model = cases.write_model(folder, family, layout, 5, config)
    with open_model(model.checkpoint, switches=CONVENTIONS) as found, torch.inference_mode():
        yield found


def decoder_of(
    opened: OpenModel, lanes: int = 3, entry: str = "exact", products: str = TILES
) -> Decoder:
    bound = opened.logits_model.bound
    kept = bound.numerics
    bound.numerics = kept.with_switches(kv_cache=KeyValueCache(entry))
    try:
        return Decoder.from_model(
            KernelsOnGpu(settings_here()), bound, opened.recipe, lanes, POSITIONS,
            products=products,
        )  # fmt: skip
    finally:
        bound.numerics = kept


def ids_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(6, 64, (length,), generator=generator).tolist()


def walked(decoder: Decoder, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Every step's streams and logits; a lane whose sequence is over rests."""
    tensors: list[torch.Tensor] = []
    for position in range(max(map(len, sequences))):
        ids = [sequence[position] if position < len(sequence) else None for sequence in sequences]
        decoder.feed(ids, [position] * len(ids))
        tensors += [tensor.clone() for tensor in decoder.run()]
    return tensors


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("cache", range(3))
def test_a_replayed_step_is_an_eager_one_bit_by_bit(
    request: pytest.FixtureRequest, opened: OpenModel, cache: int
) -> None:
    entry = ENTRIES[request.node.callspec.params["opened"][0]][cache]
    sequences = [ids_of(length, seed) for seed, length in enumerate(LENGTHS)]
    eager, graph = decoder_of(opened, entry=entry), decoder_of(opened, entry=entry)
    graph.capture()
    alive = [[n for n, sequence in enumerate(sequences) if p < len(sequence)] for p in range(150)]
    pairs = list(zip(walked(eager, sequences), walked(graph, sequences), strict=True))
    assert pairs[0][0].isfinite().all()
    for number, (theirs, ours) in enumerate(pairs):
        rows = alive[number // 2]
        assert torch.equal(bits(theirs[rows]), bits(ours[rows])), f"step {number // 2}"
    for one, two in zip(eager.memories, graph.memories, strict=True):
        for mine, other in zip(one.tensors, two.tensors, strict=True):
            assert torch.equal(bits(mine), bits(other))
    first = {tuple(pair[0][0].flatten()[:64].tolist()) for pair in pairs[::2]}
    assert len(first) > 100, "steps differ"


def test_other_lanes_and_idle_steps_change_no_bit_of_a_lane(opened: OpenModel) -> None:
    first, second = ids_of(140, 7), ids_of(133, 8)
    alone, together = decoder_of(opened), decoder_of(opened)
    together.capture()
    theirs = walked(alone, [first, [], []])
    # The second sequence begins late, and the first one rests for a while.
    ours = []
    for position in range(60):
        together.feed([first[position], None, None], [position] * 3)
        ours += [tensor.clone() for tensor in together.run()]
    for position in range(50):
        together.feed([None, second[position], second[position]], [position] * 3)
        together.run()
    for position in range(60, 140):
        together.feed([first[position], second[position - 10], None], [position, position - 10, 0])
        ours += [tensor.clone() for tensor in together.run()]
    for one, two in zip(theirs, ours, strict=True):
        assert torch.equal(bits(one[0]), bits(two[0]))


@pytest.mark.parametrize("several", [(1, 3, 4), (5, 16), (17, 40)])
def test_products_of_few_rows_replay_and_know_no_company(
    opened: OpenModel, several: tuple[int, ...]
) -> None:
    """Equal bits eager and replayed, alone and batched, whatever the number of few lanes."""
    first, second = ids_of(40, 7), ids_of(33, 8)
    eager = decoder_of(opened, several[0], products=FEW_ROWS)
    theirs = walked(eager, [first, *[[]] * (several[0] - 1)])
    for lanes in several:
        graph = decoder_of(opened, lanes, products=FEW_ROWS)
        graph.capture()
        for others in ([], second)[: 1 + (lanes > 1)]:
            sequences = [first, *[others] * (lanes - 1)]
            for one, two in zip(theirs, walked(graph, sequences), strict=True):
                assert torch.equal(bits(one[0]), bits(two[0])), f"{lanes} lanes"


@pytest.mark.parametrize("lanes", [1, 4])
def test_joined_launches_have_the_bits_of_their_parts(
    opened: OpenModel, monkeypatch: pytest.MonkeyPatch, lanes: int
) -> None:
    """A replayed graph of few lanes against eager steps: launches apart, one after the other."""
    sequences = [ids_of(140, seed) for seed in range(lanes)]
    joined, apart = (decoder_of(opened, lanes, products=FEW_ROWS) for _ in range(2))
    joined.capture()
    ours = walked(joined, sequences)
    if isinstance(apart.stepping, layers.V4Steps):
        assert apart.stepping.spreads_later
        apart.stepping.spreads_later = False
    apart.stepping.streams.clear()
    monkeypatch.setattr(layers, "gemv_turned", turned_apart)
    for number, (one, two) in enumerate(zip(walked(apart, sequences), ours, strict=True)):
        assert torch.equal(bits(one), bits(two)), f"step {number // 2}"
    for one, two in zip(apart.memories, joined.memories, strict=True):
        for mine, other in zip(one.tensors, two.tensors, strict=True):
            assert torch.equal(bits(mine), bits(other))


def turned_apart(
    kernels: Kernels,
    groups: DenseGroups,
    heads: torch.Tensor,
    turning: tuple[torch.Tensor, torch.Tensor],
    _scale: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Do what `gemv_turned` does by two launches; what follows quantises."""
    (table, positions), (rows, count, _) = turning, heads.shape
    of = 1 if groups.dense else groups.groups
    back = InverseRopeProblem(rows, count, len(table))
    (turned,) = kernels.run(
        "simt_inverse_rope", back, heads=heads, turns=table, positions=positions
    )
    columns, inner = groups.weight.shape[0] // of, groups.weight.shape[1]
    problem = GemvProblem(rows, columns, inner, "bf16", of)
    return kernels.run("simt_gemv_bf16", problem, x=turned.flatten(1), weight=groups.weight)


def test_one_token_a_step_equals_components_called_one_by_one(opened: OpenModel) -> None:
    prompts = [ids_of(150, 11), ids_of(131, 12)]
    bound, calls = opened.logits_model.bound, dict(opened.logits_model.bound.calls)
    decoder = decoder_of(opened, lanes=2)
    decoder.capture()

    def said(speaker: Any) -> torch.Tensor:
        sequences = [Sequence() for _ in prompts]
        made = []
        for position in range(131):
            new = [torch.tensor([prompt[position]]) for prompt in prompts]
            made.append(speaker.next_logits(sequences, new).float().cpu())
        return torch.stack(made)

    ours = said(DecoderLogitsModel(bound, decoder))
    try:
        use_kernels(bound, opened.recipe, KernelsOnGpu(settings_here()))
        parts = said(opened.logits_model)
    finally:
        bound.calls.update(calls)
    assert torch.equal(ours, parts)


def test_a_chunked_prompt_is_equal_in_any_batch(opened: OpenModel) -> None:
    alone, together = decoder_of(opened), decoder_of(opened)
    if alone.prompts is None:
        pytest.skip("this family's prompts go in token by token")
    together.capture()
    bound = opened.logits_model.bound
    prompts = [ids_of(length, seed) for length, seed in ((150, 21), (77, 22), (1, 23))]

    def states(decoder: Decoder, chosen: list[int]) -> list[torch.Tensor]:
        new = [torch.tensor(prompts[n]) for n in chosen]
        made = DecoderLogitsModel(bound, decoder).hidden([Sequence() for _ in chosen], new)
        return list(made.split([len(tensor) for tensor in new]))

    (eager,) = states(alone, [0])
    *_, last = states(together, [2, 1, 0])
    assert eager.isfinite().all()
    assert torch.equal(bits(eager), bits(last)), "company, or a graph, changes bits"
    for one, two in zip(alone.memories, together.memories, strict=True):
        assert len(one.tensors) == len(two.tensors) == 2
    stepping = decoder_of(opened)
    stepping.prompts = None
    (by_token,) = states(stepping, [0])
    assert torch.equal(eager, by_token), "a piece is not its tokens"


def test_greedy_is_the_first_of_the_largest(opened: OpenModel) -> None:
    decoder = decoder_of(opened)
    logits = torch.randn(3, opened.config.vocab_size, device="cuda")
    logits[1, 9] = logits[1, 4] = 50.0
    assert torch.equal(decoder.greedy(logits).long(), logits.argmax(-1))
    assert int(decoder.greedy(logits)[1]) == 4


def test_the_model_is_the_small_one_with_every_layer_type(opened: OpenModel) -> None:
    of_v4 = opened.config.family == cases.CONFIG_V4.family
    own = cases.CONFIGS["v4" if of_v4 else "v32"]
    assert replace(opened.config, index_n_heads=own.index_n_heads) == own
    if of_v4:
        assert {layer.ratio for layer in opened.config.layers} == {0, 4, 128}
    else:
        assert len({layer.mlp_type for layer in opened.config.layers}) == 2, (
            "a dense layer and experts"
        )
