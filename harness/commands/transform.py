"""Run `degarble quantise` and `degarble convert`: the job over processes, proof and summary.

With a proof the verdict is AGREES or DIFFERS; without one nothing is compared, so the JSON contains
null. If the proof fails the target stays in place for inspection.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
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
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from degarble.harness.checkpoint.transform.convert.job import ConversionJob
    from degarble.harness.checkpoint.transform.pipeline import Transform
    from degarble.harness.checkpoint.transform.units import ConversionProof
    from degarble.harness.checkpoint.write.manifest import Manifest
    from degarble.harness.checkpoint.write.workers import Workers
    from degarble.harness.inference.processes import Listen

# The report and the JSON have all of them.
_NAMES_SHOWN = 3  # in a line
_LINES_SHOWN = 40  # of a proof


def _run(
    job: Transform,
    target: Path,
    workers: Workers,
    listen: Listen,
    *,
    proving: bool = False,
) -> tuple[Manifest, ConversionProof | None]:
    """Write the target, or finish an interrupted one; then read it again to prove it."""
    require_separate_folders(job.source, target)
    plan = job.plan()
    proof = None
    with listen(plan.data_bytes * (2 if proving else 1)) as progress:
        heard = counting(progress, target, plan)
        manifest = job.run(target, workers=workers, progress=heard, plan=plan)
        if proving:
            proof = job.prove(target, workers=workers, progress=progress.advance)
    return manifest, proof


@dataclass(frozen=True)
class QuantiseSummary:
    """What was written. `report` is conversion_report.json."""

    target: Path
    content: str
    shards: int
    report: Mapping[str, Any]

    def lines(self) -> list[str]:
        """Return a summary of a few lines."""
        fields = self.report
        first = (
            f"Wrote {fields['tensors']:,} tensors, {fields['bytes']:,} bytes,"
            f" {self.shards:,} {'shard' if self.shards == 1 else 'shards'}: {self.target}"
        )
        counts = (f"  {count:,} {action}" for action, count in fields["counts"].items())
        flagged = (
            f"  {len(names):,} flagged: {reason.replace('_', ' ')}"
            for reason, names in fields["flagged"].items()
            if names
        )
        left = [f"  {len(fields['left_out']):,} parameters left out"] if fields["left_out"] else []
        if fields["unclaimed"]:
            names = ", ".join(visible(name) for name in fields["unclaimed"][:_NAMES_SHOWN])
            left.append(
                f"  {len(fields['unclaimed']):,} tensors of the source that no parameter"
                f" explains were left out, such as {names}"
            )
        return [first, *counts, *left, *flagged, f"Read {REPORT} there for each weight."]

    def document(self) -> dict[str, Any]:
        """Return the summary as plain data."""
        fields = self.report
        return {
            "verdict": None,
            "origins": [],
            "cosines": [],
            "target": str(self.target),
            "content": self.content,
            "recipe": fields["recipe"],
            "scale_rule": fields["scale_rule"],
            "shards": self.shards,
            "tensors": fields["tensors"],
            "bytes": fields["bytes"],
            "left_out": len(fields["left_out"]),
            "unclaimed": len(fields["unclaimed"]),
            "counts": fields["counts"],
            "flagged": {reason: len(names) for reason, names in fields["flagged"].items()},
            "report": str(self.target / REPORT),
        }


def job_from(
    source: Path, recipe: str, scale_rule: str, calibration: Path | None = None
) -> QuantiseJob:
    """Build a job from command-line options."""
    records = None if calibration is None else Calibration.load(calibration)
    with Checkpoint.open(source) as checkpoint:
        if checkpoint.model is None:
            # transformers is heavy, and an extra.
            from degarble.harness.commands.traced_quantise import traced_job  # noqa: PLC0415

            return traced_job(checkpoint, recipe, scale_rule, records)
        config, _ = require_model(checkpoint, "quantise")
    layout = target_layout(config, recipe_for(recipe, config))
    return QuantiseJob(source, layout, ScaleRule(scale_rule), calibration=records)


def quantise(job: QuantiseJob, target: Path, workers: Workers, listen: Listen) -> QuantiseSummary:
    """Run the job, or finish an interrupted one; raise for what the source lacks."""
    manifest, _ = _run(job, target, workers, listen)
    report = json.loads(read_small_file(target / REPORT, LARGEST_INDEX))
    return QuantiseSummary(target, manifest.content, len(manifest.shards), report)


@dataclass(frozen=True)
class ConvertSummary:
    """What was written, and the proof if one was requested."""

    to: str
    target: Path
    content: str
    shards: int
    converted: int
    copied: int
    left_out: int
    proof: ConversionProof | None

    @property
    def verdict(self) -> Verdict | None:
        """Return the verdict; None if nothing was compared."""
        if self.proof is None:
            return None
        return Verdict.AGREES if self.proof.holds else Verdict.DIFFERS

    @property
    def exit_status(self) -> int:
        """Return 0, or 1 if the proof failed."""
        return Verdict.AGREES.exit_status if self.verdict is None else self.verdict.exit_status

    def lines(self) -> list[str]:
        """Return a summary of a few lines."""
        first = (
            f"Wrote {self.converted:,} converted and {self.copied:,} copied tensors,"
            f" {self.shards:,} {'shard' if self.shards == 1 else 'shards'}: {self.target}"
        )
        if self.proof is None:
            return [first, "Values and names were not compared; --prove does so."]
        found = list(islice(self.proof.lines(), _LINES_SHOWN + 1))
        if len(found) > _LINES_SHOWN:
            found[_LINES_SHOWN:] = ["and more; --json lists all of them."]
        return [first, *found]

    def document(self) -> dict[str, Any]:
        """Return the summary as plain data."""
        return {
            "verdict": self.verdict,
            "origins": [],
            "cosines": [],
            "to": self.to,
            "target": str(self.target),
            "content": self.content,
            "shards": self.shards,
            "converted": self.converted,
            "copied": self.copied,
            "left_out": self.left_out,
            "proof": None if self.proof is None else _proof_document(self.proof),
        }


def convert(
    job: ConversionJob, target: Path, workers: Workers, listen: Listen, *, proving: bool
) -> ConvertSummary:
    """Convert, or finish an interrupted conversion; then read the result again if `proving`."""
    manifest, proof = _run(job, target, workers, listen, proving=proving)
    return ConvertSummary(
        to=job.to,
        target=target,
        content=manifest.content,
        shards=len(manifest.shards),
        converted=sum(len(unit.tensors) for unit in job.units),
        copied=len(job.copied),
        left_out=len(job.left_out),
        proof=proof,
    )


def _proof_document(proof: ConversionProof) -> dict[str, Any]:
    return {
        "holds": proof.holds,
        "compared": len(proof.tensors),
        "exact": proof.exact,
        "names": proof.names and proof.names._asdict(),
        "faults": list(proof.faults),
        "broken": [
            {
                "tensor": tensor_proof.tensor,
                "elements": tensor_proof.elements,
                "different": tensor_proof.different,
                "beyond": tensor_proof.beyond,
                "bound": tensor_proof.bound,
                "faults": list(tensor_proof.faults),
            }
            for tensor_proof in proof.broken
        ],
    }
