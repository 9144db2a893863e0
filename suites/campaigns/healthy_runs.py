"""Healthy runs of all conventions and pairs raise no alarm; with `--plants` no fault is lost.

`python -m degarble.suites.campaigns.healthy_runs --count N --jobs J --seed S --out DIR` draws by
seed: family, recipe, conventions, what is declared; every sixth case is a plain torch model whose
linears hold decoded weights. `--pairs` walks through all values and pairs with nothing declared
that can be learned: by default once with each recipe. `--plants` puts one fault of the museum into
a drawn run and compares what is found with every convention declared and with none; each case holds
a fault that is found where all is declared, for faults are drawn until one is.
"""

from __future__ import annotations

import random
import sys
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness import api
from degarble.harness.base.errors import CANNOT_RUN
from degarble.harness.engine.conventions.registry import CONTRADICTED, DECLARED, REGISTRY
from degarble.harness.engine.faults.model_faults import ComponentContext, Reach
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.engine.localise.recorded_run import by_component, same_bits
from degarble.harness.model.components import component_named
from degarble.harness.model.recipes import recipe_named
from degarble.harness.report.verdict import Verdict
from degarble.suites.campaigns.runner import CaseResult, arguments, run_campaign
from degarble.suites.engine.conventions.convention_cases import (
    CONFIGS,
    RECIPES,
    RunCase,
    choices,
    combined,
    model,
)
from degarble.suites.engine.diagnose.judge.decoder_toy import FAULTS, PLACE, toy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import FaultVariant, ModelFault
    from degarble.harness.engine.localise.localise import Localised
    from degarble.harness.engine.localise.recorded_run import InMemoryRun

JOINT = sum(len(combined(config)) for config in CONFIGS)  # single values and pairs
_PLAIN = 6  # every so manieth case is a plain model
_WAYS = 40  # ways that are drawn at most until one is found where all is declared


def healthy(seed: int) -> CaseResult:
    """Judge one healthy run; an alarm, or a convention that it does not follow, is a failure."""
    try:
        return _plain(seed, "") if seed % _PLAIN == _PLAIN - 1 else _judged(RunCase.of(seed))
    except Exception:  # noqa: BLE001  whatever stops is a failing case
        return CaseResult(seed, "stopped", "stopped", traceback.format_exc(limit=-4))


def joint(number: int) -> CaseResult:
    """Judge one healthy run of a single value or a pair, where only what must be is declared."""
    try:
        return _judged(RunCase.joint(number))
    except Exception:  # noqa: BLE001  whatever stops is a failing case
        return CaseResult(number, "stopped", "stopped", traceback.format_exc(limit=-4))


def _judged(case: RunCase) -> CaseResult:
    seed, found = case.seed, case.judged(case.run())
    kind = f"{case.config.family}, {len(case.switches)} conventions"
    if found.verdict is not Verdict.AGREES:
        origins = [f"{origin.component} ({origin.sentence[:80]})" for origin in found.origins[:6]]
        undecided = [] if origins else [str(each) for each in found.unjudged[:3]]
        return CaseResult(seed, kind, "alarm", f"{case}: {[*origins, *undecided]}")
    wrong = _mislearned(found, case.switches)
    if wrong:
        return CaseResult(seed, kind, "mislearned", f"{case}: {wrong}")
    return CaseResult(seed, kind, "ok", str(case))


def _mislearned(found: Localised, follows: Any) -> list[str]:
    return [
        convention.sentence
        for convention in found.conventions
        if convention.source != DECLARED
        and (convention.source == CONTRADICTED or follows.get(convention.name) != convention.value)
    ]


def _plain(seed: int, fault: str) -> CaseResult:
    """A torch model in float32 or BF16 whose linears hold what a loader decoded."""
    chance = random.Random(seed)
    made = toy(layers=9, width=128, wide=256, tokens=chance.choice((7, 48, 130)))
    dtype = chance.choice((torch.float32, torch.bfloat16))
    kind = f"plain model in {str(dtype).removeprefix('torch.')}"
    if fault:
        made.put(PLACE, FAULTS[fault][0](made.weights[PLACE]))
        kind += f", {fault}"
    found = api.check(api.capture(made.model.to(dtype), made.tokens), api.Twin(made.weights))
    blamed = [trouble.component for trouble in found.discrepancies]
    named = [trouble.cause.fault for trouble in found.discrepancies if trouble.cause is not None]
    if blamed != ([PLACE] if fault else []):
        return CaseResult(seed, kind, "lost" if fault else "alarm", str(found)[:600])
    if fault and named != [FAULTS[fault][1]]:
        return CaseResult(seed, kind, "misnamed", f"{named}")
    learned = {convention.name for convention in found.conventions}
    if learned != ({"decoded_operands"} if dtype is torch.bfloat16 else set()):
        return CaseResult(seed, kind, "mislearned", f"{learned}")
    return CaseResult(seed, kind, "ok")


