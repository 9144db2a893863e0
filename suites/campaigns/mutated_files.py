"""Run damaged checkpoints, captures, configs and tokenizers through the command line.

    python -m degarble.suites.campaigns.mutated_files --count 9000 --jobs 32 --seed 0 --out DIR

Of nine seeds five are checkpoints (`audit`), three captures (`check` and `compare`) and one is a
config, a tokenizer or a reshaped tensor (`generate`, `capture`, `quantise`). With `--signed` all
seeds are captures that were changed and hashed again. A case fails where a
command ends with status 70, runs for more than 60 s, takes more than 1 GB of memory beyond what the
process had, accepts what has to be refused, or leaves something at the target that it refused.
"""

from __future__ import annotations

import io
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import EXIT_AGREES, EXIT_REFUSED
from degarble.harness.cli.main import main as degarble
from degarble.harness.cli.terminal import EXIT_CRASHED
from degarble.suites.campaigns import file_mutations as damage
from degarble.suites.campaigns.runner import CaseResult, arguments, run_campaign
from degarble.suites.checkpoint.reading_cases import TINY_V4, TINY_V32
from degarble.suites.serve.talking_cases import write_tokenizer
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from degarble.harness.model.config.config import Config

SECONDS = 60
MEMORY = 1 << 30
_LIMIT = 8 << 30  # of address space beyond what is mapped: ends a runaway before the machine does
_CLASSES = 9
FAMILIES = ("v4", "v32")
LAYOUTS = ("bf16", "nvfp4-full")
SMALL_V4 = replace(
    TINY_V4, num_hidden_layers=2, compress_ratios=(4, 128), num_nextn_predict_layers=0,
    head_dim=64, qk_rope_head_dim=16, index_head_dim=32, index_n_heads=2, hidden_size=64,
    q_lora_rank=32, o_lora_rank=32, moe_intermediate_size=64,
)  # fmt: skip
SMALL_V32 = replace(TINY_V32, num_nextn_predict_layers=0)
_CONFIGS: dict[str, Config] = {"v4": SMALL_V4, "v32": SMALL_V32}
_PROMPT = ("--prompt", "w7 w8 w9", "--max-new-tokens", "2")


class TimeIsUp(BaseException):
    """A command ran for more than its time; no handler for ordinary errors may catch it."""


@dataclass
class Outcome:
    """What one command line did."""

    status: int | None
    memory: int
    messages: str = ""
    failures: list[str] = field(default_factory=list)


def make_bases(root: Path) -> None:
    """Write the sound checkpoints and captures that the cases damage."""
    for family in FAMILIES:
        for layout in LAYOUTS:
            folder = root / f"{family}-{layout}"
            if not folder.exists():
                write_checkpoint(folder, Synthetic(_CONFIGS[family], layout, seed=3), shards=3)
                write_tokenizer(folder)
            for number in (0, 1):
                capture = _capture_of(root, family, layout, number)
                if not capture.exists():
                    _require_sound("capture", folder, "--out", capture, *_PROMPT)


def _capture_of(root: Path, family: str, layout: str, number: int) -> Path:
    return root / f"{family}-{layout}-capture-{number}"


def _require_sound(*words: object) -> None:
    status = degarble(["--quiet", *map(str, words)])
    if status != EXIT_AGREES:
        raise SystemExit(f"degarble {' '.join(map(str, words))}: status {status} on sound files")


