"""Whole layers, a token a step, by stand-ins: bit for bit what the same parts say one by one.

That this says something is shown by handing a kernel of the step the wrong tensor: it tells.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.backends.cutedsl import kernels as cutedsl_kernels
from degarble.harness.backends.cutedsl.backend import CONVENTIONS, use_kernels
from degarble.harness.backends.graph.decoder import Decoder, DecoderSpeaker
from degarble.harness.backends.graph.matrices import CodedGroups, groups_of
from degarble.harness.backends.graph.steps import PAGE, MemorySize, tables_of
from degarble.harness.backends.graph.weights import AttentionWeights, V4Layout
from degarble.harness.base.errors import DegarbleError, InvalidArgument, NotBuilt
from degarble.harness.inference.model import OpenModel, open_model
from degarble.harness.model.recipes import Recipe, Rule
from degarble.references.binding import BoundModel
from degarble.references.model import Sequence
from degarble.suites.backends import cutedsl_cases as cases
from degarble.suites.backends.cutedsl_standin import StandIn
from degarble.suites.commands.calls import call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from degarble.harness.inference.model import LogitsModel

TOKENS = (9, 12, 7, 7, 31)  # the fourth completes an entry, the fifth sees it
LATER = 2  # where a second sequence begins
POSITIONS = 192


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenModel]:
    model = cases.write_model(tmp_path_factory.mktemp("decoder"), "v4", "nvfp4-full")
    with open_model(model.checkpoint, switches=CONVENTIONS) as found, torch.inference_mode():
        yield found


def said(speaker: LogitsModel) -> torch.Tensor:
    """Logits of two sequences, of which one begins later; a lane more than needed rests."""
    first, second = Sequence(), Sequence()
    made = []
    for number, token in enumerate(TOKENS):
        live = [first] if number < LATER else [first, second]
        made.append(
            speaker.next_logits(live, [torch.tensor([token + n]) for n in range(len(live))])
        )
    return torch.cat(made)


def by_steps(opened: OpenModel, seen: Callable[..., None] | None = None) -> torch.Tensor:
    bound = opened.speaker.bound
    decoder = Decoder.of(StandIn(seen), bound, opened.recipe, lanes=3, positions=POSITIONS)
    return said(DecoderSpeaker(bound, decoder))


def by_parts(opened: OpenModel) -> torch.Tensor:
    bound, calls = opened.speaker.bound, dict(opened.speaker.bound.calls)
    use_kernels(bound, opened.recipe, StandIn())
    try:
        return said(opened.speaker)
    finally:
        bound.calls.update(calls)


@pytest.fixture(scope="module")
def one_by_one(opened: OpenModel) -> torch.Tensor:
    return by_parts(opened)


def test_a_step_is_its_parts_bit_by_bit(opened: OpenModel, one_by_one: torch.Tensor) -> None:
    assert torch.equal(by_steps(opened), one_by_one)


@pytest.mark.slow
def test_a_step_equals_its_parts_with_fp8_linears(tmp_path: Path) -> None:
    model = cases.write_model(tmp_path, "v4", "nvfp4-experts")
    with open_model(model.checkpoint, switches=CONVENTIONS) as found, torch.inference_mode():
        kinds = {each.wo_a.__class__ for each in layers_of(found)}
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
    laying = V4Layout(opened.speaker.bound, cases.CONFIG_V4, opened.recipe, torch.device("cpu"))
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
    bound = opened.speaker.bound
    decoder = Decoder.of(StandIn(), bound, opened.recipe, lanes=1, positions=3)
    speaker = DecoderSpeaker(bound, decoder)
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
    of = opened.speaker.bound
    recipe = Recipe("other", (*rules, *opened.recipe.rules))
    given = {name: of.weights[weights.get(name, name)] for name in of.weights}
    bound = BoundModel(of.config, of.numerics, given, recipe)
    with pytest.raises(DegarbleError, match=reason):
        Decoder.of(StandIn(), bound, recipe, 1, 8)


def test_a_target_without_its_forms_is_refused(opened: OpenModel) -> None:
    kernels = StandIn()
    kernels.target = "sm_100a"
    with pytest.raises(NotBuilt, match="target of a decoder = 'sm_100a'"):
        Decoder.of(kernels, opened.speaker.bound, opened.recipe, 1, 8)


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
