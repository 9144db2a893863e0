"""Plant faults of many sizes, and compare what `--screen` finds with what a whole check finds.

Each case is a run of a small V4 whose candidate sums in float32, with prompts of a few hundred
tokens. One in four is healthy. In the others a component's output is scaled: all of it, some of its
columns, or some of its rows. The size is drawn; its ratio to the budget is that of the whole check.
"""

from __future__ import annotations

import random
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.localise.localise import During, localise
from degarble.harness.engine.localise.recorded_run import InMemoryRun
from degarble.harness.model.config.config import small_v4
from degarble.harness.model.recipes import recipe_named
from degarble.harness.report.verdict import Verdict
from degarble.suites.campaigns.runner import CaseResult, arguments, run_cases
from degarble.suites.engine.localise_cases import bound

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = small_v4(num_hidden_layers=2, compress_ratios=(4, 0, 0), num_hash_layers=0)
RECIPE = "nvfp4-full"
PLAINLY = 10.0  # budgets, from which a fault has to be found


def _scaled(factor: float, part: str, call: Any, inputs: Any, weights: Any) -> dict[str, Tensor]:
    made = dict(call(inputs, weights))
    out = made["out"].clone()
    if part == "columns":
        out[..., : max(1, out.shape[-1] // 4)] *= factor
    elif part == "rows":
        out[::4] *= factor
    else:
        out *= factor
    return made | {"out": out}


def case(seed: int) -> CaseResult:
    """Run, judge whole and screened, and compare."""
    chance = random.Random(seed)
    candidate, twin = bound(CONFIG, RECIPE, torch.float32), bound(CONFIG, RECIPE)
    recipe = recipe_named(RECIPE, CONFIG)
    prompts = [[chance.randrange(1, 500) for _ in range(n)] for n in (300, 90)]
    names = [
        name
        for name in candidate.calls
        if not name.endswith((".act_quant", ".topk", "norm_rope", ".write", ".kv_write"))
        and "compressor" not in name
        and "indexer" not in name
        and not name.startswith(("embed", "mtp."))
    ]
    name, part = chance.choice(names), chance.choice(("all", "columns", "rows"))
    factor = 1 + 2.0 ** -chance.uniform(1, 9)
    planted, healthy = seed % 4 != 0, candidate.calls[name]
    if planted:
        candidate.calls[name] = partial(_scaled, factor, part, healthy)
    try:
        run = InMemoryRun.from_prompts(candidate, prompts, 3)
    finally:
        candidate.calls[name] = healthy
    found, seconds = {}, {}
    for screen in (False, True):
        begun = time.process_time()
        found[screen] = localise(twin, recipe, run, None, During(screen=screen))
        seconds[screen] = time.process_time() - begun
    ratio = max(row.ratio for row in found[False].rows if row.component.name == name or not planted)
    detail = (
        f"{name} {part} {factor:.4f}: {ratio:.2f} budgets;"
        f" whole {seconds[False]:.2f} s, screened {seconds[True]:.2f} s"
    )
    if not planted:
        right = found[True].verdict is Verdict.AGREES
        return CaseResult(seed, "healthy", "ok" if right else "alarm", detail, seconds[True])
    kind = f"{part}, {'from' if ratio >= PLAINLY else 'below'} 10 budgets"
    origins = [[each.component for each in found[screen].origins] for screen in (False, True)]
    outcome = "ok" if origins[0] == origins[1] else "missed" if not origins[1] else "others"
    return CaseResult(seed, kind, outcome, detail, seconds[True])


def main() -> int:
    """Run the campaign; only faults from 10 budgets up, and alarms, are failures."""
    given = arguments("compare screened checks with whole ones", count=200).parse_args()
    seeds = range(given.seed, given.seed + given.count)
    report = run_cases("screened_checks", case, seeds, given.jobs, given.out, resume=given.resume)
    report.write(given.out)
    sys.stdout.write(report.table() + "\n")
    return int(any("below" not in each.kind for each in report.failures()))


if __name__ == "__main__":
    sys.exit(main())
