"""V3.2's whole layers by stand-ins: bit for bit what components say one by one, also by pieces.

That this says something is shown by handing a kernel of the step the wrong tensor: it tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.backends.cutedsl import kernels as cutedsl_kernels
from degarble.harness.backends.cutedsl.backend import CONVENTIONS, use_kernels
from degarble.harness.backends.graph.decoder import PIECE, Decoder, DecoderSpeaker, entry_of
from degarble.harness.backends.graph.matrices import Experts
from degarble.harness.base.errors import DegarbleError, InvalidArgument, NotBuilt
from degarble.harness.inference.model import OpenModel, open_model
from degarble.harness.model.recipes import Recipe, Rule
from degarble.references.binding import BoundModel
from degarble.references.model import Sequence
from degarble.references.numerics import KeyValueCache
from degarble.suites.backends import cutedsl_cases as cases
from degarble.suites.backends.cutedsl_standin import StandIn
from degarble.suites.commands.calls import call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from degarble.harness.inference.model import LogitsModel

POSITIONS = 192
SPOKEN = (9, 12, 7, 7, 31)
PROMPT = tuple(6 + n * n % 50 for n in range(75))  # more than a piece, and than are chosen


def opening(folder: Path, layout: str) -> Iterator[OpenModel]:
    model = cases.write_model(folder, "v32", layout)
    with open_model(model.checkpoint, switches=CONVENTIONS) as found, torch.inference_mode():
        yield found


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenModel]:
    yield from opening(tmp_path_factory.mktemp("decoder"), "nvfp4-full")


def said(speaker: LogitsModel) -> torch.Tensor:
    """Logits of two sequences, of which one begins later and with a prompt, then both go on."""
    first, second = Sequence(), Sequence()
    made = [speaker.next_logits([first], [torch.tensor([token])]) for token in SPOKEN]
    both = [torch.tensor([31]), torch.tensor(PROMPT)]
    made.append(speaker.next_logits([first, second], both))
    for token in SPOKEN[:2]:
        both = [torch.tensor([token]), torch.tensor([token + 1])]
        made.append(speaker.next_logits([first, second], both))
    return torch.cat(made)


def decoder_of(
    opened: OpenModel, seen: Callable[..., None] | None = None, lanes: int = 3
) -> Decoder:
    bound = opened.speaker.bound
    return Decoder.of(StandIn(seen), bound, opened.recipe, lanes, POSITIONS)


def by_steps(opened: OpenModel, seen: Callable[..., None] | None = None) -> torch.Tensor:
    return said(DecoderSpeaker(opened.speaker.bound, decoder_of(opened, seen)))


def by_parts(opened: OpenModel) -> torch.Tensor:
    bound, calls = opened.speaker.bound, dict(opened.speaker.bound.calls)
    paired = use_kernels(bound, opened.recipe, StandIn())
    try:
        paired.require_whole()
        return said(opened.speaker)
    finally:
        bound.calls.update(calls)


@pytest.fixture(scope="module")
def one_by_one(opened: OpenModel) -> torch.Tensor:
    return by_parts(opened)


def test_steps_and_pieces_are_their_parts_bit_by_bit(
    opened: OpenModel, one_by_one: torch.Tensor
) -> None:
    assert torch.equal(by_steps(opened), one_by_one)


@pytest.mark.slow
def test_steps_equal_their_parts_with_fp8_linears(tmp_path: Path) -> None:
    for found in opening(tmp_path, "nvfp4-experts"):
        dense, scored = decoder_of(found).layers
        assert not isinstance(dense.ffn.gated, Experts), "FP8, not stacked: 192 rows"
        assert scored.ffn.routed is not None
        assert torch.equal(by_steps(found), by_parts(found))


WRONG: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "residual left out": ("simt_residual_norm", torch.zeros_like, "residual"),
    "own slot": ("simt_kv_write", lambda x: x.flip(0), "slots"),
    "factor of heads": ("simt_scale", lambda x: -x, "values"),
    "positions of queries": ("simt_latent_query", lambda x: x + 1, "positions"),
    "latent of another head": ("simt_latent_query", lambda x: x.roll(1, 1), "latent"),
    "key matrices": ("sm90_gemm_grouped", lambda x: x.roll(64, 0), "b"),
    "chosen one to the left": ("simt_slots", lambda x: x - 1, "numbers"),
    "sequences of keys": ("sm90_indexer_scores", lambda x: 1 - x.clamp(max=1), "sequences"),
    "bias of keys": ("simt_indexer_operand", lambda x: x + 1, "bias"),
    "router's bias": ("simt_router", lambda x: x.roll(1) * -3, "source"),
    "shared expert left out": ("sm90_moe_nvfp4", lambda x: x * 0, "shared"),
}
IN_CI = ("residual left out", "own slot")


@pytest.mark.parametrize(
    "what", [pytest.param(each, marks=[pytest.mark.slow] * (each not in IN_CI)) for each in WRONG]
)
def test_a_tensor_at_the_wrong_argument_changes_what_is_said(
    opened: OpenModel, one_by_one: torch.Tensor, what: str
) -> None:
    at, change, name = WRONG[what]

    def seen(kernel: str, _problem: Any, given: dict[str, Any]) -> None:
        if kernel == at and name in given:
            given[name] = change(given[name]).contiguous()

    assert not torch.equal(by_steps(opened, seen), one_by_one)


def test_pieces_end_where_rows_do_and_rest_writes_nothing(opened: OpenModel) -> None:
    told: list[tuple[int, int]] = []

    def seen(kernel: str, problem: Any, given: dict[str, Any]) -> None:
        if kernel == "simt_slots" and problem.kind == "window":
            told.append((problem.tokens, int((given["owners"] >= 0).sum())))

    decoder = decoder_of(opened, seen)
    speaker = DecoderSpeaker(opened.speaker.bound, decoder)
    sequences = [Sequence() for _ in range(3)]
    new = [torch.arange(6, 6 + count) for count in (40, 1, 30)]
    hidden = speaker.hidden(sequences, new)
    assert told == [(PIECE, PIECE), (PIECE, 70 - PIECE), (3, 1)]
    assert [each.length for each in sequences] == [40, 1, 30]
    assert hidden.shape == (71, opened.config.hidden_size)
    rows = decoder.memories[0].rows.view(torch.bfloat16).reshape(-1, 576)
    assert int((rows != 0).any(1).sum()) == 71


def test_caches_have_v32s_entries_and_others_are_refused(opened: OpenModel) -> None:
    bound = opened.speaker.bound
    kept = bound.numerics
    try:
        for kind, stride in (("fp8", 656), ("fp8_f32", 656), ("exact", 1152)):
            bound.numerics = kept.with_switches(kv_cache=KeyValueCache(kind))
            rows = decoder_of(opened).memories[0].rows
            assert rows.shape == (3 * POSITIONS // 64, 64 * stride)
        for switches in ({"kv_cache": KeyValueCache.NVFP4}, {"cache_scale_floored": True}):
            bound.numerics = kept.with_switches(**switches)
            with pytest.raises(NotBuilt, match="cache of a decoder"):
                decoder_of(opened)
    finally:
        bound.numerics = kept
    assert entry_of(kept.switches) == "bf16"


def test_rows_that_do_not_fit_are_refused(opened: OpenModel) -> None:
    decoder = decoder_of(opened, lanes=2)
    assert decoder.prompts is not None
    with pytest.raises(InvalidArgument, match="position = 192"):
        decoder.prompts.feed([7] * PIECE, [POSITIONS] * PIECE, [0] * PIECE)
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
def test_what_no_kernel_computes_is_refused(opened: OpenModel, rule: Rule, reason: str) -> None:
    of = opened.speaker.bound
    recipe = Recipe("other", (rule, *opened.recipe.rules))
    bound = BoundModel(of.config, of.numerics, dict(of.weights), recipe)
    with pytest.raises(DegarbleError, match=reason):
        Decoder.of(StandIn(), bound, recipe, 1, 8)


@pytest.mark.slow
def test_a_command_lets_whole_layers_speak(
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
