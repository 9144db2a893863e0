"""Time `degarble check` over processes and GPUs, and kill it at random moments: one result.

`time` writes a synthetic V4 and a capture of it once, then runs the command with each set of
options (wall-clock time of the whole command, so nothing else should run) and compares the JSON:

    python -m degarble.suites.campaigns.spread_checks time --size middle \
        --run="--workers 1" --run="--workers 2"
    python -m degarble.suites.campaigns.spread_checks time --size pro --capture-device cuda \
        --run="--device cuda:0 --workers 1" --run="--device cuda:0,1"

`kill` ends the command at random moments, every second time with the processes that it started,
runs it again, and compares with what an undisturbed run wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path

from degarble.harness.capture import capture as capturing
from degarble.harness.capture.capture import CaptureSettings
from degarble.harness.model.config.config import small_v4
from degarble.suites.bench.runs import CONFIG as PRO
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

SIZES = {
    "small": (small_v4(num_hidden_layers=2, compress_ratios=(0, 4, 0)), (40, 10)),
    "middle": (
        small_v4(hidden_size=512, n_routed_experts=32, num_experts_per_tok=4,
                 moe_intermediate_size=512),
        (2400, 800),
    ),
    "pro": (PRO, (64,)),
}  # fmt: skip
LAYOUT = "nvfp4-experts"
_COMMAND = (sys.executable, "-m", "degarble.harness.cli.main")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def prepared(out: Path, size: str, device: str) -> Path:
    """Write a checkpoint and a capture below `out`, unless they are there."""
    folder = out / size
    config, lengths = SIZES[size]
    if not (folder / "capture" / "manifest.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        write_checkpoint(folder / "model", Synthetic(config, LAYOUT, seed=3))
        chance = random.Random(1)
        prompts = [tuple(chance.randrange(1, 500) for _ in range(n)) for n in lengths]
        settings = CaptureSettings(new_tokens=4, device=device)
        capturing.capture(
            folder / "model", prompts, folder / "capture", lambda _: nullcontext(), settings
        )
    return folder


def command(folder: Path, result: Path, options: str) -> list[str]:
    """Return the command that writes its JSON to `result`."""
    known = ("check", folder / "capture", "--reference", folder / "model", "--json", result)
    return [*_COMMAND, *map(str, known), *options.split()]


def timed(folder: Path, runs: list[str]) -> bool:
    """Print the seconds of each set of options; tell whether all wrote the same."""
    config, _ = SIZES[folder.name]
    results: list[bytes] = []
    _say("| options | s | s a layer | of the first |\n| --- | --- | --- | --- |")
    first = 0.0
    for number, options in enumerate(runs):
        result = folder / f"found-{number}.json"
        begun = time.monotonic()
        done = subprocess.run(command(folder, result, options), check=False, capture_output=True)
        seconds = time.monotonic() - begun
        first = first or seconds
        if done.returncode:
            sys.stderr.write(done.stderr.decode())
            return False
        layer = seconds / config.num_hidden_layers
        _say(f"| {options} | {seconds:.1f} | {layer:.2f} | {first / seconds:.2f}x |")
        results.append(result.read_bytes())
    return all(each == results[0] for each in results)


def killed(folder: Path, count: int, seed: int, options: str) -> int:
    """Kill the command at so many moments; return how many results differ."""
    result, wrong = folder / "killed.json", 0
    begun = time.monotonic()
    subprocess.run(command(folder, result, options), check=True, capture_output=True)
    seconds, whole = time.monotonic() - begun, result.read_bytes()
    chance = random.Random(seed)
    resumed = 0
    for number in range(count):
        result.unlink()
        moment = chance.uniform(0, 1.1) * seconds
        with subprocess.Popen(
            command(folder, result, options), start_new_session=True, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:  # fmt: skip
            with suppress(subprocess.TimeoutExpired):
                process.wait(moment)
            with suppress(ProcessLookupError):
                (os.killpg if number % 2 else os.kill)(process.pid, signal.SIGKILL)
        half = result.exists() and result.read_bytes() != whole
        resumed += (folder / "killed-degarble-unfinished").exists()
        subprocess.run(command(folder, result, options), check=True, capture_output=True)
        left = [path.name for path in folder.iterdir() if "unfinished" in path.name]
        if half or left or result.read_bytes() != whole:
            wrong += 1
            _say(f"kill {number} after {moment:.2f} s: half-written {half}, left {left}")
    _say(json.dumps({"kills": count, "with finished parts": resumed, "wrong": wrong}))
    return wrong


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description="degarble check over processes, and after kills")
    parser.add_argument("what", choices=("time", "kill"))
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--run", action="append", help="options of the check")
    parser.add_argument("--capture-device", default="cpu")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/campaigns/spread"))
    given = parser.parse_args()
    folder = prepared(given.out, given.size, given.capture_device)
    runs = given.run or ["--workers 1", "--workers 2"]
    if given.what == "time":
        return int(not timed(folder, runs))
    return int(sum([killed(folder, given.count, given.seed, options) for options in runs]) > 0)


if __name__ == "__main__":
    sys.exit(main())
