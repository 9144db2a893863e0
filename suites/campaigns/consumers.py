"""Load what `quantise` and `convert` write in its consumer: names, and perplexity beside ours.

    python -m degarble.suites.campaigns.consumers --jobs 2 --out DIR [--vllm .venv-vllm/bin/python]

One case is a trained model made wide (`consumer_models`) and a recipe: eight rows, one as quantised
and one a target. "ours" is its perplexity by the definition, as degarble reads the file; the
consumer's own is
  transformers: that of its own model, loaded as a user would, in float32
  vLLM: that of the references over vLLM's parameters, which its own loader filled. vLLM computes
    nothing: its wheel's kernels are CUDA's, and V4's for the CPU are in no wheel
  degarble, DeepGEMM's operand: that of transformers over weights decoded apart from degarble
Of this operand and of fused compressors ours is over decoded weights: no loader of ours reads them.
A row that was not loaded is printed as "not shown" with the reason. `--consumer transformers` runs
the rows of one consumer and lists the others as not run. About 60 s a case on one core.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.base.errors import Refused
from degarble.harness.checkpoint.transform.convert.job import CONVERSIONS, convert, prove
from degarble.harness.checkpoint.transform.quantise.calibration import Amax, Calibration
from degarble.harness.checkpoint.transform.quantise.job import QuantiseJob, target_layout
from degarble.harness.checkpoint.view.consumers import (
    COMPRESSORS,
    DEEPGEMM,
    OWN,
    PARAMETERS,
    TRANSFORMERS,
    VLLM,
    VLLM_NVFP4,
    consumer_of,
    consumer_of_recipe,
)
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.model.parameters import parameters
from degarble.harness.model.recipes import recipe_named
from degarble.harness.model.types import RECIPE_NAMES
from degarble.references import tiny
from degarble.references.tiny import figures, language
from degarble.suites.campaigns.consumer_models import decoded, widened
from degarble.suites.campaigns.runner import CampaignReport, CaseResult, arguments, run_cases
from degarble.suites.checkpoint.transform.loading_cases import (
    loaded_by_transformers,
    our_logits,
    perplexity,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

TRAINED = Path(tiny.__file__).parent / "v1"
FAMILIES = {"v4": "deepseek_v4", "v32": "deepseek_v32"}
TEXT = language.document(figures.HELD_OUT).ids[:256]
CLOSE = 1e-5  # of ours
_OF_VLLM = frozenset({VLLM.name, COMPRESSORS.name, PARAMETERS.name})
NOT_SHOWN = frozenset({"refused", "no vLLM", "not built", "not read back", "died"})
HEAD = "| family | recipe | --to | consumer | missing | unexpected | ours | its own | result |"


class Outcome(NamedTuple):
    """What came of a row, as `CaseResult` has it."""

    word: str
    detail: str


class Asked(NamedTuple):
    """One row of the table; `to` empty: what `quantise` wrote, as it is."""

    family: str
    recipe: str
    to: str

    @property
    def consumer(self) -> str:
        """The name of who reads it."""
        family = FAMILIES[self.family]
        consumer = (
            consumer_of(self.to, family) if self.to else consumer_of_recipe(self.recipe, family)
        )
        if consumer is VLLM_NVFP4 and self.recipe in ("official", "nvfp4-experts"):  # FP8 stays
            return OWN.name
        return consumer.name

    @property
    def cells(self) -> str:
        """What is known of a row before it runs."""
        return f"{self.family} | {self.recipe} | {self.to or '-'} | {self.consumer}"


_NOT_BUILT = {
    Asked("v32", "nvfp4-experts", "vllm"): "vLLM 0.33 builds no NVFP4 beside FP8 for V3.2",
}


def asked() -> list[Asked]:
    """List every row."""
    return [
        Asked(family, recipe, to)
        for family in FAMILIES
        for recipe in RECIPE_NAMES
        for to in ("", *CONVERSIONS)
    ]


def rows_of(seed: int) -> dict[int, Asked]:
    """Return the rows of one case, by their place in the table."""
    size = 1 + len(CONVERSIONS)
    return {place: asked()[place] for place in range(seed * size, (seed + 1) * size)}


def load(seed: int, vllm: Path | None, consumers: frozenset[str]) -> CaseResult:
    """Write the checkpoints of one recipe, load each in its consumer, and tell of all rows."""
    rows = {place: row for place, row in rows_of(seed).items() if row.consumer in consumers}
    first = next(iter(rows_of(seed).values()))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        quantised = _quantised(first, folder)
        found, targets = {}, {}
        for place, row in rows.items():
            try:
                targets[place] = _target(row, quantised, folder)
            except Refused as error:
                text = str(error).partition(": expected")[0].replace(f"{folder}/", "")
                found[place] = Outcome("refused", text)
            except AssertionError as error:
                found[place] = Outcome("error", str(error))
        found |= _in_transformers(rows, targets, folder)
        found |= _in_vllm(rows, targets, folder, vllm)
    outcomes = json.dumps({place: list(found[place]) for place in sorted(found)})
    return CaseResult(seed, f"{first.family} {first.recipe}", "ok", outcomes)


def _quantised(row: Asked, folder: Path) -> Path:
    source, made = folder / "source", folder / "quantised"
    widened(TRAINED / row.family, source)
    with Checkpoint.open(source) as checkpoint:
        config = checkpoint.model
    assert config is not None
    recipe = recipe_named(row.recipe, config)
    reached = {
        parameter.name: Amax(8.0, 7)
        for parameter in parameters(config)
        if recipe.format_of(parameter).activation == "NVFP4"
    }
    calibration = Calibration.from_records(reached) if reached else None
    QuantiseJob(source, target_layout(config, recipe), calibration=calibration).run(made)
    return made


def _target(row: Asked, quantised: Path, folder: Path) -> Path:
    if not row.to:
        return quantised
    out = folder / row.to
    convert(quantised, out, row.to)
    proof = prove(quantised, out)
    assert proof.holds, list(proof.lines())[:5]
    return out


def _in_transformers(
    rows: dict[int, Asked], targets: dict[int, Path], folder: Path
) -> dict[int, Outcome]:
    """Compare ours of each target with transformers' of it, or of its decoded weights."""
    given = {}
    for place, target in targets.items():
        if rows[place].consumer == TRANSFORMERS.name:
            given[place] = target
        elif rows[place].consumer in (OWN.name, DEEPGEMM.name):
            given[place] = folder / f"{target.name}-decoded"
            decoded(target, given[place])
    found = {}
    answers = loaded_by_transformers(list(given.values()), TEXT) if given else []
    for place, theirs in zip(given, answers, strict=True):
        fields = theirs.told
        if theirs.logits is None:
            found[place] = Outcome("error", str(fields["error"])[:400])
        elif not theirs.is_clean:
            missing = [*fields["missing_keys"], *fields["mismatched_keys"]]
            found[place] = _other_names(missing, fields["unexpected_keys"])
        else:
            # No loader of ours reads DeepGEMM's operand: its proof compares values.
            own = given if rows[place].consumer == DEEPGEMM.name else targets
            found[place] = _compared(own[place], theirs.logits)
    return found


