"""Load what `quantise` and `convert` write in its consumer: names, and perplexity beside ours.

    python -m degarble.suites.campaigns.consumers --jobs 2 --out DIR [--vllm .venv-vllm/bin/python]

One case is a trained model made wide (`consumer_models`), a recipe and a target. "ours" is its
perplexity by the definition, as degarble reads the file; the consumer's own is
  transformers: that of its own model, loaded as a user would, in float32
  vLLM: that of the references over vLLM's parameters, which its own loader filled. vLLM computes
    nothing: its wheel's kernels are CUDA's, and V4's for the CPU are in no wheel
  degarble, DeepGEMM's operand: that of transformers over weights decoded apart from degarble
A row that was not loaded is printed as "not shown" with the reason. `--consumer transformers` runs
the rows of one consumer and lists the others as not run. About 20 s a case on one core.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.anatomy.parameters import parameters
from degarble.harness.anatomy.recipes import RECIPE_NAMES, recipe_named
from degarble.harness.checkpoint.calibration import Amax, Calibration
from degarble.harness.checkpoint.consumers import (
    DEEPGEMM,
    OWN,
    TRANSFORMERS,
    consumer_of,
    consumer_of_recipe,
)
from degarble.harness.checkpoint.convert.job import convert
from degarble.harness.checkpoint.convert.prove import prove
from degarble.harness.checkpoint.convert.registry import CONVERSIONS
from degarble.harness.checkpoint.quantise_job import QuantiseJob, run_job, target_layout
from degarble.harness.checkpoint.view import Checkpoint
from degarble.harness.errors import Refused
from degarble.references import tiny
from degarble.references.tiny import figures, language
from degarble.suites.campaigns.consumer_models import decoded, widened
from degarble.suites.campaigns.runner import CaseResult, arguments, run_cases
from degarble.suites.checkpoint.convert.loading_cases import (
    loaded_by_transformers,
    our_logits,
    perplexity,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

TRAINED = Path(tiny.__file__).parent / "v1"
FAMILIES = {"v4": "deepseek_v4", "v32": "deepseek_v32"}
TOKENS = 256
CLOSE = 1e-5  # of ours
VLLM = "DEGARBLE_VLLM_PYTHON"
OWN_NAMES = "--by-own-names"
NOT_SHOWN = frozenset({"refused", "no vLLM", "not read back", "died"})
HEAD = "| family | recipe | --to | consumer | missing | unexpected | ours | its own | result |"


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

    @property
    def cells(self) -> str:
        """What is known of a row before it runs."""
        return f"{self.family} | {self.recipe} | {self.to or '-'} | {self.consumer}"


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
    row = asked()[seed]
    kind = f"{row.family} {row.recipe} {row.to or 'as quantised'} ({row.consumer})"
    with tempfile.TemporaryDirectory() as folder:
        try:
            target = _written(row, Path(folder))
        except Refused as error:
            told = str(error).partition(": expected")[0].replace(f"{folder}/", "")
            return CaseResult(seed, kind, "refused", told)
        except AssertionError as error:
            return CaseResult(seed, kind, "error", str(error))
        if row.consumer == TRANSFORMERS.name:
            return _in_transformers(seed, kind, target, target)
        if row.consumer in (OWN.name, DEEPGEMM.name):
            plain = Path(folder) / "decoded"
            decoded(target, plain)
            return _in_transformers(seed, kind, target, plain)
        if VLLM not in os.environ:
            return CaseResult(seed, kind, "no vLLM", "give --vllm")
        return _in_vllm(seed, kind, target, [OWN_NAMES] if row.to == "vllm" else [])


def _written(row: Asked, folder: Path) -> Path:
    source, made, out = folder / "source", folder / "quantised", folder / "converted"
    widened(TRAINED / row.family, source)
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


def _in_transformers(seed: int, kind: str, target: Path, given: Path) -> CaseResult:
    """Compare ours of the target with transformers' of what it is given."""
    tokens = language.document(figures.HELD_OUT).ids[:TOKENS]
    (theirs,) = loaded_by_transformers([given], tokens)
    told = theirs.told
    if theirs.logits is None:
        return CaseResult(seed, kind, "error", str(told["error"])[:400])
    if not theirs.is_clean:
        return _other_names(
            seed, kind, [*told["missing_keys"], *told["mismatched_keys"]], told["unexpected_keys"]
        )
    return _compared(seed, kind, our_logits(target, tokens), theirs.logits)


