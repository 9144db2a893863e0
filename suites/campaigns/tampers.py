"""Damage small quantised checkpoints in some 190 ways, and count what the audit tells of it.

A case is one tamper of one checkpoint. It is audited beside the BF16 checkpoint that it was made
from, and once more with a loader's map. An outcome is `ok` (an error by a rule that tells the
cause, in the right layer), `vague` (an error, another rule or layer), `warning`, `note` or
`missed`; what changes nothing must raise neither error nor warning. The healthy checkpoints are
cases too.

    python -m degarble.suites.campaigns.tampers --count 0 --jobs 32 --seed 0 --out out/campaigns

A count of 0 runs every case. The exit status is 1 below 95 % of the tampers with an effect.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from degarble.harness.base.errors import Refused
from degarble.harness.checkpoint.audit.rules import Level
from degarble.harness.checkpoint.transform.quantise.calibration import Amax, Calibration
from degarble.harness.checkpoint.transform.quantise.job import QuantiseJob, target_layout
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.commands.audit.audit import AuditRequest, audit
from degarble.harness.model.parameters import parameters
from degarble.harness.model.recipes import recipe_named
from degarble.suites.campaigns.runner import CaseResult, arguments, run_cases
from degarble.suites.campaigns.tamper_structure import TAMPERS
from degarble.suites.campaigns.tamper_world import World

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from degarble.harness.checkpoint.audit.findings import Finding
    from degarble.suites.campaigns.tamper_values import Tamper

SOURCES = tuple(
    f"{family}-{recipe}"
    for recipe in ("nvfp4-full", "nvfp4-experts", "official")
    for family in ("v4", "v32")
)
TINY = Path(__file__).resolve().parents[2] / "references" / "tiny" / "v1"
TARGET = 0.95
_LAYER = re.compile(r"layers\.(\d+)\.")
_OUTCOMES = ("ok", "vague", "warning", "note", "missed", "alarm")


def write_source(kind: str, target: Path) -> None:
    """Quantise one of the small trained models; every linear has an amax of its own."""
    family, _, recipe = kind.partition("-")
    with Checkpoint.open(TINY / family) as checkpoint:
        config = checkpoint.model
    assert config is not None, "the small models have configs"
    names = [parameter.name for parameter in parameters(config)]
    records = {name: Amax(1.0 + 3.0 * (i * 0.61803398875 % 1.0), 9) for i, name in enumerate(names)}
    layout = target_layout(config, recipe_named(recipe, config))
    calibration = Calibration.from_records(
        {
            parameter.name: records[parameter.name]
            for parameter in parameters(config)
            if parameter.kind == "linear"
        }
    )
    QuantiseJob(TINY / family, layout, calibration=calibration).run(target)


def outcome(tamper: Tamper, touched: Sequence[str], findings: Iterable[Finding]) -> str:
    """Say how well findings tell what a tamper did."""
    found = list(findings)
    if not tamper.effect:
        bad = [finding for finding in found if finding.level is not Level.NOTE]
        return "alarm" if bad else "ok"
    right = [
        finding for finding in found if finding.rule in tamper.rules and _is_there(finding, touched)
    ]
    errors = [finding for finding in found if finding.level is Level.ERROR]
    if any(finding.level is Level.ERROR for finding in right):
        return "ok"
    if errors:
        return "vague"
    levels = {finding.level for finding in found}
    for level, name in ((Level.WARNING, "warning"), (Level.NOTE, "note")):
        if level in levels:
            return name
    return "missed"


def _is_there(finding: Finding, touched: Sequence[str]) -> bool:
    """Tell whether a finding speaks of the layer that was touched, or of the whole."""
    layers = {int(found[1]) for name in touched for found in _LAYER.finditer(name)}
    if not layers:
        return True
    text = json.dumps(finding.to_json())
    named = set(finding.layers) | {int(number) for number in _LAYER.findall(text)}
    return not named or bool(layers & named)


def run_case(folder: Path, seed: int) -> CaseResult:
    """Damage one checkpoint in one way, and audit it."""
    kind, index = SOURCES[seed % len(SOURCES)], seed // len(SOURCES)
    tamper = None if index == 0 else TAMPERS[(index - 1) % len(TAMPERS)]
    family = kind.partition("-")[0]
    world = World.read(folder / kind, seed)
    touched: list[str] = []
    if tamper is not None:
        try:
            touched = tamper.plant(world)
        except (LookupError, ValueError):
            return CaseResult(seed, family, "skipped", f"{kind}: {tamper.name}")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as at:
        target = Path(at) / "tampered"
        world.write(target)
        beside = _findings(AuditRequest(target, against=TINY / family))
        loaded = _findings(AuditRequest(target, numbers=False, loader="vllm"))
    usual = json.loads((folder / f"{kind}.json").read_text())  # what a small model itself shows
    loaded = [finding for finding in loaded if finding.rule not in usual]
    own = [finding for finding in beside if not finding.rule.startswith("against.")]
    judged = tamper or _HEALTHY
    fields = {
        "audit": outcome(judged, touched, own),
        "against": outcome(judged, touched, beside),
        "loader": outcome(judged, touched, loaded),
        "effect": judged.effect,
        "name": f"{kind}: {judged.name}",
        "touched": touched[:4],
        "findings": [
            f"{finding.level} {finding.rule}: {finding.message[:160]}"
            for finding in beside
            if finding.level is not Level.NOTE or judged.effect
        ][:8],
    }
    return CaseResult(seed, family, str(fields["against"]), json.dumps(fields))


def _findings(wanted: AuditRequest) -> list[Finding]:
    """Audit; a refusal tells no cause, and counts as nothing found but an error without a rule."""
    try:
        return list(audit(wanted).findings)
    except Refused as error:
        return [_refused(error)]


def _refused(error: Refused) -> Finding:
    from degarble.harness.checkpoint.audit.findings import Finding  # noqa: PLC0415

    message = f"{error.name} = {error.shown_value}, expected {error.expectation}. {error.remedy}"
    return Finding(Level.ERROR, "refused", None, None, None, message, {}, error.remedy)


def _healthy() -> Tamper:
    from degarble.suites.campaigns.tamper_values import Tamper  # noqa: PLC0415

    return Tamper("healthy", lambda _: [], frozenset(), effect=False)


_HEALTHY = _healthy()


def table(results: Iterable[CaseResult]) -> str:
    """Return outcomes by family and way of auditing, of tampers with an effect."""
    cases = [
        (result.kind, json.loads(result.detail))
        for result in results
        if result.outcome != "skipped"
    ]
    counts: Counter[tuple[str, str, str]] = Counter()
    for family, case in cases:
        for mode in ("audit", "against", "loader"):
            counts[family, mode if case["effect"] else f"{mode}, no effect", case[mode]] += 1
    lines = [f"| | n | {' | '.join(_OUTCOMES)} |", "| --- " * (len(_OUTCOMES) + 2) + "|"]
    for family, mode in sorted({key[:2] for key in counts}):
        cells = [counts[family, mode, each] for each in _OUTCOMES]
        lines.append(f"| {family} {mode} | {sum(cells)} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> int:
    """Run the campaign."""
    parser = arguments(__doc__ or "", count=0)
    parser.add_argument("--only", default="", help="run tampers whose name contains this")
    asked = parser.parse_args()
    total = len(SOURCES) * (len(TAMPERS) + 1)
    seeds = range(asked.seed, asked.seed + (asked.count or total))
    chosen = [seed for seed in seeds if asked.only in _name(seed)]
    folder = asked.out / "sources"
    for kind in SOURCES:
        if not (folder / kind / "manifest.json").exists():
            shutil.rmtree(folder / kind, ignore_errors=True)
            write_source(kind, folder / kind)
        usual = {finding.rule for finding in _findings(AuditRequest(folder / kind, False, "vllm"))}
        (folder / f"{kind}.json").write_text(json.dumps(sorted(usual)))
    report = run_cases("tampers", partial(run_case, folder), chosen, asked.jobs)
    report.results = [result for result in report.results if result.outcome != "skipped"]
    report.write(asked.out)
    summary = table(report.results)
    (asked.out / "tampers.md").write_text(summary + "\n", encoding="utf-8")
    sys.stdout.write(f"{summary}\n")
    details = [json.loads(result.detail) for result in report.results]
    effective = [each for each in details if each["effect"]]
    right = sum(each["against"] == "ok" for each in effective)
    alarms = [each for each in details if not each["effect"] and each["against"] != "ok"]
    return int(bool(alarms) or right < TARGET * len(effective))


def _name(seed: int) -> str:
    index = seed // len(SOURCES)
    return SOURCES[seed % len(SOURCES)] + (
        ": " + TAMPERS[(index - 1) % len(TAMPERS)].name if index else ": healthy"
    )


if __name__ == "__main__":
    sys.exit(main())
