"""The story of the demonstration, told once for all suites of a process."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from degarble.harness.museum.demo import Demonstration, demo_fault, demo_result, run_demo
from degarble.harness.report.page import Provenance

if TYPE_CHECKING:
    from degarble.harness.report.page import Page
    from degarble.harness.report.replay_record import ReplayRecord

PROVENANCE = Provenance("2026-01-02 03:04 UTC", "degarble demo", "CPU: a processor, 2 cores", ())


@cache
def whole_story() -> Demonstration:
    """The default story."""
    return run_demo(demo_fault(None))


@cache
def story_told() -> tuple[Page, ReplayRecord]:
    """Its page, and the data of its replay panel."""
    return demo_result(whole_story(), PROVENANCE)
