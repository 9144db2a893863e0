"""The small models: language, scores, outliers, training, and the trainable layout."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import pytest
import torch

from degarble.harness.formats.weight import Weight
from degarble.harness.model.parameters import parameters
from degarble.harness.model.types import Kind
from degarble.references.binding import BoundModel
from degarble.references.model import ModelV4, ModelV32, Sequence
from degarble.references.numerics import Numerics
from degarble.references.tiny import figures, language, train
from degarble.references.tiny.configs import TINY_V4, TINY_V32
from degarble.references.tiny.language import Mixture, document, is_sentence, sentence
from degarble.references.tiny.outliers import readers_of, with_outliers
from degarble.references.tiny.trainable import Ablation, Trainable, TrainableV4, TrainableV32
from degarble.references.tiny.training import KINDS, Batches, Optimiser, example, orthogonal
from degarble.references.weights import random_weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from degarble.harness.model.config.config import Config


# --------------------------------------------------------------------------------------------------
# The small language: every drawn sentence parses, spoilt ones do not, answers are right.


def test_drawn_sentences_parse(seed: int) -> None:
    rng = random.Random(seed)
    drawn = [sentence(rng) for _ in range(500)]
    assert all(is_sentence(text) for text in drawn)
    assert len(set(drawn)) > 450


@pytest.mark.parametrize(
    "spoilt",
    [
        "the fox see a tree .",
        "the foxes sees a tree .",
        "a owl sees the tree .",
        "an fox sees the tree .",
        "these fox see the tree .",
        "yesterday the fox sees the tree .",
        "the fox saw the tree .",
        "the fox sees the .",
        "the fox sees the tree",
        "the fox sees the tree and .",
        "the quickly fox sees the tree .",
        "fox the sees the tree .",
        ".",
        "",
    ],
)
def test_what_the_grammar_forbids_does_not_parse(spoilt: str) -> None:
    assert is_sentence("the fox sees an old tree near the river .")
    assert not is_sentence(spoilt)


def test_a_document_is_a_function_of_its_seed(seed: int) -> None:
    assert document(seed) == document(seed)
    assert document(seed).ids != document(seed + 1).ids


def test_answers_stand_where_probes_say_and_follow_from_the_text(seed: int) -> None:
    made = document(seed, Mixture(length=1500))
    text = [language.WORDS[number] for number in made.ids]
    kinds = {probe.kind for probe in made.probes}
    assert kinds == {"recall", "sum", "copy"}
    for probe in made.probes:
        assert made.ids[probe.position] == probe.answer
        at = probe.position
        if probe.kind == "recall":
            mention = at - probe.distance
            assert text[at - 2 : at + 1] == text[mention - 2 : mention + 1]
            assert 0 < probe.distance <= 1024
        if probe.kind == "sum":
            first, sign, second = text[at - 4 : at - 1]
            total = int(first) + (1 if sign == "plus" else -1) * int(second)
            assert text[at] == str(total)
    # One document in six asks nothing that far back.
    drawn = [made, *(document(seed + n, Mixture(length=1500)) for n in range(1, 12))]
    assert any(probe.distance > 512 for each in drawn for probe in each.probes)


def test_words_are_512_and_distinct() -> None:
    assert len(set(language.WORDS)) == language.SIZE == 512
    assert language.decode(language.encode("anna paints blue .")) == "anna paints blue ."


# --------------------------------------------------------------------------------------------------
# Judging a small model: an oracle scores full, a guesser does not, and patches take away.


def _oracle(ids: list[int]) -> torch.Tensor:
    logits = torch.zeros(len(ids), language.SIZE)
    logits[torch.arange(len(ids) - 1), torch.tensor(ids[1:])] = 30.0
    return logits


def test_an_oracle_scores_full(seed: int) -> None:
    score = figures.score([document(seed), document(seed + 1)], _oracle)
    for kind in (figures.NEAR, *figures.FAR, "sum", "copy"):
        assert score.asked[kind] > 0, kind
        assert score.share(kind) == 1.0
    assert score.perplexity < 1.001


def test_a_guesser_does_not(seed: int) -> None:
    score = figures.score([document(seed)], lambda ids: torch.zeros(len(ids), language.SIZE))
    assert score.share(*figures.FAR, "sum", "copy") < 0.05
    assert score.perplexity == pytest.approx(language.SIZE)


def test_chance_is_one_of_the_words_that_a_relation_takes(seed: int) -> None:
    probes = [probe for probe in document(seed).probes if probe.kind == "recall"]
    counts = {figures.possible(probe) for probe in probes}
    assert counts <= {12, 16}
    score = figures.score([document(seed)], _oracle)
    kinds = (figures.NEAR, *figures.FAR)
    expected = sum(1 / figures.possible(probe) for probe in probes) / len(probes)
    assert score.chance(*kinds) == pytest.approx(expected)
    assert 1 / 16 <= score.chance(*figures.FAR) <= 1 / 12


def test_few_questions_leave_a_share_open() -> None:
    score = figures.ProbeScore(Counter(sum=164), Counter(sum=17))
    assert score.interval("sum") == pytest.approx((0.0658, 0.1599), abs=1e-3)
    many = figures.ProbeScore(Counter(sum=1640), Counter(sum=170))
    assert many.interval("sum") == pytest.approx((0.0899, 0.1193), abs=1e-3)
    assert figures.ProbeScore().interval("sum") == (0.0, 1.0)


def test_a_kind_without_answers_has_no_share() -> None:
    assert math.isnan(figures.ProbeScore().share("sum"))


def test_only_sentences_are_judged_as_sentences() -> None:
    text = "the fox sees a tree . anna paints blue . recall : anna paints blue . copy : red , red ."
    text += " 3 plus 4 is 7 . the foxes sees a tree . anna the sees . many fox"
    assert figures.sentences_in(text) == [
        "the fox sees a tree .",
        "the foxes sees a tree .",
        "anna the sees .",
    ]
    assert figures.grammatical([text, "a owl sees the fox ."]) == (1, 4)


@pytest.mark.parametrize("family", ["v4", "v32"])
def test_ablations_change_far_tokens_and_no_near_ones(family: str, seed: int) -> None:
    config = TINY_V4 if family == "v4" else TINY_V32
    weights = random_weights(config, seed % 1000, torch.float32)
    ids = torch.randint(0, language.SIZE, (256,), generator=torch.Generator().manual_seed(seed))

    def logits(patch: str) -> torch.Tensor:
        bound = BoundModel(config, Numerics.definition(torch.float32), weights)
        if patch == "window":
            figures.window_only(bound)
        elif patch == "chance":
            figures.random_choice(bound, 1)
        model = ModelV4(bound, config) if family == "v4" else ModelV32(bound, config)  # type: ignore[arg-type]
        with torch.inference_mode():
            return model.forward([Sequence()], [ids])

    plain = logits("")
    for patch in ("window", "chance"):
        changed = (logits(patch) - plain).abs().amax(-1)
        assert changed[-1] > 1e-3, patch
        # The first entry is complete behind token 3; V3.2 has all tokens of the window.
        early = 3 if family == "v4" else 60
        assert changed[:early].max() < 1e-5, patch


# --------------------------------------------------------------------------------------------------
# Outliers are large, and change no bit of what a model computes.


def _set(model: Trainable, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, value in weights.items():
            model[name].copy_(value)


@pytest.mark.parametrize("make", [lambda: TrainableV4(TINY_V4), lambda: TrainableV32(TINY_V32)])
def test_the_function_stays(make: Callable[[], Trainable], seed: int) -> None:
    model = make()
    narrow = {
        name: value.to(torch.bfloat16).float() if value.is_floating_point() else value
        for name, value in model.named().items()
    }
    _set(model, narrow)
    ids = torch.randint(0, 512, (1, 128), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        before = model(ids)[0]
        changed = with_outliers(narrow, seed)
        _set(model, changed)
        after = model(ids)[0]
    torch.testing.assert_close(after, before, rtol=0.0, atol=1e-5)
    for name, value in changed.items():
        if value.is_floating_point():
            assert torch.equal(value, value.to(torch.bfloat16).float()), name


def test_outliers_are_large(seed: int) -> None:
    weights = TrainableV4(TINY_V4).named()
    changed = with_outliers(weights, seed)
    for name in (name for name in weights if readers_of(name, weights)):
        ratio = changed[name] / weights[name]
        assert 8.0 <= float(ratio.max()) <= 32.0
        assert 0.01 <= float((ratio > 1).float().mean()) <= 0.05


@pytest.mark.parametrize("config", [TINY_V4, TINY_V32])
def test_every_reader_of_a_norm_is_known(config: Config) -> None:
    """A norm that is rescaled without one of its readers would change the model."""
    named = {p.name: torch.empty(p.shape) for p in parameters(config)}
    width = {"attn_norm": "hidden_size", "ffn_norm": "hidden_size", "q_norm": "q_lora_rank"}
    for p in parameters(config):
        if p.kind is Kind.NORM and p.name.rpartition(".")[2] in width and p.block:
            readers = readers_of(p.name, named)
            assert readers, p.name
            expected = getattr(config, width[p.name.rpartition(".")[2]])
            assert all(named[name].shape[1] == expected for name in readers)


# --------------------------------------------------------------------------------------------------
# Training: pieces make one run, state survives a stop, and a broken loss stops it.


def test_kinds_mark_the_answers(seed: int) -> None:
    ids, kinds = example(seed, Mixture(length=1281))
    assert len(ids) == 1281
    assert len(kinds) == 1280
    assert set(kinds) == set(range(len(KINDS)))


def test_batches_are_functions_of_their_number(seed: int) -> None:
    mixture = Mixture(length=65, facts=2)
    whole = Batches(2, mixture, seed, 0, 1)
    later = Batches(2, mixture, seed, 1, 1)
    try:
        first, second, again = whole(0), whole(1), later(1)
    finally:
        whole.pool.shutdown(cancel_futures=True)
        later.pool.shutdown(cancel_futures=True)
    assert first[0].shape == (2, 65)
    assert first[1].shape == (2, 64)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(second[0], again[0])
    assert torch.equal(second[1], again[1])


def test_the_rate_warms_up_stays_and_falls() -> None:
    rates = [train.rate(step, 1000, 1.0) for step in range(1000)]
    assert rates[0] < 0.01
    assert set(rates[199:600]) == {1.0}
    assert rates[-1] == 0.01
    assert rates[600:] == sorted(rates[600:], reverse=True)


def test_orthogonal_matrices_have_singular_values_near_one(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for shape in ((3, 24, 60), (2, 60, 24)):
        made = orthogonal(torch.randn(shape, generator=generator)).float()
        values = torch.linalg.svdvals(made)
        assert made.shape == shape
        assert values.min() > 0.3
        assert values.max() < 1.4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v4", "v32"])
def test_training_lowers_the_loss_and_state_round_trips(name: str, tmp_path: Path) -> None:
    model = train.model_named(name, 0)
    optimiser = Optimiser(model.weights)
    trainer = train.Trainer(model, optimiser, graphs=False)
    trainer.switch(Ablation(dense_entries=True))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 512, (1, 129), generator=generator)
    kinds = torch.randint(0, len(KINDS), (1, 128), generator=generator)
    seen = []
    for _ in range(4):
        optimiser.set_rate(2e-3)
        seen.append(float(trainer(ids, kinds)[0]))
    assert seen[-1] < seen[0] - 0.3
    train.save(tmp_path, model, optimiser, 4)
    other = train.model_named(name, 1)
    second = Optimiser(other.weights)
    assert train.resume(tmp_path, other, second) == 4
    for key, value in model.named().items():
        assert torch.equal(value, other.named()[key]), key
    state = second.state()
    for kind, kept in optimiser.state().items():
        assert kept
        for key, value in kept.items():
            assert torch.equal(value, state[kind][key]), key
    resumed = train.Trainer(other, second, graphs=False)
    for each, through in ((trainer, optimiser), (resumed, second)):
        each.switch(Ablation(dense_entries=True))
        through.set_rate(2e-3)
        each(ids, kinds)
    for key, value in model.named().items():
        assert torch.equal(value, other.named()[key]), key  # the step that would have come


def test_a_loss_that_is_no_number_stops_the_run() -> None:
    with pytest.raises(SystemExit, match="step 3"):
        train.report(3, 1.0, [float("nan")] * 8)


# --------------------------------------------------------------------------------------------------
# The training layout computes what the components compute, and every parameter learns.

if TYPE_CHECKING:
    Make = Callable[[int], tuple[Trainable, torch.Tensor]]
M = TypeVar("M", bound=Trainable)

SMALL = replace(
    TINY_V4,
    vocab_size=40,
    hidden_size=48,
    num_attention_heads=4,
    head_dim=32,
    qk_rope_head_dim=8,
    q_lora_rank=24,
    o_groups=2,
    o_lora_rank=16,
    sliding_window=128,
    index_n_heads=4,
    index_head_dim=16,
    index_topk=6,
    moe_intermediate_size=32,
)
SMALL_V32 = replace(
    TINY_V32,
    vocab_size=40,
    hidden_size=48,
    q_lora_rank=24,
    kv_lora_rank=64,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=24,
    index_head_dim=16,
    index_topk=40,
    intermediate_size=32,
    moe_intermediate_size=32,
)
TOKENS = 256


def _moved(model: M, seed: int) -> tuple[M, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.weights.values():
            if weight.requires_grad:
                weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    return model, torch.randint(0, 40, (2, TOKENS), generator=generator)


def _model(seed: int) -> tuple[TrainableV4, torch.Tensor]:
    return _moved(TrainableV4(SMALL, seed % 1000), seed)


def _v32(seed: int) -> tuple[TrainableV32, torch.Tensor]:
    return _moved(TrainableV32(SMALL_V32, seed % 1000), seed)


def _reference(model: Trainable, ids: torch.Tensor) -> torch.Tensor:
    numerics = Numerics.definition(torch.float32, indexer_hadamard=False)
    weights = {name: Weight(value=value) for name, value in model.named().items()}
    if isinstance(model, TrainableV32):
        bound = BoundModel(SMALL_V32, numerics, weights)
        return ModelV32(bound, SMALL_V32).forward([Sequence()], [ids])
    bound = BoundModel(SMALL, numerics, weights)
    return ModelV4(bound, SMALL).forward([Sequence()], [ids])


def _share_of_equal_tokens(model: Trainable, ids: torch.Tensor) -> float:
    with torch.no_grad():
        difference = (model(ids[None])[0][0] - _reference(model, ids)).abs().amax(-1)
    return float((difference < 1e-3).float().mean())


def test_training_and_reference_agree(seed: int) -> None:
    model, ids = _model(seed)
    # A near-tie of the indexer may be decided otherwise; it changes what follows it, so most
    # tokens, not all, have to agree. Without any they agree to the last one.
    model.ablation = Ablation()
    assert _share_of_equal_tokens(model, ids[0, :TOKENS]) > 0.9


def test_training_and_reference_agree_for_v32(seed: int) -> None:
    assert _share_of_equal_tokens(*_first(_v32(seed))) > 0.9


def _first(made: tuple[TrainableV32, torch.Tensor]) -> tuple[TrainableV32, torch.Tensor]:
    return made[0], made[1][0]


@pytest.mark.parametrize("ablation", [Ablation(window_only=True), Ablation(random_indexer=True)])
def test_an_ablated_model_does_not_agree(seed: int, ablation: Ablation) -> None:
    model, ids = _model(seed)
    model.ablation = ablation
    assert _share_of_equal_tokens(model, ids[0, :TOKENS]) < 0.9
    other, ids = _v32(seed)
    other.ablation = ablation
    assert _share_of_equal_tokens(other, ids[0, :TOKENS]) < 0.9


@pytest.mark.parametrize("make", [_model, _v32])
def test_every_trained_parameter_gets_a_finite_gradient(make: Make, seed: int) -> None:
    model, ids = make(seed)
    logits, extra = model(ids)
    (logits.logsumexp(-1).mean() - logits[..., 0].mean() + extra).backward()
    for name, weight in model.weights.named_parameters():
        if weight.requires_grad:
            assert weight.grad is not None, name
            assert torch.isfinite(weight.grad).all(), name
            assert weight.grad.abs().max() > 0, name


@pytest.mark.parametrize("make", [_model, _v32])
def test_the_indexer_learns_from_its_own_loss_alone(make: Make, seed: int) -> None:
    model, ids = make(seed)
    model(ids)[1].backward()
    moved = {
        name
        for name, weight in model.weights.named_parameters()
        if weight.grad is not None and weight.grad.abs().max() > 0
    }
    assert moved
    assert all("__indexer__" in name for name in moved)