def planted(seed: int) -> CaseResult:
    """Plant a fault under a convention; it must be found as surely as with all declared."""
    try:
        if seed % _PLAIN == _PLAIN - 1:
            return _plain(seed, list(FAULTS)[seed // _PLAIN % len(FAULTS)])
        return _planted(seed)
    except Exception:  # noqa: BLE001  whatever stops is a failing case
        return CaseResult(seed, "stopped", "stopped", traceback.format_exc(limit=-4))


def _planted(seed: int) -> CaseResult:
    case = RunCase.of(seed)
    kind = f"{case.config.family}, {len(case.switches)} conventions"
    follows = {convention.name: _value(case, convention) for convention, _ in choices(case.config)}
    drawn = 0
    for name, fault, variant in _drawn(case):
        drawn += 1
        candidate = case.candidate()
        candidate.calls[name] = variant.apply(candidate.calls[name])
        try:
            run = case.run(candidate)
        except CANNOT_RUN:
            continue  # a fault that stops the run is none that judging could lose
        want = {origin.component for origin in case.judged(run, follows).origins}
        if name in want:
            said = f"{case}: {fault.id} ({variant.words}) at {name}"
            return _compared(CaseResult(seed, kind, "ok", said), want, case, run)
    return CaseResult(seed, kind, "not planted", f"{case}: none of {drawn} faults is found")


def _compared(planted: CaseResult, want: set[str], case: RunCase, run: InMemoryRun) -> CaseResult:
    """Judge without what can be learned, and compare with what is found where all is declared."""
    found = case.judged(run)
    got = {origin.component for origin in found.origins}
    learned = [convention.sentence for convention in found.conventions]
    outcome = ""
    if want - got:
        outcome = f"lost: {sorted(want - got)[:6]}"
    elif got - want:
        outcome = f"blamed elsewhere: {sorted(got - want)[:6]}"
    elif _mislearned(found, case.switches):
        outcome = "mislearned"
    if not outcome:
        return planted
    name, _, which = outcome.partition(": ")
    return replace(planted, outcome=name, detail=f"{planted.detail}: {which} {learned}")


def _value(case: RunCase, convention: Any) -> Any:
    if convention.name in case.switches:
        return case.switches[convention.name]
    return convention.assumed(model(case.config, torch.float64, {}).numerics, case.config.family)


def _drawn(case: RunCase) -> Iterator[tuple[str, ModelFault, FaultVariant]]:
    """Draw faults that change what a component of the run puts out.

    The component is mostly one that a convention of the case concerns. Ways are those of a
    candidate without orders of sums around its calls, for a way may need the call's own facts.
    """
    chance = random.Random(case.seed + 3)
    recipe = recipe_named(case.recipe, case.config)
    bound = model(case.config, torch.float32, case.switches, case.recipe)
    healthy_run = case.run(bound)
    calls = by_component(healthy_run)
    roles = {role for name in case.switches for role in REGISTRY[name].roles}
    concerned = [name for name in calls if bound.bound_to(name)[0].role in roles]
    faults = [
        model_fault for model_fault in MODEL_FAULTS.values() if model_fault.reach is not Reach.EDGE
    ]
    drawn = 0
    while drawn < _WAYS:
        names = concerned if concerned and chance.random() < 0.7 else list(calls)
        name, fault = chance.choice(names), chance.choice(faults)
        context = ComponentContext(bound, component_named(case.config, name, recipe), recipe)
        variants = (
            [w for w in fault.variants(context) if not w.companions]
            if fault.applies_to(context)
            else []
        )
        if variants:
            drawn += 1
            variant = chance.choice(variants)
            if _acts(variant, context, [healthy_run.inputs(call) for call in calls[name]]):
                yield name, fault, variant


def _acts(
    variant: FaultVariant, context: ComponentContext, given: list[Mapping[str, Tensor]]
) -> bool:
    """Whether a way changes an output on what the healthy run gave to the component."""
    faulty = variant.apply(context.call)
    with torch.inference_mode():
        for inputs in given:
            try:
                made, own = faulty(inputs, context.weights), context.call(inputs, context.weights)
            except CANNOT_RUN:
                return False
            if any(not same_bits(made[name], own[name]) for name in own):
                return True
    return False


def main() -> int:
    """Run the campaign; the exit status is 1 where a healthy run alarms or a fault is lost."""
    parser = arguments(__doc__ or "", count=0)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--pairs", action="store_true", help="walk through all values and pairs")
    which.add_argument("--plants", action="store_true", help="plant faults")
    asked = parser.parse_args()
    name, count = "healthy_runs", 300
    case: Callable[[int], CaseResult] = healthy
    if asked.pairs:
        name, case, count = "healthy_pairs", joint, len(RECIPES) * JOINT
    elif asked.plants:
        name, case, count = "planted_runs", planted, 180
    asked.count = asked.count or count
    return run_campaign(name, case, asked)


if __name__ == "__main__":
    sys.exit(main())