@contextmanager
def _limited() -> Iterator[None]:
    """Bound time and address space of what runs inside."""

    def late(_number: int, _frame: FrameType | None) -> None:
        raise TimeIsUp

    def end() -> None:
        traceback.print_stack(sys._current_frames()[threading.main_thread().ident or 0])
        os._exit(3)

    before = signal.signal(signal.SIGALRM, late)
    guard = threading.Timer(SECONDS * 2, end)  # where the alarm does not reach Python
    guard.daemon = True
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    signal.alarm(SECONDS)
    guard.start()
    resource.setrlimit(resource.RLIMIT_AS, (_kilobytes("VmSize") * 1024 + _LIMIT, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.alarm(0)
        guard.cancel()
        signal.signal(signal.SIGALRM, before)


def _kilobytes(name: str) -> int:
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text("ascii"))
    return int(match[1]) if match else 0


def run_command(*words: object) -> Outcome:
    """Run one command line in this process, within the limits."""
    messages = io.StringIO()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins anew
    before = _kilobytes("VmRSS")
    status: int | None
    try:
        with _limited(), redirect_stdout(messages), redirect_stderr(messages):
            status = degarble([str(word) for word in words])
    except TimeIsUp:
        status = None
        messages.write(traceback.format_exc())
    memory = (_kilobytes("VmHWM") - before) * 1024
    outcome = Outcome(status, memory, messages.getvalue())
    if status is None:
        outcome.failures.append("hang")
    if status == EXIT_CRASHED:
        outcome.failures.append("memory" if "MemoryError" in outcome.messages else "status 70")
    elif status is not None and status > EXIT_REFUSED:
        outcome.failures.append(f"status {status}")
    if memory > MEMORY:
        outcome.failures.append("memory")
    return outcome


def _commands(
    seed: int, folder: Path, bases: Path, captured: str
) -> Iterator[tuple[damage.Mutation, Any]]:
    """Make the damaged copy of one seed, and yield each command line with its damage."""
    group, family = seed % _CLASSES, FAMILIES[seed // _CLASSES % 2]
    layout = LAYOUTS[seed // _CLASSES // 2 % 2]
    sound, copy = bases / f"{family}-{layout}", folder / "damaged"
    if group < 5:
        done = damage.mutated_copy(damage.mutate_checkpoint, seed, sound, copy)
        against = (
            ("audit", copy),
            ("audit", copy, "--against", sound),
            ("audit", sound, "--against", copy),
        )
        yield done, against[(0, 0, 0, 1, 2)[group]]
    elif group < 8:
        first = _capture_of(bases, family, captured, 0)
        done = damage.mutated_copy(damage.mutate_capture, seed, first, copy)
        pair = (copy, _capture_of(bases, family, captured, 1))
        yield done, ("compare", *(pair if seed % 2 else pair[::-1]))
        yield done, ("check", copy, "--reference", bases / f"{family}-bf16")
    else:
        done = damage.mutated_copy(damage.mutate_texts, seed, sound, copy)
        out = folder / "out"
        ways = (
            ("generate", copy, *_PROMPT),
            ("capture", copy, "--out", out, *_PROMPT),
            ("quantise", copy, out, "--recipe", "official"),
        )
        yield done, ways[seed // _CLASSES // 4 % 3]


def is_signed(seed: int) -> bool:
    """Tell whether a seed changes a capture and signs it again."""
    return 5 <= seed % _CLASSES < 8 and damage.signs_again(seed)


def run_case(bases: Path, seed: int, captured: str = LAYOUTS[0]) -> CaseResult:
    """Damage one copy and run its commands; captures are those of the layout `captured`."""
    _warm_up(bases)
    with tempfile.TemporaryDirectory(prefix="case-", dir=bases.parent) as name:
        folder = Path(name)
        kind, outcome, detail = "?", "ok", ""
        for done, words in _commands(seed, folder, bases, captured):
            kind = f"{words[0]}: {done.kind}"
            found = run_command("--quiet", *words)
            failures = found.failures
            if done.refused and found.status == EXIT_AGREES:
                failures.append("accepted")
            if found.status and (folder / "out").exists():
                failures.append("half-written")
            if failures:
                shown = " ".join(map(str, words)).replace(str(bases.parent), "")
                detail = f"{done.detail} | {shown} | {found.messages[-1500:]}"
                outcome = failures[0]
                break
    return CaseResult(seed, kind, outcome, detail)


_WARM: set[Path] = set()


def _warm_up(bases: Path) -> None:
    """Run each command once on sound files: compiling its loops belongs to no case."""
    if bases in _WARM:
        return
    _WARM.add(bases)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        for family in FAMILIES:
            plain, full = bases / f"{family}-bf16", bases / f"{family}-nvfp4-full"
            _require_sound("audit", full, "--against", plain)
            for layout in LAYOUTS:
                captures = [_capture_of(bases, family, layout, number) for number in (0, 1)]
                _require_sound("check", captures[0], "--reference", plain)
                _require_sound("compare", *captures)
            _require_sound("generate", full, *_PROMPT)


def main() -> int:
    """Run the campaign."""
    parser = arguments(__doc__ or "", count=9000)
    parser.add_argument("--signed", action="store_true", help="only captures with hashes that fit")
    parser.add_argument("--captured", choices=LAYOUTS, default=LAYOUTS[0], help="their checkpoint")
    asked = parser.parse_args()
    work = asked.out / "mutated_files"
    shutil.rmtree(work, ignore_errors=True)
    bases = work / "bases"
    bases.mkdir(parents=True)
    make_bases(bases)
    wanted = filter(is_signed, count(asked.seed)) if asked.signed else count(asked.seed)
    seeds = list(islice(wanted, asked.count))
    case = partial(run_case, bases.resolve(), captured=asked.captured)
    status = run_campaign("mutated_files", case, asked, seeds=seeds)
    shutil.rmtree(work, ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
