"""`degarble convert` as one run: the conversion over processes, its proof, what was found.

Owns the verdict: AGREES or DIFFERS where the proof was asked for; without one nothing is compared,
so the JSON says null. A broken proof leaves the target in place, to be looked at.
Refuses nothing itself; conversions refuse what they cannot read.
What keeps it honest: suites/commands/test_convert.py, with a planted fault.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from degarble.harness.checkpoint.transform.convert.prove import prove
from degarble.harness.checkpoint.write.folder_overlap import require_apart
from degarble.harness.inference.workers import counting
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.harness.checkpoint.transform.convert.job import Job
    from degarble.harness.checkpoint.transform.convert.prove import Proof
    from degarble.harness.checkpoint.write.worker_pool import Workers
    from degarble.harness.inference.workers import Listen

_SHOWN = 40  # lines of a proof for a person; the JSON has all of them


@dataclass(frozen=True)
class Converted:
    """What was written, and the proof where one was asked for."""

    to: str
    target: Path
    content: str
    shards: int
    converted: int
    copied: int
    left_out: int
    proof: Proof | None

    @property
    def verdict(self) -> Verdict | None:
        """None where nothing was compared."""
        if self.proof is None:
            return None
        return Verdict.AGREES if self.proof.holds else Verdict.DIFFERS

    @property
    def exit_status(self) -> int:
        """0 done; 1 where the proof is broken."""
        return Verdict.AGREES.exit_status if self.verdict is None else self.verdict.exit_status

    def lines(self) -> list[str]:
        """Tell it in a few lines."""
        first = (
            f"Wrote {self.converted:,} converted and {self.copied:,} copied tensors,"
            f" {self.shards:,} {'shard' if self.shards == 1 else 'shards'}: {self.target}"
        )
        if self.proof is None:
            return [first, "Values and names were not compared; --prove does so."]
        found = list(islice(self.proof.lines(), _SHOWN + 1))
        if len(found) > _SHOWN:
            found[_SHOWN:] = ["and more; --json lists all of them."]
        return [first, *found]

    def document(self) -> dict[str, Any]:
        """The machine's view of it."""
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
    job: Job, target: Path, workers: Workers, listen: Listen, *, proving: bool
) -> Converted:
    """Convert, or finish what was interrupted; then read it again where `proving`."""
    require_apart(job.source, target)
    plan = job.plan()
    proof = None
    with listen(plan.data_bytes * (2 if proving else 1)) as progress:
        heard = counting(progress, target, plan)
        manifest = job.run(target, workers=workers, progress=heard)
        if proving:
            proof = prove(job.source, target, workers=workers, progress=progress.advance)
    return Converted(
        to=job.to,
        target=target,
        content=manifest.content,
        shards=len(manifest.shards),
        converted=sum(len(unit.tensors) for unit in job.units),
        copied=len(job.copied),
        left_out=len(job.left_out),
        proof=proof,
    )


def _told(proof: Proof) -> dict[str, Any]:
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
