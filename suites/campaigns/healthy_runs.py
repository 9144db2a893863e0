"""Healthy runs of all conventions and pairs raise no alarm; with `--plants` no fault is lost.

`python -m degarble.suites.campaigns.healthy_runs --count N --jobs J --seed S --out DIR` walks with
its seeds through both families, every value of every convention and all pairs of them; every sixth
case is a plain torch model whose linears hold decoded weights. `--plants` puts one fault of the
museum into such a run and compares what is found with every convention declared and with none.
"""

from __future__ import annotations

import random
import sys
import traceback
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness import api
from degarble.harness.anatomy.components import component_named
from degarble.harness.anatomy.recipes import recipe_named
from degarble.harness.engine.conventions import LEARNED, REGISTRY
from degarble.harness.engine.faults.model_faults import Reach, Scene
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.errors import CANNOT_RUN
from degarble.harness.record.verdict import Verdict
from degarble.suites.campaigns.runner import CampaignReport, CaseResult, arguments, run_cases
from degarble.suites.engine.convention_cases import RunCase, choices, model
from degarble.suites.engine.decoder_toy import FAULTS, PLACE, toy

if TYPE_CHECKING:
    from degarble.harness.engine.faults.model_faults import ModelFault, Way
    from degarble.harness.engine.localise import Localised
    from degarble.references.binding import Bound

_PLAIN = 6  # every so manieth case is a plain model
_WAYS = 40  # faults that are drawn until one has a way at the component


def healthy(seed: int) -> CaseResult:
    """Judge one healthy run; an alarm, or a convention that it does not follow, is a failure."""
    try:
        return _plain(seed, "") if seed % _PLAIN == _PLAIN - 1 else _model(seed)
    except Exception:  # noqa: BLE001  whatever stops is a failing case
        return CaseResult(seed, "stopped", "stopped", traceback.format_exc(limit=-4))


def _model(seed: int) -> CaseResult:
    case = RunCase.of(seed)
    found = case.judged(case.run())
    kind = f"{case.config.family}, {len(case.switches)} conventions"
    if found.verdict is not Verdict.AGREES:
        origins = [f"{each.component} ({each.sentence[:80]})" for each in found.origins[:6]]
        undecided = [] if origins else [str(each) for each in found.unjudged[:3]]
        return CaseResult(seed, kind, "alarm", f"{case}: {[*origins, *undecided]}")
    wrong = _mislearned(found, case.switches)
    if wrong:
        return CaseResult(seed, kind, "mislearned", f"{case}: {wrong}")
    return CaseResult(seed, kind, "ok", str(case))


def _mislearned(found: Localised, follows: Any) -> list[str]:
    return [
        each.sentence
        for each in found.conventions
        if each.source == LEARNED and follows.get(each.name) != each.value
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
    blamed = [each.component for each in found.troubles]
    named = [each.cause.fault for each in found.troubles if each.cause is not None]
    if blamed != ([PLACE] if fault else []):
        return CaseResult(seed, kind, "lost" if fault else "alarm", str(found)[:600])
    if fault and named != [FAULTS[fault][1]]:
        return CaseResult(seed, kind, "misnamed", f"{named}")
    learned = {each.name for each in found.conventions}
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
    candidate = case.candidate()
    drawn = _drawn(case, candidate)
    if drawn is None:
        return CaseResult(seed, "no fault fits", "ok", str(case))
    name, fault, way = drawn
    candidate.calls[name] = way.apply(candidate.calls[name])
    try:
        run = case.run(candidate)
    except CANNOT_RUN as error:
        return CaseResult(seed, "the run stops", "ok", f"{case}: {error}")
    follows = {each.name: _value(case, each) for each, _ in choices(case.config)}
    told = case.judged(run, follows)
    found = case.judged(run)
    want, got = ({each.component for each in side.origins} for side in (told, found))
    said = f"{case}: {fault.id} ({way.words}) at {name}"
    kind = f"{case.config.family}, {len(case.switches)} conventions"
    if name not in want:
        return CaseResult(seed, f"{kind}, not found by either", "ok", said)
    if name not in got:
        learned = [each.sentence for each in found.conventions]
        return CaseResult(seed, kind, "lost", f"{said}: {learned}")
    if got - want:
        return CaseResult(seed, kind, "blamed elsewhere", f"{said}: {sorted(got - want)[:6]}")
    return CaseResult(seed, kind, "ok", said)


def _value(case: RunCase, convention: Any) -> Any:
    if convention.name in case.switches:
        return case.switches[convention.name]
    return convention.assumed(model(case.config, torch.float64, {}).numerics, case.config.family)


def _drawn(case: RunCase, candidate: Bound) -> tuple[str, ModelFault, Way] | None:
    """Draw a component, mostly one that a convention of the case concerns, and a fault of it."""
    chance = random.Random(case.seed + 3)
    recipe = recipe_named(case.recipe, case.config)
    roles = {role for name in case.switches for role in REGISTRY[name].roles}
    names = [n for n in candidate.calls if candidate.bound_to(n)[0].role in roles]
    if not names or chance.random() < 0.3:
        names = list(candidate.calls)
    faults = [each for each in MODEL_FAULTS.values() if each.reach is not Reach.EDGE]
    for _ in range(_WAYS):
        name, fault = chance.choice(names), chance.choice(faults)
        scene = Scene(candidate, component_named(case.config, name, recipe), recipe)
        ways = [w for w in fault.ways(scene) if not w.beside] if fault.sits(scene) else []
        if ways:
            return name, fault, chance.choice(ways)
    return None


def main() -> int:
    """Run the campaign; the exit status is 1 where a healthy run alarms or a fault is lost."""
    parser = arguments(__doc__ or "", count=240)
    parser.add_argument("--plants", action="store_true", help="plant faults")
    asked = parser.parse_args()
    seeds = range(asked.seed, asked.seed + asked.count)
    name, case = ("planted_runs", planted) if asked.plants else ("healthy_runs", healthy)
    report: CampaignReport = run_cases(name, case, seeds, asked.jobs)
    report.write(asked.out)
    sys.stdout.write(report.table() + "\n")
    return 1 if report.failures() else 0


if __name__ == "__main__":
    sys.exit(main())
