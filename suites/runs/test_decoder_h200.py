"""Whole layers on an H200: a captured step is the eager one bit by bit, and says what parts say."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.cli.kernels import settings_here
from degarble.harness.runs.cutedsl import CONVENTIONS, use_kernels
from degarble.harness.runs.cutedsl_kernels import KernelsOnGpu
from degarble.harness.runs.decoder import Decoder, DecoderSpeaker
from degarble.harness.runs.model import open_model
from degarble.references.state import Sequence
from degarble.suites.runs import cutedsl_cases as cases

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.harness.runs.model import OpenModel

pytestmark = [pytest.mark.h200, pytest.mark.needs("cutlass")]

LENGTHS = (150, 131, 4)  # beyond the window and an entry of 128; a lane that soon rests
POSITIONS = 192


@pytest.fixture(scope="module", params=["nvfp4-full", "nvfp4-experts"])
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenModel]:
    folder = tmp_path_factory.mktemp("decoder")
    model = cases.write_model(folder, "v4", str(request.param), 5)
    with open_model(model.checkpoint, switches=CONVENTIONS) as found, torch.inference_mode():
        yield found


def decoder_of(opened: OpenModel, lanes: int = 3, entry: str = "exact") -> Decoder:
    bound = opened.speaker.bound
    kept = bound.numerics
    bound.numerics = kept.with_switches(kv_cache=entry)
    try:
        return Decoder.of(KernelsOnGpu(settings_here()), bound, opened.recipe, lanes, POSITIONS)
    finally:
        bound.numerics = kept


def ids_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(6, 64, (length,), generator=generator).tolist()


def walked(decoder: Decoder, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Every step's streams and logits; a lane whose sequence is over rests."""
    made: list[torch.Tensor] = []
    for position in range(max(map(len, sequences))):
        ids = [each[position] if position < len(each) else None for each in sequences]
        decoder.feed(ids, [position] * len(ids))
        made += [each.clone() for each in decoder.run()]
    return made


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("entry", ["exact", "fp8", "nvfp4"])
def test_a_replayed_step_is_an_eager_one_bit_by_bit(opened: OpenModel, entry: str) -> None:
    sequences = [ids_of(length, seed) for seed, length in enumerate(LENGTHS)]
    eager, graph = decoder_of(opened, entry=entry), decoder_of(opened, entry=entry)
    graph.capture()
    alive = [[n for n, each in enumerate(sequences) if p < len(each)] for p in range(150)]
    pairs = list(zip(walked(eager, sequences), walked(graph, sequences), strict=True))
    assert pairs[0][0].isfinite().all()
    for number, (theirs, ours) in enumerate(pairs):
        rows = alive[number // 2]
        assert torch.equal(bits(theirs[rows]), bits(ours[rows])), f"step {number // 2}"
    for one, two in zip(eager.memories, graph.memories, strict=True):
        for mine, other in zip(one.tensors, two.tensors, strict=True):
            assert torch.equal(bits(mine), bits(other))
    assert len({tuple(each[0][0, 0].tolist()) for each in pairs[::2]}) > 100, "steps differ"


def test_company_and_rest_change_no_bit_of_a_lane(opened: OpenModel) -> None:
    first, second = ids_of(140, 7), ids_of(133, 8)
    alone, together = decoder_of(opened), decoder_of(opened)
    together.capture()
    theirs = walked(alone, [first, [], []])
    # The second sequence begins late, and the first one rests for a while.
    ours = []
    for position in range(60):
        together.feed([first[position], None, None], [position] * 3)
        ours += [each.clone() for each in together.run()]
    for position in range(50):
        together.feed([None, second[position], second[position]], [position] * 3)
        together.run()
    for position in range(60, 140):
        together.feed([first[position], second[position - 10], None], [position, position - 10, 0])
        ours += [each.clone() for each in together.run()]
    for one, two in zip(theirs, ours, strict=True):
        assert torch.equal(bits(one[0]), bits(two[0]))


def test_a_token_a_step_is_what_components_say_one_by_one(
    request: pytest.FixtureRequest, opened: OpenModel
) -> None:
    prompts = [ids_of(150, 11), ids_of(131, 12)]
    bound, calls = opened.speaker.bound, dict(opened.speaker.bound.calls)
    decoder = decoder_of(opened, lanes=2)
    decoder.capture()

    def said(speaker: Any) -> torch.Tensor:
        sequences = [Sequence() for _ in prompts]
        made = []
        for position in range(131):
            new = [torch.tensor([each[position]]) for each in prompts]
            made.append(speaker.next_logits(sequences, new).float().cpu())
        return torch.stack(made)

    ours = said(DecoderSpeaker(bound, decoder))
    try:
        use_kernels(bound, opened.recipe, KernelsOnGpu(settings_here()))
        parts = said(opened.speaker)
    finally:
        bound.calls.update(calls)
    if request.node.callspec.params["opened"] == "nvfp4-full":  # the other one has not run yet
        assert torch.equal(ours, parts)
    near = torch.cosine_similarity(ours, parts, dim=-1)
    same = (ours == parts).all(-1).float().mean()
    told = f"median cosine {float(near.median()):.7f}, equal rows {float(same):.3f}"
    assert float(near.median()) > 0.9999, told
    assert float((near > 0.99).float().mean()) > 0.9, told
    print(told)  # noqa: T201  seen with -s


def test_greedy_is_the_first_of_the_largest(opened: OpenModel) -> None:
    decoder = decoder_of(opened)
    logits = torch.randn(3, opened.config.vocab_size, device="cuda")
    logits[1, 9] = logits[1, 4] = 50.0
    assert torch.equal(decoder.greedy(logits).long(), logits.argmax(-1))
    assert int(decoder.greedy(logits)[1]) == 4


def test_the_model_is_the_small_one_with_every_layer_type(opened: OpenModel) -> None:
    assert {each.ratio for each in opened.config.layers} == {0, 4, 128}
    assert replace(cases.CONFIG_V4) == opened.config
