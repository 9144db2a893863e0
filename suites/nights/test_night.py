"""The night, one test a step: `pytest -m b200 --checkpoint CKPT --reference CKPT` (docs/nights.md).

Without a device the same steps run under `-m night`. The last tests add the night to the history
and hold it against the ledger; then page, document and summary are written.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import Refused
from degarble.harness.inference.processes import process_group, read_rank_info
from degarble.harness.nightly.night import Night, NightConfig, require_no_workers, today
from degarble.harness.nightly.pages import write_night
from degarble.harness.nightly.table import STEPS as OF_PRODUCT
from degarble.harness.nightly.table import follow, lead, over_ranks
from degarble.harness.plugins.presence import DEVICES
from degarble.harness.plugins.progress import tell
from degarble.suites.museum.random_faults.nightly import with_random_faults

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from degarble.harness.nightly.night import StepResult
    from degarble.harness.plugins.pytest_plugin import NightOptions, RunOptions

FOLDER = Path("out") / "nights"
PROGRESS = "progress.log"  # beside the journal
STEPS = with_random_faults(OF_PRODUCT)
MARKS = ("b200", "h200", "night")
PLACES = [
    pytest.param(mark, step.name, marks=getattr(pytest.mark, mark), id=f"{mark}-{step.name}")
    for mark in MARKS
    for step in STEPS
]


def asked_of(
    run: RunOptions, night_options: NightOptions, *, gpu: bool, say: Callable[[str], None]
) -> NightConfig:
    assert run.checkpoint is not None, "the test needs it"
    assert run.reference is not None, "the test needs it"
    return NightConfig(
        checkpoint=run.checkpoint,
        reference=run.reference,
        folder=run.report_dir or FOLDER.absolute(),
        night=today(),
        captures=run.captures,
        prompts=night_options.prompts,
        backend=run.backend,
        gpu=gpu,
        repeats=night_options.repeats,
        ranks=read_rank_info(os.environ).world,
        museum=night_options.museum,
        store=night_options.store,
        ledger=night_options.ledger,
        commit=night_options.commit,
        subject=night_options.subject,
        within=night_options.within,
        say=say,
    )


@pytest.fixture(scope="module")
def nights(run_options: RunOptions) -> Iterator[dict[bool, Night]]:
    """The night on this machine's device, or on the CPU; written when its steps are done."""
    require_no_workers(os.environ)
    begun: dict[bool, Night] = {}
    with nullcontext() if read_rank_info(os.environ).alone else process_group():
        yield begun
        for night in begun.values():
            night.stop()  # first: its suites would outlive a page that cannot be written
            written = write_night(night)
            night.close()
            summary = run_options.night.summary
            if summary is not None:
                with summary.open("a", encoding="utf-8") as file:
                    file.write(written.summary.read_text(encoding="utf-8"))


def _begun(
    nights: dict[bool, Night], run: RunOptions, *, gpu: bool, say: Callable[[str], None]
) -> Night:
    if gpu not in nights:
        config = asked_of(run, run.night, gpu=gpu, say=say)
        if config.ranks > 1:
            nights[gpu] = Night(config, over_ranks(STEPS, config.ranks))
            return nights[gpu]
        try:
            nights[gpu] = Night(config, STEPS)
        except Refused as error:
            pytest.exit(f"REFUSED: {error}", returncode=error.exit_status)
        if not nights[gpu].journal.continues:
            (config.work / PROGRESS).unlink(missing_ok=True)
        say("\n" + "\n".join(nights[gpu].plan))
    return nights[gpu]


@pytest.mark.needs("--checkpoint", "--reference")
@pytest.mark.parametrize(("mark", "step"), PLACES)
def test_night(
    mark: str,
    step: str,
    run_options: RunOptions,
    nights: dict[bool, Night],
    pytestconfig: pytest.Config,
) -> None:
    gpu, place = mark in DEVICES, read_rank_info(os.environ)
    if not place.leads:
        pytest.skip(f"rank 0 judges: {follow(step)}")

    def say(text: str) -> None:
        tell(pytestconfig, nights[gpu].asked.work / PROGRESS, text)

    def ran() -> StepResult:
        return _begun(nights, run_options, gpu=gpu, say=say).result(step)

    result = ran() if place.alone else lead(step, ran)
    night = nights[gpu]
    text = "\n".join([f"{result.verdict}: {result.sentence}", *result.lines])
    if night.red(step):
        pytest.fail(text, pytrace=False)
    if result.red:
        pytest.xfail(f"known: {text}")
    if not result.asked and result.verdict.exit_status:
        pytest.skip(result.sentence)
