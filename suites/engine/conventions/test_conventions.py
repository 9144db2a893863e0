"""Conventions are declared or learned; healthy runs of each agree, and faults stay findings."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.backends.cutedsl.backend import CONVENTIONS
from degarble.harness.base.errors import DegarbleError
from degarble.harness.engine.conventions.learned import ConventionEvidence, ConventionFit, learn
from degarble.harness.engine.conventions.registry import (
    CONTRADICTED,
    DECLARED,
    LEARNED,
    REGISTRY,
    conventions_in,
    read_options,
    stored_conventions,
)
from degarble.harness.engine.localise.localise import localise
from degarble.harness.engine.localise.recorded_run import InMemoryRun
from degarble.harness.engine.localise.replay import TwinComponents
from degarble.harness.model.recipes import recipe_named
from degarble.harness.report.verdict import Verdict
from degarble.references.numerics import DecodedOperands, HeadNorm, Numerics, Switches
from degarble.suites.campaigns.healthy_runs import JOINT, healthy, joint, planted
from degarble.suites.engine import legal_attention
from degarble.suites.engine.conventions.convention_cases import V4, V32, choices, model
from degarble.suites.engine.localise_cases import PROMPTS, scaled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from degarble.harness.engine.conventions.registry import Convention
    from degarble.harness.engine.localise.localise import Localised
    from degarble.harness.model.config.config import Config


# --------------------------------------------------------------------------------------------------
# Conventions that are declared: read as switches of the references, or refused by name.


def test_what_a_manifest_says_is_what_the_kernels_follow() -> None:
    found = conventions_in({"conventions": stored_conventions(CONVENTIONS)})
    assert found == dict(CONVENTIONS)
    assert found["head_norm"] is HeadNorm.ONCE
    assert Numerics.twin().with_switches(**found).switches.head_norm is HeadNorm.ONCE
    assert conventions_in({}) == {}


def test_the_registry_and_the_switches_of_the_references_are_the_same() -> None:
    assert set(REGISTRY) == {field.name for field in fields(Switches)}
    for name, convention in REGISTRY.items():
        default = getattr(Switches(), name)
        assert default is None or not convention.values or default in convention.values
        assert convention.by_family or default is not None or not convention.values
        for value, words in convention.values.items():
            assert convention.read(value, "here") is value
            assert read_options([f"{name}={str(value).lower()}"])[name] is value
            assert words in convention.words(value)


def table() -> str:
    """Return the table of docs/checking.md."""
    lines = []
    for name, convention in REGISTRY.items():
        values = "; ".join(f"`{str(v).lower()}`: {words}" for v, words in convention.values.items())
        roles = ", ".join(f"`{role}`" for role in sorted(convention.roles))
        learned = "yes" if convention.learned else "no"
        lines.append(
            f"| `{name}` | {convention.subject}: {values or 'a number'} | {learned} | {roles} |"
        )
    return "\n".join(lines) + "\n"


def test_the_page_lists_every_convention() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "checking.md"
    assert table() in page.read_text(encoding="utf-8"), table()


@pytest.mark.parametrize(
    "stated",
    [
        {"head_nrm": "once"}, {"head_norm": "twice"}, {"head_norm": 1}, {"routing_epsilon": "0"},
        {"routing_epsilon": -1.0}, {"indexer_hadamard": 1}, {"indexer_hadamard": "true"}, [],
    ],
    ids=str,
)  # fmt: skip
def test_what_the_references_do_not_have_is_refused(stated: Any) -> None:
    with pytest.raises(DegarbleError, match="of the capture"):
        conventions_in({"conventions": stated})


@pytest.mark.parametrize("word", ["head_norm", "head_nrm=once", "head_norm=twice", "kv_cache="])
def test_an_option_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(DegarbleError, match="--convention"):
        read_options([word])


def test_an_older_capture_states_head_weights_with_the_scores() -> None:
    found = conventions_in({"conventions": {"indexer_in_storage_dtype": False}})
    assert found["indexer_weights_in_storage_dtype"] is False


# --------------------------------------------------------------------------------------------------
# Healthy runs of every convention agree and the report says which it is; faults stay findings.


def judged(
    config: Config, run: InMemoryRun, declared: Mapping[str, Any] | None = None
) -> Localised:
    twin = model(config, torch.float64, declared or {})
    twin.declared = declared or {}
    return localise(twin, recipe_named("nvfp4-full", config), run)


def run_by(
    config: Config,
    switches: Mapping[str, Any],
    faults: Mapping[str, Callable[..., Any]] | None = None,
) -> InMemoryRun:
    candidate = model(config, torch.float32, switches)
    for name, way in (faults or {}).items():
        candidate.calls[name] = way(candidate.calls[name])
    return InMemoryRun.from_prompts(candidate, PROMPTS, 3)


QUICK = {"attention_in_storage_dtype", "residual_rounded_before_norm"}
CASES = [
    pytest.param(
        config, convention, value, id=f"{config.family}-{convention.name}-{value}",
        marks=() if config is V32 and convention.name in QUICK else pytest.mark.slow,
    )
    for config in (V4, V32)
    for convention, value in choices(config)
    if convention.learned
]  # fmt: skip


@pytest.mark.parametrize(("config", "convention", "value"), CASES)
def test_a_healthy_run_of_another_convention_agrees_and_says_so(
    config: Config, convention: Convention, value: Any
) -> None:
    run = run_by(config, {convention.name: value})
    found = judged(config, run)
    assert found.verdict is Verdict.AGREES, [origin.sentence for origin in found.origins]
    assert {convention_used.source for convention_used in found.conventions} <= {LEARNED}
    assert {
        convention_used.name: convention_used.value for convention_used in found.conventions
    } in ({}, {convention.name: value})
    assert max(row.ratio for row in found.rows) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("number", range(JOINT))
def test_every_pair_of_conventions_is_learned(number: int) -> None:
    result = joint(number)
    assert result.outcome == "ok", result.detail


@pytest.mark.slow
@pytest.mark.parametrize("number", range(30))
def test_a_fault_under_conventions_is_found_as_if_they_were_declared(number: int) -> None:
    for result in (healthy(7 * number), planted(7 * number)):
        assert result.outcome == "ok", result.detail


def test_a_learned_convention_is_reported_with_its_words_and_its_witnesses() -> None:
    found = judged(V32, run_by(V32, {"attention_in_storage_dtype": False}))
    (used,) = found.conventions
    assert (used.source, used.value, used.components) == (LEARNED, False, 3)
    assert used.sentence == (
        "attention's logits and normalised probabilities: kept in float32 "
        "(attention_in_storage_dtype: false, learned: 3 components show it)"
    )
    assert used.document()["source"] == "learned"


def test_a_declared_convention_is_judged_and_one_that_the_numbers_contradict_is_a_finding() -> None:
    run = run_by(V32, {"attention_in_storage_dtype": False})
    found = judged(V32, run, {"attention_in_storage_dtype": False})
    assert found.verdict is Verdict.AGREES
    assert [convention.source for convention in found.conventions] == [DECLARED]
    found = judged(V32, run, {"attention_in_storage_dtype": True})
    assert found.verdict is Verdict.DIFFERS
    (used,) = found.conventions
    assert (used.source, used.fits) == (CONTRADICTED, False)
    assert "fit false" in used.sentence


def test_a_fault_under_another_convention_is_the_only_origin() -> None:
    name = "layers.1.attn.q_norm"
    run = run_by(V32, {"attention_in_storage_dtype": False}, {name: scaled("out", 1.03)})
    found = judged(V32, run)
    assert [origin.component for origin in found.origins] == [name]
    name = "layers.1.attn.attend"
    run = run_by(V32, {"attention_in_storage_dtype": False}, {name: scaled("out", 1.25)})
    found = judged(V32, run)
    assert [origin.component for origin in found.origins] == [name]
    assert [convention.source for convention in found.conventions] == [LEARNED]


@pytest.mark.slow
def test_a_gain_everywhere_is_no_convention() -> None:
    names = [f"layers.{number}.attn.attend" for number in range(3)]
    for gain in (1.003, 1.02, 1.1):
        found = judged(V32, run_by(V32, {}, dict.fromkeys(names, scaled("out", gain))))
        assert not found.conventions
        assert {origin.component for origin in found.origins} == set(names)


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(kernel, id=kernel.name, marks=() if number == 1 else pytest.mark.slow)
        for number, kernel in enumerate(legal_attention.KERNELS)
    ],
)
def test_every_fused_kernel_of_attention_keeps_logits_in_float32(
    kernel: legal_attention.Kernel,
) -> None:
    twin = model(V32, torch.float32, {})
    names = [f"layers.{number}.attn.attend" for number in range(3)]
    made = {name: legal_attention.run_packed_v32(twin, name, kernel) for name in names}
    run = run_by(V32, {}, {name: (lambda _call, own=call: own) for name, call in made.items()})
    found = judged(V32, run)
    assert found.verdict is Verdict.AGREES
    (used,) = found.conventions
    assert (used.name, used.value) == ("attention_in_storage_dtype", False)
    assert used.source == LEARNED


def test_one_component_that_departs_from_the_rest_is_a_finding() -> None:
    other = model(V32, torch.float32, {"attention_in_storage_dtype": False})
    name = "layers.1.attn.attend"
    found = judged(V32, run_by(V32, {}, {name: lambda _call: other.calls[name]}))
    assert [origin.component for origin in found.origins] == [name]
    assert not found.conventions


# Any convention of two values that asks to be clearly nearer, which attention's does not.
A = replace(REGISTRY["pooling_in_storage_dtype"], roles=frozenset({"attn.attend"}))
ROLES = {f"layers.{number}.attn.attend": "attn.attend" for number in range(4)}


def _evidence(
    by_layer: list[tuple[ConventionFit, ConventionFit]], **more: Any
) -> ConventionEvidence:
    def fit(name: str, values: Mapping[str, Any]) -> ConventionFit:
        return by_layer[int(name.split(".")[1])][bool(values)]

    return ConventionEvidence(ROLES, fit, {A.name: True}, **more)


FITS, WRONG = ConventionFit(True, False, 0.0), ConventionFit(False, True, 9.0)
NEAR, FAR = ConventionFit(True, False, 1.0), ConventionFit(True, False, 9.0)


@pytest.mark.parametrize(
    ("layers", "learned"),
    [
        ([(WRONG, FITS)] * 4, 4),
        ([(WRONG, FITS)] * 3 + [(WRONG, WRONG)], 3),  # one is sick
        ([(WRONG, FITS)] * 3 + [(FITS, FITS)], 3),  # one says nothing
        ([(WRONG, FITS)] + [(FAR, NEAR)] * 3, 4),  # they lean to it
        ([(WRONG, FITS)] * 3 + [(NEAR, FAR)], 3),  # one leans to the official value
        ([(WRONG, FITS)] * 3 + [(FITS, WRONG)], 3),  # one contradicts it
        ([(WRONG, FITS)] * 2 + [(FITS, WRONG)] * 2, 0),  # as many contradict it
        ([(WRONG, FITS)] * 2 + [(NEAR, FAR)] * 2, 0),  # as many lean to the official value
        ([(WRONG, FITS)] + [(FITS, FITS)] * 3, 0),  # one alone is a finding
        ([(WRONG, FITS)] * 2 + [(WRONG, WRONG)] * 2, 2),  # the sick are no evidence
        ([(WRONG, FITS)] + [(WRONG, WRONG)] * 3, 0),  # one is none either
        ([(WRONG, WRONG)] * 4, 0),
        ([(FITS, FITS)] * 4, 0),
        ([(WRONG, ConventionFit(False, False, 0.0))] * 4, 0),  # undecided explains nothing
        ([(WRONG, ConventionFit(True, False, 8.0))] * 4, 0),  # a wider budget is no explanation
    ],
)
def test_what_is_learned_from_which_witnesses(layers: list[Any], learned: int) -> None:
    conventions = learn([A], _evidence(layers))
    assert [len(convention.witnesses) for convention in conventions] == (
        [learned] if learned else []
    )


def _three_experts(shown: int, fits: ConventionFit) -> list[Any]:
    """Learn from three experts, of which two are sick; `shown` norms store every result."""
    roles = {f"norm{n}": "traced.norm" for n in range(shown)}
    roles |= {f"experts{n}": "traced.experts" for n in range(3)}

    def fit(name: str, values: Mapping[str, Any]) -> ConventionFit:
        if name in {"experts1", "experts2"}:
            return WRONG
        asked = {"operations_stored"} if name.startswith("norm") else {
            "expert_operations_stored", "expert_sums_stored"
        }  # fmt: skip
        return fits if all(values.get(each) is True for each in asked) else WRONG

    names = ("operations_stored", "expert_operations_stored", "expert_sums_stored")
    group = [REGISTRY[name] for name in names]
    evidence = ConventionEvidence(roles, fit, dict.fromkeys(names, False))
    return [(each.name, len(each.witnesses)) for each in learn(group, evidence)]


def test_one_witness_suffices_where_the_run_shows_the_habit_elsewhere() -> None:
    assert _three_experts(2, NEAR) == [
        ("operations_stored", 2), ("expert_operations_stored", 1), ("expert_sums_stored", 1)
    ]  # fmt: skip
    assert _three_experts(0, NEAR) == []


def test_experts_whose_codes_step_show_their_habits_by_how_few_outputs_differ() -> None:
    """One code that steps in a row is most of a distance, whichever way the rest was rounded."""
    names = ("decoded_operands", "expert_operations_stored", "expert_sums_stored")
    true = dict(zip(names, (DecodedOperands.BOTH, True, True), strict=True))
    left = {0: (9.0, 0.8), 1: (4.0, 0.6), 2: (1.5, 0.4), 3: (1.3, 0.04)}  # by how many are right

    def fit(name: str, values: Mapping[str, Any]) -> ConventionFit:
        asked = names[:1] if name.startswith("linear") else names
        right = 0
        while right < len(asked) and values.get(asked[right]) == true[asked[right]]:
            right += 1
        if name.startswith("linear"):
            return FITS if right else WRONG
        return ConventionFit(right == 3, right < 3, *left[right])

    roles = {f"linear{n}": "traced.linear" for n in range(2)}
    roles |= {f"experts{n}": "traced.experts" for n in range(2)}
    assumed = {names[0]: DecodedOperands.EXACT, names[1]: False, names[2]: False}
    evidence = ConventionEvidence(roles, fit, assumed)
    found = learn([REGISTRY[name] for name in names], evidence)
    assert {each.name: each.value for each in found} == true


@pytest.mark.parametrize(("distance", "learned"), [(0.0, 1), (0.08, 1), (0.1, 0)])
def test_a_habit_needs_no_second_witness_that_is_a_hundred_times_nearer(
    distance: float, learned: int
) -> None:
    """Such as the sum of three embeddings, where a model stores nothing else on the way."""

    def fit(_name: str, values: Mapping[str, Any]) -> ConventionFit:
        return ConventionFit(True, False, distance) if values else WRONG

    habit = REGISTRY["operations_stored"]
    evidence = ConventionEvidence({"sum": "traced.stretch"}, fit, {habit.name: False})
    assert len(learn([habit], evidence)) == learned


def test_the_nearest_of_many_differing_components_are_asked_first() -> None:
    """The first five components are sick, and fewer than that are examined."""
    sick = (ConventionFit(False, True, 1e4), ConventionFit(False, True, 1e4))
    roles = {f"layers.{number}.attn.attend": "attn.attend" for number in range(8)}

    def fit(name: str, values: Mapping[str, Any]) -> ConventionFit:
        layer = int(name.split(".")[1])
        return (sick if layer < 5 else (WRONG, FITS))[bool(values)]

    (found,) = learn([A], ConventionEvidence(roles, fit, {A.name: True}))
    assert len(found.witnesses) == 3


@pytest.mark.parametrize("gap", [None, FITS, replace(WRONG, differs=False)])
def test_no_budget_is_derived_where_no_component_is_nearer(gap: ConventionFit | None) -> None:
    asked: list[str] = []

    def fit(name: str, values: Mapping[str, Any]) -> ConventionFit:
        asked.extend([name] if values else [])
        return FITS if values else WRONG

    found = learn([A], ConventionEvidence(ROLES, fit, {A.name: True}, gap=lambda *_: gap))
    near = gap is None or gap is FITS
    assert len(found) == near
    assert bool(asked) == near


@pytest.mark.parametrize("coded", [(), ("layers.3.attn.attend",)])
def test_what_changes_codes_alone_is_not_tried_where_there_are_none(coded: tuple[str, ...]) -> None:
    of_codes = replace(A, of_codes=True)
    evidence = _evidence([(WRONG, FITS)] * 4, is_coded=lambda name: name in coded)
    assert len(learn([of_codes], evidence)) == bool(coded)
    assert len(learn([A], evidence)) == 1


@pytest.mark.parametrize(("name", "coded"), [("nvfp4-full", True), ("bf16", False)])
def test_a_quantised_twin_is_known_as_one(name: str, coded: bool) -> None:
    twin = TwinComponents.from_twin(
        model(V4, torch.float64, {}, name), recipe_named(name, V4)
    )  # fmt: skip
    roles = REGISTRY["decoded_operands"].roles
    linears = [each.name for each in twin.components.values() if each.role in roles]
    assert any(map(twin.is_coded, linears)) == coded


def test_ranks_share_experts_only_where_their_number_allows_it() -> None:
    parts = REGISTRY["expert_width_parts"]
    assert {*parts.among_ranks(8).values} == {1, 2, 4, 8}
    assert {*parts.among_ranks(6).values} == {1, 2, 3, 6}
    assert A.among_ranks(8) is A
    alone, shared = (ConventionEvidence({}, lambda *_: FITS, {}, ranks=n) for n in (1, 2))
    assert not alone.may_show(parts)
    assert shared.may_show(parts)


# Two conventions that share the role of `m`, and roles of their own, `a` and `b`.
P = replace(A, name="p", roles=frozenset("am"), witnesses=1)
Q = replace(A, name="q", roles=frozenset("bm"))
R = replace(A, name="r", roles=frozenset("m"))
TRUE = {"p": True, "q": True}


def _joint(
    fits: Callable[[str, Mapping[str, Any]], bool],
    count: int = 2,
    declared: tuple[str, ...] = (),
    group: Sequence[Convention] = (P, Q, R),
) -> dict[str, tuple[str, ...]]:
    """Learn from `count` components a role; `fits` is asked with role and number, and values."""
    roles = {f"{role}{number}": role for role in "abm" for number in range(count)}
    evidence = ConventionEvidence(
        roles,
        lambda name, values: FITS if fits(name, values) else WRONG,
        dict.fromkeys("pqr", False),
    )
    return {
        convention.name: convention.witnesses for convention in learn(group, evidence, declared)
    }


def _own(name: str, values: Mapping[str, Any]) -> bool:
    return bool(values.get({"a": "p", "b": "q"}[name[0]]))


def test_a_role_that_one_of_two_conventions_leaves_alone_follows_it() -> None:
    """As a compressor's projection that is not quantised does, under decoded operands."""
    found = _joint(lambda name, v: bool(v.get("q")) if name[0] == "m" else _own(name, v))
    assert found == {"p": ("a0", "a1"), "q": ("b0", "b1", "m0", "m1")}


