"""Plant random faults into captured runs, of kernels or an engine, and count what is said of them.

    python -m degarble.suites.campaigns.causes.captured_faults --captures DIR [--models DIR]

DIR holds one capture for each small model of `references/tiny/v1`, by its name: `v4`, `v32`; or of
quantised copies of them, in the folder that --models names.
Outcomes are those of `random_faults`. First each capture is replayed without a fault: `replayed`
is the share of its calls that the replay gives to the bit, and a healthy run has no origin.
"""

from __future__ import annotations

import json
import random
import sys
from functools import cache, partial
from pathlib import Path

import torch

from degarble.suites.campaigns.causes.random_faults import WANTED, outcome, plain, stored, table
from degarble.suites.campaigns.runner import CaseResult, arguments, run_campaign
from degarble.suites.house.repository import ROOT
from degarble.suites.museum.random_faults.answers import judged
from degarble.suites.museum.random_faults.captured import CapturedStage

NAME = "captured_faults"
MODELS = ROOT / "references/tiny/v1"


@cache
def opened(path: Path, models: Path) -> CapturedStage:
    """Open a capture once a process."""
    return CapturedStage.open(path, models / path.name)


def case(seed: int, captures: Path, models: Path) -> CaseResult:
    """Plant the fault of a seed into one of the captures."""
    torch.set_num_threads(1)
    drawn = random.Random(f"captured fault {seed}")
    path = drawn.choice(sorted(each for each in captures.iterdir() if each.is_dir()))
    where = opened(path, models)
    answer = judged(where, [where.drawn(drawn)])
    faults = [plain(each) for each in answer.answers]
    detail = json.dumps({"stage": where.name, "elsewhere": answer.elsewhere, "faults": faults})
    kind = str(answer.answers[0].truth["operand"]).split()[0]
    return CaseResult(seed, kind, outcome(answer), detail)


def healthy(captures: Path, models: Path) -> list[str]:
    """Say of each capture how much of it the replay gives, and what is found in it."""
    lines = []
    for path in sorted(each for each in captures.iterdir() if each.is_dir()):
        where = opened(path, models)
        found = where.localised(where.healthy).origins
        lines.append(
            f"{path.name}: {where.replayed():.1%} of calls replayed, {len(found)} origins"
            f"{''.join(f'; {origin.sentence}' for origin in found)}"
        )
    return lines


def main() -> int:
    """Run the campaign; the exit status is 1 where something false is said, or is no fault."""
    parser = arguments((__doc__ or "").partition("\n")[0], count=100)
    parser.add_argument("--captures", type=Path, required=True, help="a folder of captures")
    parser.add_argument("--models", type=Path, default=MODELS, help="their checkpoints, by name")
    parser.add_argument("--table", action="store_true", help="print what was written, run nothing")
    asked = parser.parse_args()
    status = 0
    if not asked.table:
        lines = healthy(asked.captures, asked.models)
        sys.stdout.write("\n".join(lines) + "\n")
        run = partial(case, captures=asked.captures, models=asked.models)
        status = run_campaign(NAME, run, asked, wanted=WANTED)
        status |= any(not line.endswith(" 0 origins") for line in lines)
    sys.stdout.write(f"{table(stored(asked.out / f'{NAME}.jsonl'))}\n")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
