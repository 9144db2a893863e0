"""Judge healthy runs of 16 architectures in every format and way to multiply: no alarm is right.

    python -m degarble.suites.campaigns.healthy_formats --jobs 2 --resume [--only "qwen3 NVFP4"]

A case is a tiny model of transformers with random weights, drawn by the case's name. Its linears
and experts hold what their codes stand for, and multiply as some engine does: plain inputs
(transformers, W4A16), exact quantised operands (W4A4), or operands decoded to BF16 (emulation).
"""

from __future__ import annotations

import sys
import traceback
import zlib
from functools import partial
from typing import Any

import torch

from degarble.harness.report.verdict import Verdict
from degarble.suites.campaigns.runner import CaseResult, arguments, run_campaign
from degarble.suites.engine.quantised_runs import (
    DECODED,
    EXACT,
    INPUTS,
    PLAIN,
    Emulation,
    Inputs,
    QuantisedRun,
)
from degarble.suites.references.traced.traced_models import (
    built,
    config_of,
    raw_config,
    weights_of,
)
from degarble.suites.support.traced_runs import judged_run, prompt, recorded

MODELS = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "glm4_moe", "glm_moe_dsa", "deepseek_v3",
    "gpt_oss", "mixtral", "gemma3_text", "phi3", "minimax_m2", "nemotron_h", "olmo2", "granite",
)  # fmt: skip
_WITHOUT_SDPA = frozenset({"gpt_oss"})  # transformers has none with sinks
# Weights alone are quantised.
WEIGHTS = {
    f"{name} weights": Inputs(stored, "BF16")
    for name, stored in {
        "NVFP4": "NVFP4", "MXFP4": "MXFP4", "MXFP8": "MXFP8", "FP8 row": "FP8_ROW",
        "INT4 group": "UINT4_G32", "INT8 group": "INT8_G32",
    }.items()
}  # fmt: skip
_WIDE = {"FP8 block"}  # whose blocks are wider than the tiny models
_BF16, _FP32 = torch.bfloat16, torch.float32
_PLAIN = {"eager float32": _FP32, "eager bfloat16": _BF16, "sdpa bfloat16": _BF16}
_ENGINES: dict[str, tuple[Emulation, torch.dtype]] = {
    "exact": (EXACT, _BF16), "decoded": (DECODED, _BF16), "float32": (EXACT, _FP32),
}  # fmt: skip
CASES: tuple[tuple[str, str, str], ...] = tuple(
    (model, *rest)
    for model in MODELS
    for rest in (
        *(("plain", run) for run in _PLAIN if not (run[:4] == "sdpa" and model in _WITHOUT_SDPA)),
        *((form, "plain inputs") for form in WEIGHTS),
        *((form, "decoded") for form in INPUTS if form not in _WIDE),
        ("NVFP4", "exact"),
        ("NVFP4", "float32"),
    )
)


def run_case(number: int, device: str = "cpu") -> CaseResult:
    """Judge one run."""
    model, form, way = case = CASES[number]
    name = " ".join(case)
    try:
        found = _judged(model, form, way, device)
    except Exception:  # noqa: BLE001  whatever stops is a failing case
        return CaseResult(number, model, "stopped", f"{name}: {traceback.format_exc(limit=-4)}")
    words = [origin.sentence for origin in found.origins] or [str(each) for each in found.unjudged]
    if found.verdict is Verdict.AGREES and not words:
        return CaseResult(number, model, "ok", name)
    outcome = "alarm" if found.origins else "undecided"
    return CaseResult(number, model, outcome, f"{name}: {'; '.join(words[:4])}")


def _judged(model: str, form: str, way: str, device: str) -> Any:
    seed = zlib.crc32(f"{model} {form} {way}".encode())
    if form == "plain":
        dtype = _PLAIN[way]
        made: Any = built(model, dtype, seed=seed)
        made.set_attn_implementation(way.partition(" ")[0])
        config, weights = config_of(model, dtype), weights_of(made)
        run = recorded(made.to(device), config, prompt(config, device, seed))
        return judged_run(config, weights, run)
    inputs, (engine, dtype) = {**WEIGHTS, **INPUTS}[form], _ENGINES.get(way, (PLAIN, _BF16))
    layers = raw_config(model)["num_hidden_layers"]
    quantised = QuantisedRun(model, inputs, dtype, seed, num_hidden_layers=layers)
    quantised.emulate(engine)
    quantised.model.to(device)
    return quantised.judged(quantised.run(prompt(quantised.config, device, seed)))


def main() -> int:
    """Run the campaign; the exit status is 1 where a healthy run does not agree."""
    parser = arguments(__doc__ or "", count=0)
    parser.add_argument("--only", default="", help="cases whose name begins with this")
    parser.add_argument("--device", default="cpu", help="where models run")
    asked = parser.parse_args()
    chosen = [n for n, case in enumerate(CASES) if " ".join(case).startswith(asked.only)]
    case = partial(run_case, device=asked.device)
    return run_campaign("healthy_formats", case, asked, seeds=chosen)


if __name__ == "__main__":
    sys.exit(main())
