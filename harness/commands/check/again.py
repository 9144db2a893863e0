"""Rerun the prompts of a capture on other kernels, for `degarble check --backend`.

The new run uses the capture's token ids, number of new tokens, filters and checkpoint. It is
captured into a temporary folder; `degarble capture --backend` writes one that stays. The old
capture's tensors are not read, so one with statistics only is sufficient. Captures that lack the
beginning of a prompt are refused.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from degarble.harness.backends.registry import require_backend
from degarble.harness.base.errors import InvalidArgument
from degarble.harness.capture.capture import CaptureSettings, capture
from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.files.records import Phase
from degarble.harness.capture.options import CaptureFilter as Filter
from degarble.harness.commands.check.check import require_captured, source_of
from degarble.harness.commands.check.texts import spoken_in
from degarble.harness.inference.devices import require_device
from degarble.harness.inference.model import open_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from degarble.harness.backends.registry import AskedBackend
    from degarble.harness.capture.capture import Watch
    from degarble.harness.commands.check.check import Wanted


@contextmanager
def ran_again(
    wanted: Wanted, asked: AskedBackend, watch: Watch, told: Callable[..., None]
) -> Iterator[Wanted]:
    """Run the prompts of `wanted.capture` on a backend; yield the options to check that run."""
    require_device("--device", wanted.device)
    require_backend(asked.name)
    seen = Capture.open(wanted.capture)
    if not wanted.partial:
        seen.require_complete()
    source = source_of(seen, wanted.checkpoint)
    prompts, new_tokens = prompts_of(seen)
    with open_model(source, held_values=wanted.held_values) as model:
        require_captured(seen, model, source)
    how = CaptureSettings(
        filter_of(seen),
        new_tokens,
        held_values=wanted.held_values,
        backend=asked.name,
        strict=asked.strict,
        settings=asked.settings,
        device=wanted.device,
        conventions=wanted.conventions,
    )
    with TemporaryDirectory(prefix="degarble-check-") as made:
        folder = Path(made) / "capture"
        done = capture(source, list(prompts), folder, watch, how)
        told(*done.paired.lines())
        yield replace(wanted, capture=folder, checkpoint=source)


def prompts_of(seen: Capture) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Return the token ids of every prompt, and the number of new tokens in the longest answer."""
    begun = {
        owner
        for step in seen.steps
        for owner, position in zip(step.sequences, step.positions, strict=True)
        if position == 0
    }
    owners = {owner for step in seen.steps for owner in step.sequences}
    prompts = tuple(tuple(ids) for ids, _ in spoken_in(seen))
    if not prompts or not all(prompts) or owners - begun:
        raise InvalidArgument(
            "prompts of the capture", sorted(owners - begun)[:5] or "none",
            "sequences whose first token was captured", "Capture a run from its beginning.",
        )  # fmt: skip
    decoded = [step.sequences for step in seen.steps if step.phase is Phase.DECODE]
    most = max((sum(owner in step for step in decoded) for owner in owners), default=0)
    return prompts, most + 1


def filter_of(seen: Capture) -> Filter:
    """Return the filter that a capture was made with."""
    stated = seen.facts.get("filters")
    if not isinstance(stated, dict):
        return Filter()
    words = [stated.get(name) for name in ("layers", "components", "tokens")]
    lists = [each if isinstance(each, list) else [] for each in words]
    return Filter.of(*(",".join(map(str, each)) if each else None for each in lists))