def _in_vllm(
    rows: dict[int, Asked], targets: dict[int, Path], folder: Path, vllm: Path | None
) -> dict[int, Outcome]:
    """Compare ours of each target with that of vLLM's parameters, filled from it."""
    mine = {p: path for p, path in targets.items() if rows[p].consumer in _OF_VLLM}
    if vllm is None:
        return dict.fromkeys(mine, Outcome("no vLLM", "give --vllm"))
    found = {}
    for options in ([], ["--by-own-names"]):
        given = {p: path for p, path in mine.items() if bool(options) == (rows[p].to == "vllm")}
        fields = _asked_of_vllm(vllm, list(given.values()), folder / "loaded", options)
        for place, target in given.items():
            ours = target
            if rows[place].consumer == COMPRESSORS.name:  # no loader of ours reads it
                ours = folder / f"{target.name}-decoded"
                decoded(target, ours)
            found[place] = _filled(fields[target.name], target, ours, folder / "loaded")
            if found[place].word == "names" and rows[place] in _NOT_BUILT:
                found[place] = Outcome("not built", _NOT_BUILT[rows[place]])
    return found


def _asked_of_vllm(
    vllm: Path, folders: list[Path], out: Path, options: list[str]
) -> dict[str, dict[str, Any]]:
    if not folders:
        return {}
    command = [str(vllm), "-m", "degarble.suites.vllm.loading_model", str(out)]
    done = subprocess.run(
        [*command, *map(str, folders), *options], capture_output=True, text=True, check=False
    )
    lines = [json.loads(each) for each in done.stdout.splitlines() if each.startswith('{"check')]
    died = {"error": done.stderr[-400:]}
    return {folder.name: died for folder in folders} | {each["checkpoint"]: each for each in lines}