def test_a_role_that_needs_two_conventions_shows_both() -> None:
    found = _joint(lambda name, v: dict(v) == TRUE if name[0] == "m" else _own(name, v))
    assert found == {"p": ("a0", "a1", "m0", "m1"), "q": ("b0", "b1", "m0", "m1")}


def test_what_fits_one_role_by_chance_gives_way_to_what_fits_all() -> None:
    def fits(name: str, v: Mapping[str, Any]) -> bool:
        return dict(v) in (TRUE, {"r": True}) if name[0] == "m" else _own(name, v)

    assert set(_joint(fits)) == {"p", "q"}


def test_what_other_roles_are_against_hides_no_deeper_change() -> None:
    """`r` cures `m` by chance, and `b` is against it; `m` alone shows the two that it follows."""
    group = [replace(R, name="p"), replace(R, name="q"), replace(R, roles=frozenset("bm"))]

    def fits(name: str, v: Mapping[str, Any]) -> bool:
        return dict(v) in (TRUE, {"r": True}) if name[0] == "m" else not v.get("r")

    assert set(_joint(fits, group=group)) == {"p", "q"}


def test_each_convention_of_several_needs_witnesses_of_its_own() -> None:
    """Many components show one; a single one that another would cure is a finding."""

    def fits(name: str, v: Mapping[str, Any]) -> bool:
        if name == "b0":
            return bool(v.get("q"))
        return name[0] == "b" or bool(v.get("p"))

    assert set(_joint(fits)) == {"p"}


def test_one_component_that_another_value_cures_hides_no_convention_of_the_others() -> None:
    def fits(name: str, v: Mapping[str, Any]) -> bool:
        if name == "m0":
            return dict(v) == {"r": True}
        return name[0] == "b" or (bool(v.get("p")) and not v.get("r"))

    assert _joint(fits, 3) == {"p": ("a0", "a1", "a2", "m1", "m2")}


def test_a_declared_convention_gives_way_after_an_open_one() -> None:
    def fits(name: str, v: Mapping[str, Any]) -> bool:
        return name[0] != "m" or len(v) == 1

    assert set(_joint(fits)) == {"p"}
    assert set(_joint(fits, declared=("p",))) == {"q"}


def test_what_was_not_recorded_with_its_tensors_cannot_testify() -> None:
    layers = [(WRONG, FITS)] * 3 + [(FITS, FITS)]
    assert not learn([A], _evidence(layers, unknown=frozenset({"layers.3.attn.attend"})))
