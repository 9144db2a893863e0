"""Random configs of both families: transformers computes, saves, and we read, run and quantise.

Each case is one model of suites/references/random_models.py, the family by turns. Its logits must
be transformers', in float64 and in every way of calling; then `generate`, `capture` and `check`
must work on the checkpoint, and `quantise` must work or refuse by name.
"""

from __future__ import annotations

import io
import logging
import sys
import tempfile
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from degarble.suites.campaigns.runner import CaseResult, arguments, run_campaign
from degarble.suites.references.random_comparison import disagreement
from degarble.suites.references.random_models import MODELS, RandomModel, drawn
from degarble.suites.references.random_oracle import answer

FAMILIES = tuple(MODELS)
RECIPES = ("bf16", "official", "nvfp4-experts", "nvfp4-full")
WORDS = 4  # of the prompt


def case(seed: int) -> CaseResult:
    """Compare one model, then give its checkpoint to the command line."""
    model = drawn(FAMILIES[seed % len(FAMILIES)], seed)
    logging.disable(logging.WARNING)  # transformers says what it thinks of a config
    with tempfile.TemporaryDirectory(prefix="random-config-") as folder:
        base = Path(folder)
        checkpoint = base / "checkpoint"
        try:
            theirs = answer(model, checkpoint)
        except Exception:  # noqa: BLE001  whatever theirs raises, there is nothing to compare
            return _result(seed, model, "transformers fails", traceback.format_exc())
        try:
            text = disagreement(model, checkpoint, theirs)
        except Exception:  # noqa: BLE001  a failure of ours is what is looked for
            return _result(seed, model, "crash", traceback.format_exc())
        if text:
            return _result(seed, model, "differs", text)
        outcome, text = _commands(model, checkpoint, base, RECIPES[seed // 2 % len(RECIPES)])
        return _result(seed, model, outcome, text)


def _result(seed: int, model: RandomModel, outcome: str, words: str) -> CaseResult:
    detail = "" if outcome == "ok" else f"{words}\n{model}"
    return CaseResult(seed, model.family, outcome, detail)


def _commands(model: RandomModel, checkpoint: Path, base: Path, recipe: str) -> tuple[str, str]:
    from degarble.harness.cli.main import main  # noqa: PLC0415  behind transformers' imports
    from degarble.suites.serve.talking_cases import write_tokenizer  # noqa: PLC0415  as above

    words = tuple(f"w{n}" for n in range(model.arguments["vocab_size"]))
    write_tokenizer(checkpoint, words)
    prompt = ("--prompt", " ".join(words[:WORDS]), "--max-new-tokens", "3")
    quantised, captured = str(base / "quantised"), str(base / "capture")
    for line in (
        ("generate", str(checkpoint), *prompt),
        ("capture", str(checkpoint), "--out", captured, *prompt),
        ("check", captured, "--reference", str(checkpoint)),
        ("quantise", str(checkpoint), quantised, "--recipe", recipe),
        ("generate", quantised, *prompt),
    ):
        out = io.StringIO()
        with redirect_stdout(out), redirect_stderr(out):
            status = main(line)
        may_refuse = model.refused or quantised in line
        if status != 0 and not (may_refuse and status == 2):
            return f"status {status}", f"{' '.join(line)}\n{out.getvalue()}"
        # Weights are quantised by their names alone, whatever the router would do with them.
        if model.refused and line[0] != "quantise" and status != 2:
            return "accepted", f"{' '.join(line)}: {status}\n{out.getvalue()}"
    return "ok", ""


def main() -> int:
    """Run the campaign; 1 where any case fails."""
    return run_campaign("random_configs", case, arguments(__doc__ or "", count=120).parse_args())


if __name__ == "__main__":
    sys.exit(main())
