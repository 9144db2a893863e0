"""Plant every fault of the catalogue with its name left out, and judge what is described.

    python -m degarble.suites.campaigns.causes.left_out [--count N]

A variant is planted into one component of a small V4 or V3.2, on a prompt of two sequences and a
step of decoding. What is described must hold on other prompts as well, which nobody has seen: there
its variant has to return what the planted one returns, within budget. Outcomes: `ok`; `here`, the
sentence speaks of rows of these calls alone, and nothing else was proved; `silent`; `false`, the
sentence fails on the other prompts; `no effect`, within the budget. Where nothing is described, the
rest of the catalogue is tried: `equal`, a fault of another family has the same effect on the other
prompts; `named`, one is named that has another. `--alone` leaves that out.
"""

from __future__ import annotations

import os
import random
import sys
from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import CANNOT_RUN
from degarble.harness.engine.diagnose.diagnose import diagnose
from degarble.harness.engine.diagnose.trial import make, most_telling, proof, together
from degarble.harness.engine.faults.model_faults import CallRecord, Reach
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.engine.recover.described import describe
from degarble.suites.campaigns.runner import CaseResult, arguments, run_campaign
from degarble.suites.engine.diagnosing import double, run_prompts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import FaultVariant, ModelFault

MODELS = ("v4", "v32")
RECIPE = "nvfp4-full"
EACH = 2  # variants of a fault at a role
APART = 13  # one after so many is planted
LENGTHS = (61, 27)  # of the other prompts
ALONE = "DEGARBLE_LEFT_OUT_ALONE"


@cache
def cases() -> list[tuple[str, str, str, int]]:
    """Every model, component, fault and number of a variant, shuffled, so that a part is a sample.

    Of each role the last component is taken.
    """
    found = []
    for family in MODELS:
        model = double(family, RECIPE)
        last = {model.naming(name).role: name for name in model.calls}
        for name in last.values():
            context = model.planting(name)
            for fault in MODEL_FAULTS.values():
                if fault.reach is Reach.COMPONENT and fault.applies_to(context):
                    count = len(list(islice(fault.variants(context), 1 + APART * (EACH - 1))))
                    found += [(family, name, fault.id, at) for at in range(0, count, APART)]
    random.Random("left out").shuffle(found)
    return found


@cache
def others(family: str) -> Mapping[str, Sequence[Mapping[str, Tensor]]]:
    """What every component is given on other prompts."""
    model, calls = double(family, RECIPE), defaultdict(list)

    def seen(component: str, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        del outputs
        calls[component].append({name: tensor.clone() for name, tensor in inputs.items()})

    model.candidate.observer = seen
    run_prompts(model.candidate, [(torch.arange(n) * 23 + 7 * n) % 60 for n in LENGTHS])
    model.candidate.observer = None
    return calls


def holds(family: str, name: str, planted: FaultVariant, said: FaultVariant) -> bool:
    """Whether what is said returns what the planted variant does, on the other prompts."""
    model = double(family, RECIPE)
    context, scene = model.naming(name), model.planting(name)
    faulty = planted.apply(scene.call)
    with torch.inference_mode():
        for inputs in others(family)[name]:
            try:
                outputs = dict(faulty(inputs, scene.weights))
            except CANNOT_RUN:
                continue
            expected = dict(context.call(inputs, context.weights))
            record = CallRecord(inputs, outputs, expected)
            made = make(context, record, said)
            if made is None or not proof(context, record, made).ratio <= 1:
                return False
    return True


def planted(number: int) -> CaseResult:
    """Plant one variant, and judge what is said of it."""
    family, name, which, at = cases()[number]
    model, fault = double(family, RECIPE), MODEL_FAULTS[which]
    variant = next(islice(fault.variants(model.planting(name)), at, None))
    context = model.naming(name)
    kind = f"{family} {context.role}"
    try:
        records = model.sights(name, variant)
    except CANNOT_RUN:
        return CaseResult(number, kind, "no effect")
    if not model.differs(name, records):
        return CaseResult(number, kind, "no effect")
    fresh = next(islice(fault.variants(model.planting(name)), at, None))  # it may remember calls
    calls = together(context, records)
    found = describe(context, sorted(calls, key=lambda call: call is not most_telling(calls)))
    what = f"{which}: {variant.words}"
    if found is not None:
        outcome = "ok" if holds(family, name, fresh, found.variant) else "false"
        if outcome == "false" and found.here:
            outcome = "here"
        return CaseResult(number, kind, outcome, f"{what} | {found.sentence}")
    if os.environ.get(ALONE):
        return CaseResult(number, kind, "silent", what)
    return replace(_by_the_others(family, name, fault, fresh, records), seed=number, kind=kind)


def _by_the_others(
    family: str, name: str, fault: ModelFault, variant: FaultVariant, records: list[CallRecord]
) -> CaseResult:
    rest = [each for each in MODEL_FAULTS.values() if each.family != fault.family]
    named = diagnose(double(family, RECIPE).naming(name), records, rest).named
    what = f"{fault.id}: {variant.words}"
    if not named:
        return CaseResult(0, "", "silent", what)
    outcome = "equal" if holds(family, name, variant, named[0].variant) else "named"
    return CaseResult(0, "", outcome, f"{what} | {named[0].id}: {named[0].variant.words}")


def main() -> int:
    """Run the campaign; the exit status is 1 where something false is said."""
    parser = arguments((__doc__ or "").partition("\n")[0], count=0)
    parser.add_argument("--alone", action="store_true", help="without the rest of the catalogue")
    asked = parser.parse_args()
    os.environ[ALONE] = "1" if asked.alone else ""
    seeds = range(asked.seed, len(cases()) if not asked.count else asked.seed + asked.count)
    wanted = ("ok", "here", "equal", "silent", "no effect")
    return run_campaign("left_out", planted, asked, seeds=seeds, wanted=wanted)


if __name__ == "__main__":
    sys.exit(main())
