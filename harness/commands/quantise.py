"""Run `degarble quantise`: build the job from options, run it over processes, summarise.

Counts in the summary come from conversion_report.json. Nothing is compared, so there is no verdict:
the JSON contains null.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from degarble.harness.base.files import read_small_file
from degarble.harness.checkpoint.read.types import LARGEST_INDEX
from degarble.harness.checkpoint.transform.nvfp4_scales import ScaleRule
from degarble.harness.checkpoint.transform.quantise.calibration import Calibration
from degarble.harness.checkpoint.transform.quantise.conversion_report import REPORT
from degarble.harness.checkpoint.transform.quantise.job import (
    QuantiseJob,
    recipe_for,
    target_layout,
)
from degarble.harness.checkpoint.transform.source import require_model
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.checkpoint.write.disk import require_separate_folders
from degarble.harness.inference.processes import counting
from degarble.harness.report.number_text import visible

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from degarble.harness.checkpoint.write.workers import Workers
    from degarble.harness.inference.processes import Listen

_LISTED = 3  # names in a line; the report has all of them


@dataclass(frozen=True)
class QuantiseSummary:
    """What was written. `report` is conversion_report.json."""

    target: Path
    content: str
    shards: int
    report: Mapping[str, Any]

    def lines(self) -> list[str]:
        """Return a summary of a few lines."""
        told = self.report
        first = (
            f"Wrote {told['tensors']:,} tensors, {told['bytes']:,} bytes,"
            f" {self.shards:,} {'shard' if self.shards == 1 else 'shards'}: {self.target}"
        )
        counts = (f"  {count:,} {action}" for action, count in told["counts"].items())
        flagged = (
            f"  {len(names):,} flagged: {reason.replace('_', ' ')}"
            for reason, names in told["flagged"].items()
            if names
        )
        left = [f"  {len(told['left_out']):,} parameters left out"] if told["left_out"] else []
        if told["unclaimed"]:
            names = ", ".join(visible(name) for name in told["unclaimed"][:_LISTED])
            left.append(
                f"  {len(told['unclaimed']):,} tensors of the source that no parameter"
                f" explains were left out, such as {names}"
            )
        return [first, *counts, *left, *flagged, f"Read {REPORT} there for each weight."]

    def document(self) -> dict[str, Any]:
        """Return the summary as plain data."""
        told = self.report
        return {
            "verdict": None,
            "origins": [],
            "cosines": [],
            "target": str(self.target),
            "content": self.content,
            "recipe": told["recipe"],
            "scale_rule": told["scale_rule"],
            "shards": self.shards,
            "tensors": told["tensors"],
            "bytes": told["bytes"],
            "left_out": len(told["left_out"]),
            "unclaimed": len(told["unclaimed"]),
            "counts": told["counts"],
            "flagged": {reason: len(names) for reason, names in told["flagged"].items()},
            "report": str(self.target / REPORT),
        }


def job_from(
    source: Path, recipe: str, scale_rule: str, calibration: Path | None = None
) -> QuantiseJob:
    """Build a job from command-line options."""
    records = None if calibration is None else Calibration.load(calibration)
    with Checkpoint.open(source) as checkpoint:
        config, _ = require_model(checkpoint, "quantise")
    layout = target_layout(config, recipe_for(recipe, config))
    return QuantiseJob(source, layout, ScaleRule(scale_rule), calibration=records)


def quantise(job: QuantiseJob, target: Path, workers: Workers, listen: Listen) -> QuantiseSummary:
    """Run the job, or finish an interrupted one; raise for what the source lacks."""
    require_separate_folders(job.source, target)
    plan = job.plan()
    with listen(plan.data_bytes) as progress:
        heard = counting(progress, target, plan)
        manifest = job.run(target, workers=workers, progress=heard, plan=plan)
    report = json.loads(read_small_file(target / REPORT, LARGEST_INDEX))
    return QuantiseSummary(target, manifest.content, len(manifest.shards), report)
