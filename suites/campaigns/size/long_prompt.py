"""Capture a long prompt within a budget, healthy and with planted faults, and check both.

    python -m degarble.suites.campaigns.size.long_prompt OUT --tokens 32768 --budget 2GB

The model is the trained small V4 in nvfp4-experts, with longer positions. One run has all faults at
once: every component is judged on its own inputs, so each of them has to be found and no other.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import shutil
import sys
import time
from pathlib import Path

from degarble.harness.cli.main import main as degarble
from degarble.references.tiny.language import NAMES, NUMBERS

_SMALL = Path(__file__).parents[3] / "references" / "tiny" / "v1" / "v4"
# Components that are wrong in the faulty run; LATE are wrong beyond position FROM alone.
_EVERYWHERE = {
    "layers.0.attn.q_norm": "out * 1.05",
    "layers.2.attn.compressor.pool": "out * 1.05",
    "layers.0.ffn.topk": "weights * 1.1",
    "layers.2.attn.wo_b": "out.roll(1, -1)",
}
_LATE = {
    "layers.1.attn.kv_norm_rope": "out.roll(2, -1)",
    "layers.1.attn.attend": "out * 0.9",
    "layers.0.ffn.norm": "out.roll(1, 0)",
    "layers.2.ffn.shared.act": "out * 1.05",
}
_PATCH = """
import torch

EVERYWHERE = {everywhere}
LATE = {late}
FROM = {begin}
at = [0]


def wrong(name, call, text, late):
    def run(inputs, weights):
        made = dict(call(inputs, weights))
        key = text.split(" ")[0].split(".")[0]
        tensor = made[key]
        changed = eval(text, {{key: tensor.float()}}).to(tensor.dtype)
        rows = torch.tensor(at[0] >= FROM if late else True)
        made[key] = torch.where(rows, changed, tensor)
        return made
    return run


def patch(candidate):
    calls = candidate.components
    inner = calls["layers.0.attn.kv_norm_rope"]

    def seen(inputs, weights):
        at[0] = int(inputs["positions"].max())
        return inner(inputs, weights)

    calls["layers.0.attn.kv_norm_rope"] = seen
    for late, side in ((False, EVERYWHERE), (True, LATE)):
        for name, text in side.items():
            calls[name] = wrong(name, calls[name], text, late)
"""


def _run(*words: object) -> int:
    sys.stdout.write(f"degarble {shlex.join(map(str, words))}\n")
    sys.stdout.flush()
    return degarble(list(map(str, words)))


def prepare(out: Path, tokens: int) -> Path:
    """Write the model, its prompt and the patch; return the quantised checkpoint."""
    source, quantised = out / "bf16", out / "nvfp4"
    if not quantised.exists():
        shutil.copytree(_SMALL, source, ignore=shutil.ignore_patterns("manifest.json"))
        config = json.loads((source / "config.json").read_text())
        config["max_position_embeddings"] = 1 << 20
        (source / "config.json").write_text(json.dumps(config))
        _run(
            "capture", source, "--amax-only", "--prompt", "anna paints blue", "--out", out / "amax"
        )
        recipe = ("--recipe", "nvfp4-experts", "--calibration", out / "amax")
        _run("quantise", source, quantised, *recipe)
    chance, words = random.Random(5), (*NAMES, *NUMBERS)
    prompt = " ".join(chance.choice(words) for _ in range(tokens - 1))  # one begins the text
    (out / "prompt.txt").write_text(prompt)
    begin = tokens - 2048
    text = _PATCH.format(everywhere=_EVERYWHERE, late=_LATE, begin=begin)
    (out / "faults.py").write_text(text)
    return quantised


def judged(out: Path, name: str, budget: str, *more: object) -> bool:
    """Capture and check one run; return whether it went as it should."""
    capture, found = out / name, out / f"{name}.json"
    shutil.rmtree(capture, ignore_errors=True)
    began = time.process_time()
    prompts = ("--prompts", out / "prompt.txt")
    _run("capture", out / "nvfp4", *prompts, "--out", capture, "--budget", budget, *more)
    spent = time.process_time() - began
    _run("check", capture, "--reference", out / "bf16", "--json", found)
    document = json.loads(found.read_text())
    stated = document["budget"]
    wanted = {*_EVERYWHERE, *_LATE} if more else set()
    origins = {each["site"].split(".out")[0].split(".in.")[0] for each in document["origins"]}
    nbytes = sum(file.stat().st_size for file in capture.iterdir())
    fields = {
        "run": name, "verdict": document["verdict"], "bytes": nbytes, "whole": stated["whole"],
        "estimate": stated["estimate"], "capture_seconds": round(spent),
        "check_seconds": round(time.process_time() - began - spent),
        "found": sorted(origins & wanted), "missed": sorted(wanted - origins),
        "blamed_without_a_fault": sorted(origins - wanted), "notes": document["notes"],
    }  # fmt: skip
    sys.stdout.write(f"{json.dumps(fields, indent=1)}\n")
    return origins == wanted and document["verdict"] == ("DIFFERS" if more else "AGREES")


def main() -> int:
    """Run both; 1 where a fault is missed, or a healthy component is blamed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--budget", default="2GB")
    parser.add_argument("--only", choices=["healthy", "faulty"])
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    prepare(given.out, given.tokens)
    runs = {"healthy": (), "faulty": ("--patch", given.out / "faults.py")}
    chosen = [given.only] if given.only else list(runs)
    good = [judged(given.out, name, given.budget, *runs[name]) for name in chosen]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
