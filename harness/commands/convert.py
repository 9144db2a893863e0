"""Run `degarble convert`: the conversion over processes, its optional proof, the summary.

With a proof the verdict is AGREES or DIFFERS; without one nothing is compared, so the JSON contains
null. If the proof fails the target stays in place for inspection.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from degarble.harness.checkpoint.transform.convert.prove import prove
from degarble.harness.checkpoint.write.disk import require_separate_folders
from degarble.harness.inference.processes import counting
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.harness.checkpoint.transform.convert.job import ConversionJob
    from degarble.harness.checkpoint.transform.convert.prove import ConversionProof
    from degarble.harness.checkpoint.write.workers import Workers
    from degarble.harness.inference.processes import Listen

_RENAMES_SHOWN = 40  # lines of a proof for a person; the JSON has all of them


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
        found = list(islice(self.proof.lines(), _RENAMES_SHOWN + 1))
        if len(found) > _RENAMES_SHOWN:
            found[_RENAMES_SHOWN:] = ["and more; --json lists all of them."]
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
            "proof": None if self.proof is None else _told(self.proof),
        }


def convert(
    job: ConversionJob, target: Path, workers: Workers, listen: Listen, *, proving: bool
) -> ConvertSummary:
    """Convert, or finish an interrupted conversion; then read the result again if `proving`."""
    require_separate_folders(job.source, target)
    plan = job.plan()
    proof = None
    with listen(plan.data_bytes * (2 if proving else 1)) as progress:
        heard = counting(progress, target, plan)
        manifest = job.run(target, workers=workers, progress=heard, plan=plan)
        if proving:
            proof = prove(job.source, target, workers=workers, progress=progress.advance)
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


def _told(proof: ConversionProof) -> dict[str, Any]:
    return {
        "holds": proof.holds,
        "compared": len(proof.tensors),
        "exact": proof.exact,
        "names": proof.names and proof.names._asdict(),
        "faults": list(proof.faults),
        "broken": [
            {
                "tensor": each.tensor,
                "elements": each.elements,
                "different": each.different,
                "beyond": each.beyond,
                "bound": each.bound,
                "faults": list(each.faults),
            }
            for each in proof.broken
        ],
    }
