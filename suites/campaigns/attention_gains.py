"""Where a gain of attention is found, it is named: sizes, heads, sides of the rounding, kernels.

    python -m degarble.suites.campaigns.attention_gains --count 1200 --jobs 32 --out DIR

A case is a run of a small model. Its attention is the reference in float32, or for V3.2 a random
legal kernel in every layer; a gain sits on all heads or on one, in one layer or in all, in front of
the output's rounding or behind it. Every eighth case has none. Columns of the table: `unnamed` and
`wrong` (the place is right, the cause is not), `elsewhere` (a healthy component is blamed), `alarm`
(a healthy run differs). `not found` is no failure: small gains may pass, as documents say.
"""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.diagnose.diagnose import diagnose
from degarble.harness.engine.faults.gain_fit import RoundingSide, both_gains
from degarble.harness.engine.faults.model_faults import ComponentContext
from degarble.harness.engine.faults.precision import head_variants
from degarble.harness.engine.localise.localise import localise
from degarble.harness.engine.localise.recorded_run import InMemoryRun
from degarble.harness.model.components import component_named
from degarble.harness.model.recipes import recipe_named
from degarble.suites.campaigns.attention_kernels import drawn_kernel
from degarble.suites.campaigns.runner import CaseResult, arguments, run_campaign
from degarble.suites.engine import legal_attention as legal
from degarble.suites.engine.conventions.convention_cases import V4, V32, model

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from degarble.harness.engine.localise.localise import Localised
    from degarble.references.binding import BoundModel

NAME = "attention_gains"
GAINS = (0.990, 0.993, 0.995, 0.997, 1.003, 1.005, 1.007, 1.010)
LENGTHS = ((11, 3), (40, 9), (133, 5), (24,))
RECIPE = "nvfp4-full"
HEALTHY = 8  # every so manieth case


def case(seed: int) -> CaseResult:
    """Plant the gain of a seed, and read what is said of it."""
    draw = random.Random(seed)
    config, gain = (V4, V32)[seed % 2], GAINS[seed // 2 % len(GAINS)]
    candidate, head = model(config, torch.float32, {}), None
    names = [name for name in candidate.calls if name.endswith("attn.attend")]
    own: Any
    kernel = config is V32 and draw.random() < 0.5
    chosen: list[str] = []
    kind = f"{config.family}, {'legal kernel' if kernel else 'reference'}"
    side = draw.choice(tuple(RoundingSide))
    if seed % HEALTHY != HEALTHY - 1:
        chosen = draw.choice((names, [draw.choice(names)]))
        head = draw.choice((None, draw.randrange(config.num_attention_heads)))
        kind += f", {'all heads' if head is None else 'one head'}, {side.value}, {gain}"
    with_gain = _gained(gain, head, config.num_attention_heads)
    drawn = drawn_kernel(draw)
    for name in names if kernel else chosen:
        planted = name in chosen
        if kernel:
            change = with_gain if planted else (lambda out: out)
            own = legal.run_packed_v32(candidate, name, drawn, change, side is RoundingSide.BEHIND)
        else:
            own = _by_way(candidate, name, (gain, head, side))
        candidate.calls[name] = own
    lengths = draw.choice(LENGTHS)
    prompts = [[draw.randrange(1, 500) for _ in range(length)] for length in lengths]
    run = InMemoryRun.from_prompts(candidate, prompts, 3)
    # Nobody can learn a convention where no layer is healthy.
    declared = {"attention_in_storage_dtype": False} if kernel and chosen == names else {}
    twin = model(config, torch.float64, declared)
    twin.declared = declared
    found = localise(twin, recipe_named(RECIPE, config), run)
    outcome, words = _read(found, chosen, "M43.whole" if head is None else "M43.one_head")
    detail = f"{lengths}, {chosen}, {drawn if kernel else 'reference'}: {words}"
    return CaseResult(seed, kind if chosen else f"{kind}, healthy", outcome, detail[:1500])


def _gained(gain: float, head: int | None, heads: int) -> Callable[[Tensor], Tensor]:
    def change(out: Tensor) -> Tensor:
        if head is None:
            return (out.double() * gain).to(out.dtype)
        by_head = out.reshape(len(out), heads, -1).clone()
        by_head[:, head] = (by_head[:, head].double() * gain).to(out.dtype)
        return by_head.reshape(out.shape)

    return change


def _by_way(candidate: BoundModel, name: str, what: tuple[float, int | None, RoundingSide]) -> Any:
    (gain, head, side), recipe = what, recipe_named(RECIPE, candidate.config)
    context = ComponentContext(candidate, component_named(candidate.config, name, recipe), recipe)
    if head is None:
        variants = both_gains(context, "a gain", gain, sides=(side,))
    else:
        variants = head_variants(context, head, gain, (side,))
    return next(variants).apply(candidate.calls[name])


def _read(found: Localised, chosen: list[str], fault: str) -> tuple[str, str]:
    """Return the outcome, and what is said of each origin."""
    said, wrong = [], []
    for origin in found.origins:
        if origin.component not in chosen:
            return ("elsewhere" if chosen else "alarm"), f"{origin.component}: {origin.sentence}"
        cause = diagnose(origin.context, [origin.record, *origin.more]) if origin.record else None
        named = [named_fault.id for named_fault in cause.named] if cause is not None else []
        if named[:1] != [fault]:
            wrong.append("wrong" if named else "unnamed")
        said.append(f"{origin.component}: {cause.sentence if cause else origin.sentence}")
    if not chosen:
        return "ok", ""
    if not said:
        return "not found", ""
    return (max(wrong) if wrong else "ok"), "; ".join(said)


def main() -> int:
    """Run the campaign; 1 where a cause is wrong or missing, or a healthy component is blamed."""
    options = arguments((__doc__ or "").splitlines()[0], count=1200).parse_args()
    return run_campaign(NAME, case, options, wanted=("ok", "not found"))


if __name__ == "__main__":
    sys.exit(main())