def _filled(report: dict[str, Any], target: Path, ours: Path, out: Path) -> Outcome:
    if "error" in report:
        return Outcome("error", report["error"])
    if report["missing"] or report["unexpected"]:
        return _other_names(report["missing"], report["unexpected"])
    try:
        theirs = our_logits(out / target.name, TEXT)
    except Refused as error:
        return Outcome("not read back", str(error)[:400])
    return _compared(ours, theirs)


def _other_names(missing: list[str], unexpected: list[str]) -> Outcome:
    text = f"{len(missing)} | {len(unexpected)} | - | - | names: "
    return Outcome("names", text + ", ".join([*missing, *unexpected])[:300])


def _compared(folder: Path, theirs: Tensor) -> Outcome:
    try:
        ours = our_logits(folder, TEXT)
    except Refused as error:
        return Outcome("not read back", str(error)[:400])
    mine, their = perplexity(ours, TEXT), perplexity(theirs, TEXT)
    same = math.isclose(mine, their, rel_tol=CLOSE)  # False beside NaN
    text = f"0 | 0 | {mine:.7f} | {their:.7f} | {'same' if same else 'perplexity apart'}"
    return Outcome("ok" if same else "perplexity", text)


def line(result: CaseResult) -> str:
    """Return one row of the printed table."""
    cells = asked()[result.seed].cells
    if result.outcome in ("ok", "perplexity", "names"):
        return f"| {cells} | {result.detail} |"
    word = "not shown: " if result.outcome in NOT_SHOWN else ""
    reason = " ".join(result.detail.split()).replace("|", "/")
    text = f"{word}{result.outcome}" + (f", {reason}" if reason else "")
    return f"| {cells} | - | - | - | - | {text} |"


def failures(results: Iterable[CaseResult]) -> list[CaseResult]:
    """Return what was loaded otherwise than declared; what was not shown is no failure."""
    return [
        result for result in results if result.outcome != "ok" and result.outcome not in NOT_SHOWN
    ]


def by_row(cases: Iterable[CaseResult]) -> list[CaseResult]:
    """Return one result a row; all rows of a case that did not end have its outcome."""
    found = []
    for case in cases:
        ended = case.outcome == "ok"
        outcomes = json.loads(case.detail) if ended else {}
        for place, row in rows_of(case.seed).items():
            if ended and str(place) not in outcomes:
                continue
            outcome, detail = outcomes.get(str(place), (case.outcome, case.detail))
            kind = f"{row.family} {row.recipe} {row.to or 'as quantised'} ({row.consumer})"
            found.append(CaseResult(place, kind, outcome, detail))
    return found


def main() -> None:
    """Run every row once, print the table, and end with 1 where a consumer does not load."""
    rows = asked()
    parser = arguments(__doc__ or "", count=len(rows) // (1 + len(CONVERSIONS)))
    parser.add_argument("--vllm", type=Path, help="Python of an environment with vLLM 0.33")
    consumers = sorted({row.consumer for row in rows})
    parser.add_argument("--consumer", choices=consumers, help="run the rows of this one alone")
    given = parser.parse_args()
    chosen = frozenset([given.consumer] if given.consumer else consumers)
    vllm = given.vllm.absolute() if given.vllm else None
    case = partial(load, vllm=vllm, consumers=chosen)
    seeds = range(given.seed, given.seed + given.count)
    found = by_row(run_cases("consumers", case, seeds, given.jobs).results)
    CampaignReport("consumers", found).write(given.out)
    results = {result.seed: result for result in found}
    lines = [HEAD, "|---" * HEAD.count(" | ") + "|---|"]
    lines += [
        line(results.get(place) or CaseResult(place, "", "not run")) for place in range(len(rows))
    ]
    table = "\n".join(lines)
    (given.out / "consumers-table.md").write_text(table + "\n", encoding="utf-8")
    print(table)  # noqa: T201
    sys.exit(1 if failures(found) else 0)


if __name__ == "__main__":
    main()
