"""Plant random faults that no list of the engine has, and count what it says of them.

    python -m degarble.suites.campaigns.causes.random_faults [--count N] [--resume]
        [--several N] [--table]

Each seed draws a small model, a component, an edit of it, and when it acts. Counted are faults of
three budgets or more. Outcomes: `named`, `described`, `ambiguous` (the true cause is one of those
that are said), `silent`, `false` (a cause that does something else to other tokens), `missed` (not
placed), `elsewhere` (a healthy component is blamed) and `below` (not counted). With several faults
a run counts by the worst of its answers. `--table` prints what an earlier run wrote.
"""

from __future__ import annotations

import json
import random
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.suites.campaigns.runner import CaseResult, arguments, run_campaign
from degarble.suites.museum.random_faults.answers import CauseAnswer, judged
from degarble.suites.museum.random_faults.stages import OURS, TRACED, stage

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from degarble.suites.museum.random_faults.answers import FaultAnswer, RunAnswer
    from degarble.suites.museum.random_faults.stages import RandomFault

NAME = "random_faults"
FALSE = "false sentences"
WANTED = ("named", "described", "ambiguous", "silent", "below")
_OURS_OF_TEN = 3
_WORST = (
    CauseAnswer.FALSE, CauseAnswer.SILENT, CauseAnswer.AMBIGUOUS, CauseAnswer.DESCRIBED,
    CauseAnswer.NAMED,
)  # fmt: skip


def answered(seed: int, several: int = 1) -> tuple[str, RunAnswer]:
    """Plant what a seed says, and judge the answer."""
    drawn = random.Random(f"random fault {seed}")
    where = stage(drawn.choice(OURS if seed % 10 < _OURS_OF_TEN else TRACED))
    faults: list[RandomFault] = []
    for _ in range(several):
        faults.append(where.drawn(drawn, [fault.component for fault in faults]))
    return where.name, judged(where, faults)


def outcome(answer: RunAnswer) -> str:
    """Return the worst that was said of any fault that counts."""
    if answer.elsewhere:
        return "elsewhere"
    if not any(each.counts for each in answer.answers):
        return "below"
    counted = [each for each in answer.answers if each.counts or each.placed]
    if any(not each.placed for each in counted):
        return "missed"
    return str(min((each.cause for each in counted), key=_WORST.index))


def case(seed: int, several: int = 1) -> CaseResult:
    """Plant the faults of a seed; the detail is JSON, with truth and answer of each."""
    torch.set_num_threads(1)
    name, answer = answered(seed, several)
    faults = [plain(each) for each in answer.answers]
    detail = json.dumps({"stage": name, "elsewhere": answer.elsewhere, "faults": faults})
    kind = " and ".join(str(each.truth["operand"]).split()[0] for each in answer.answers)
    return CaseResult(seed, kind if several == 1 else f"{several} faults", outcome(answer), detail)


def plain(answer: FaultAnswer) -> dict[str, Any]:
    return {
        "truth": answer.truth, "effect": min(answer.effect, 1e30), "placed": answer.placed,
        "cause": str(answer.cause), "id": answer.cause_id, "where": answer.where,
        "proof": answer.proof, "when": answer.condition, "sentence": answer.sentence,
    }  # fmt: skip


def shares(answers: Iterable[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """Return how many faults that count were placed, named or described, and claimed falsely."""
    counted = [each for each in answers if each["effect"] >= 3]
    true = (CauseAnswer.NAMED, CauseAnswer.DESCRIBED)
    return {
        "placed": (sum(each["placed"] for each in counted), len(counted)),
        "named or described": (sum(each["cause"] in true for each in counted), len(counted)),
        FALSE: (sum(each["cause"] == CauseAnswer.FALSE for each in counted),
                            len(counted)),
    }  # fmt: skip


def stored(path: Path) -> list[dict[str, Any]]:
    """Return the answers that a run wrote, fault by fault."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    details = [json.loads(line["detail"]) for line in lines if line["detail"].startswith("{")]
    return [{"stage": each["stage"], **fault} for each in details for fault in each["faults"]]


def table(answers: list[dict[str, Any]]) -> str:
    """Return the shares of all faults, by operand, by model and by condition, as Markdown."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for each in answers:
        truth = each["truth"]
        condition = next(iter(truth["condition"]), "always")
        for key in ("all", str(truth["operand"]).split()[0], each["stage"], f"if {condition}"):
            groups.setdefault(key, []).append(each)
    lines = [
        "| | faults | placed | named or described | false sentences |",
        "|---|---|---|---|---|",
    ]
    for key, group in sorted(groups.items()):
        found = shares(group)
        total = found["placed"][1]
        cells = " | ".join(str(hits) for hits, _ in found.values())
        lines.append(f"| {key} | {total} | {cells} |")
    return "\n".join(lines)


def main() -> int:
    """Run the campaign; the exit status is 1 where something false is said."""
    parser = arguments((__doc__ or "").partition("\n")[0], count=1000)
    parser.add_argument("--several", type=int, default=1, help="faults in each run")
    parser.add_argument("--table", action="store_true", help="print what was written, run nothing")
    asked = parser.parse_args()
    name = NAME if asked.several == 1 else f"{NAME}_{asked.several}"
    status = 0
    if not asked.table:
        status = run_campaign(name, partial(case, several=asked.several), asked, wanted=WANTED)
    sys.stdout.write(f"{table(stored(asked.out / f'{name}.jsonl'))}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