def _in_vllm(seed: int, kind: str, target: Path, options: list[str]) -> CaseResult:
    tokens = language.document(figures.HELD_OUT).ids[:TOKENS]
    out = target.parent / "loaded"
    command = [os.environ[VLLM], "-m", "degarble.suites.plugins.vllm.loading_model", str(out)]
    done = subprocess.run(
        [*command, str(target), *options], capture_output=True, text=True, check=False
    )
    told = next((each for each in done.stdout.splitlines() if each.startswith('{"check')), "{}")
    found = json.loads(told)
    if not found or "error" in found:
        return CaseResult(seed, kind, "error", found.get("error", done.stderr[-400:]))
    if found["missing"] or found["unexpected"]:
        return _other_names(seed, kind, found["missing"], found["unexpected"])
    try:
        theirs = our_logits(out / target.name, tokens)
    except Refused as error:
        return CaseResult(seed, kind, "not read back", str(error)[:400])
    return _compared(seed, kind, our_logits(target, tokens), theirs)


def _other_names(seed: int, kind: str, missing: list[str], unexpected: list[str]) -> CaseResult:
    told = f"{len(missing)} | {len(unexpected)} | - | - | names: "
    return CaseResult(seed, kind, "names", told + ", ".join([*missing, *unexpected])[:300])


def _compared(seed: int, kind: str, ours: Tensor, theirs: Tensor) -> CaseResult:
    tokens = language.document(figures.HELD_OUT).ids[:TOKENS]
    mine, their = perplexity(ours, tokens), perplexity(theirs, tokens)
    same = math.isclose(mine, their, rel_tol=CLOSE)  # False beside NaN
    told = f"0 | 0 | {mine:.7f} | {their:.7f} | {'same' if same else 'perplexity apart'}"
    return CaseResult(seed, kind, "ok" if same else "perplexity", told)


def line(result: CaseResult) -> str:
    """Return one row of the printed table."""
    cells = asked()[result.seed].cells
    if result.outcome in ("ok", "perplexity", "names"):
        return f"| {cells} | {result.detail} |"
    word = "not shown: " if result.outcome in NOT_SHOWN else ""
    reason = " ".join(result.detail.split()).replace("|", "/")
    told = f"{word}{result.outcome}" + (f", {reason}" if reason else "")
    return f"| {cells} | - | - | - | - | {told} |"


def failures(results: Iterable[CaseResult]) -> list[CaseResult]:
    """Return what was loaded otherwise than declared; what was not shown is no failure."""
    return [each for each in results if each.outcome != "ok" and each.outcome not in NOT_SHOWN]


def main() -> None:
    """Run every row once, print the table, and end with 1 where a consumer does not load."""
    parser = arguments(__doc__ or "", count=len(asked()))
    parser.add_argument("--vllm", type=Path, help="Python of an environment with vLLM 0.33")
    consumers = sorted({each.consumer for each in asked()})
    parser.add_argument("--consumer", choices=consumers, help="run the rows of this one alone")
    given = parser.parse_args()
    if given.vllm:
        os.environ[VLLM] = str(given.vllm.absolute())
    rows = asked()
    chosen = [
        seed
        for seed in range(given.seed, min(given.seed + given.count, len(rows)))
        if given.consumer in (None, rows[seed].consumer)
    ]
    report = run_cases("consumers", load, chosen, given.jobs)
    report.write(given.out)
    results = {each.seed: each for each in report.results}
    lines = [HEAD, "|---" * HEAD.count(" | ") + "|---|"]
    lines += [
        line(results.get(seed) or CaseResult(seed, "", "not run")) for seed in range(len(rows))
    ]
    table = "\n".join(lines)
    (given.out / "consumers-table.md").write_text(table + "\n", encoding="utf-8")
    print(table)  # noqa: T201
    sys.exit(1 if failures(report.results) else 0)


if __name__ == "__main__":
    main()
