"""Load what `quantise` and `convert` write in its consumer: names, and perplexity beside ours.

    python -m degarble.suites.campaigns.consumers --jobs 2 --out DIR [--vllm .venv-vllm/bin/python]

One case is a trained small model, a recipe and a target. transformers loads it as a user would and
computes; vLLM's own loader fills its parameters, and the references compute with these. Without
`--vllm` its cases are left out and said so. About 20 s a case on one core.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from degarble.harness.anatomy.parameters import parameters
from degarble.harness.anatomy.recipes import RECIPE_NAMES, recipe_named
from degarble.harness.checkpoint.calibration import Amax, Calibration
from degarble.harness.checkpoint.consumers import TRANSFORMERS, consumer_of, consumer_of_recipe
from degarble.harness.checkpoint.convert.job import convert
from degarble.harness.checkpoint.convert.prove import prove
from degarble.harness.checkpoint.convert.registry import CONVERSIONS
from degarble.harness.checkpoint.quantise_job import QuantiseJob, run_job, target_layout
from degarble.harness.checkpoint.view import Checkpoint
from degarble.harness.errors import Refused
from degarble.references import tiny
from degarble.references.tiny import figures, language
from degarble.suites.campaigns.runner import CaseResult, arguments, run_cases
from degarble.suites.checkpoint.convert.loading_cases import (
    loaded_by_transformers,
    our_logits,
    perplexity,
)

TRAINED = Path(tiny.__file__).parent / "v1"
FAMILIES = {"v4": "deepseek_v4", "v32": "deepseek_v32"}
TOKENS = 256
CLOSE = 1e-5  # of ours
VLLM = "DEGARBLE_VLLM_PYTHON"
# Blocks of 128 rows: vLLM's fused parameters cut through those of models as narrow as these, so
# FP8 is loaded from synthetic models by suites/plugins/vllm/test_installed_loaders.py.
_FP8 = frozenset({"official", "nvfp4-experts", "fp8-block"})


class Asked(NamedTuple):
    """One row of the table; `to` empty: what `quantise` wrote, as it is."""

    family: str
    recipe: str
    to: str

    @property
    def consumer(self) -> str:
        """The name of who reads it."""
        family = FAMILIES[self.family]
        found = consumer_of(self.to, family) if self.to else consumer_of_recipe(self.recipe, family)
        return found.name


def asked() -> list[Asked]:
    """List every row."""
    return [
        Asked(family, recipe, to)
        for family in FAMILIES
        for recipe in RECIPE_NAMES
        for to in ("", *CONVERSIONS)
    ]


def load(seed: int) -> CaseResult:
    """Write one row's checkpoint, and load it in its consumer."""
    row = asked()[seed % len(asked())]
    kind = f"{row.family} {row.recipe} {row.to or 'as quantised'} ({row.consumer})"
    with tempfile.TemporaryDirectory() as folder:
        try:
            target = _written(row, Path(folder))
        except Refused as error:
            return CaseResult(seed, kind, "refused", str(error).partition(": expected")[0])
        if row.consumer == TRANSFORMERS.name:
            return _in_transformers(seed, kind, target)
        if "vLLM" not in row.consumer or row.to == "vllm":
            return CaseResult(seed, kind, "no loader", "names proven, loaded by nobody")
        if row.to in _FP8 or row.recipe in _FP8:
            return CaseResult(seed, kind, "other suite", "FP8: loaded from synthetic models")
        if VLLM not in os.environ:
            return CaseResult(seed, kind, "no vLLM", "give --vllm")
        return _in_vllm(seed, kind, target)


def _written(row: Asked, folder: Path) -> Path:
    source, made, out = TRAINED / row.family, folder / "quantised", folder / "converted"
    with Checkpoint.open(source) as checkpoint:
        config = checkpoint.model
    assert config is not None
    recipe = recipe_named(row.recipe, config)
    reached = {
        each.name: Amax(8.0, 7)
        for each in parameters(config)
        if recipe.format_of(each).activation == "NVFP4"
    }
    calibration = Calibration.of(reached) if reached else None
    run_job(QuantiseJob(source, target_layout(config, recipe), calibration=calibration), made)
    if not row.to:
        return made
    convert(made, out, row.to)
    proof = prove(made, out)
    assert proof.holds, list(proof.lines())[:5]
    return out


def _in_transformers(seed: int, kind: str, target: Path) -> CaseResult:
    tokens = language.document(figures.HELD_OUT).ids[:TOKENS]
    (theirs,) = loaded_by_transformers([target], tokens)
    if not theirs.is_clean or theirs.logits is None:
        return CaseResult(seed, kind, "names", json.dumps(theirs.told)[:400])
    return _compared(seed, kind, our_logits(target, tokens), theirs.logits)


def _in_vllm(seed: int, kind: str, target: Path) -> CaseResult:
    tokens = language.document(figures.HELD_OUT).ids[:TOKENS]
    out = target.parent / "loaded"
    command = [os.environ[VLLM], "-m", "degarble.suites.plugins.vllm.loading_model", str(out)]
    done = subprocess.run([*command, str(target)], capture_output=True, text=True, check=False)
    told = next((each for each in done.stdout.splitlines() if each.startswith('{"check')), "{}")
    found = json.loads(told)
    if not found or "error" in found or found["missing"] or found["unexpected"]:
        return CaseResult(seed, kind, "names", told[:400] or done.stderr[-400:])
    try:
        theirs = our_logits(out / target.name, tokens)
    except Refused as error:
        return CaseResult(seed, kind, "not read back", str(error)[:400])
    return _compared(seed, kind, our_logits(target, tokens), theirs)


def _compared(seed: int, kind: str, ours: object, theirs: object) -> CaseResult:
    tokens = language.document(figures.HELD_OUT).ids[:TOKENS]
    figures_ = [perplexity(each, tokens) for each in (ours, theirs)]  # type: ignore[arg-type]
    same = math.isclose(*figures_, rel_tol=CLOSE)
    told = f"{figures_[0]:.7f} / {figures_[1]:.7f}"
    return CaseResult(seed, kind, "ok" if same else "perplexity", told)


def main() -> None:
    """Run every row once, print the table, and end with 1 where a consumer does not load."""
    parser = arguments(__doc__ or "", count=len(asked()))
    parser.add_argument("--vllm", type=Path, help="Python of an environment with vLLM 0.33")
    given = parser.parse_args()
    if given.vllm:
        os.environ[VLLM] = str(given.vllm.absolute())
    seeds = range(given.seed, given.seed + given.count)
    report = run_cases("consumers", load, seeds, given.jobs)
    report.write(given.out)
    lines = ["| checkpoint (consumer) | loaded | perplexity ours / consumer's |", "|---|---|---|"]
    shown = [each for each in report.results if each.outcome != "refused"]
    lines += [f"| {each.kind} | {each.outcome} | {each.detail} |" for each in shown]
    table = "\n".join(lines)
    (given.out / "consumers-table.md").write_text(table + "\n", encoding="utf-8")
    print(table)  # noqa: T201
    failed = [each for each in shown if each.outcome in ("names", "perplexity", "died")]
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
