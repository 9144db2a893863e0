"""The whole proof of the plugin in an engine: servers started, asked, ended; a table of what held.

    python -m degarble.harness.vllm.engine.prove PREPARED OUT [--only NAME] [--gpus 2]

PREPARED is what `prepare` wrote. The servers cover checkpoints by recipe, CUDA graphs, faults
planted in the loader, a missing tensor, and with two GPUs tensor parallel ranks. They run at the
same time, each on its own port. Status 0: everything held; 1: something did not; 2: refused before
anything is written, as without vLLM or GPUs. Captures, logs and verdicts stay in OUT. An interrupt
ends the servers. Speed is not judged.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file, save_file

from degarble.harness.base.errors import DegarbleError, InvalidArgument, UnknownName
from degarble.harness.report.files import require_folder
from degarble.harness.vllm.engine.server import (
    Caller,
    RunningServer,
    ServerCase,
    end_all,
    environment,
    require_engine,
    require_free,
)
from degarble.harness.vllm.engine.steps import (
    STEPS,
    Answers,
    EngineSession,
    StepOutcome,
    taken,
    told_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

FIRST_PORT, START_SECONDS, END_SECONDS = 8101, 300.0, 60.0
_KNOWS = ("parts", "questions", "texts", "forced")
SERVERS = (
    ServerCase("experts", "experts", tuple(STEPS)),
    ServerCase("full", "full", tuple(STEPS)),
    ServerCase("bf16", "bf16", (*_KNOWS, "capture"), {"experts": "vllm"}),
    ServerCase("graphs", "experts", (*_KNOWS, "many"), graphs=True),
    ServerCase("swapped", "experts", ("capture",), plant="gate and up",
          blamed=("layers.1.ffn.shared.w13", "M14")),
    ServerCase("exchanged", "experts", plant="w2", refused="experts after loading"),
    ServerCase("lacking", "full", dropped="layers.2.attn.wo_b.weight_scale",
          refused="loader.unwritten"),
    ServerCase("ranks", "experts", tuple(STEPS), ranks=2),
    ServerCase("ranks-swapped", "experts", ("capture",), ranks=2, plant="gate and up",
          blamed=("layers.1.ffn.shared.w13", "M14")),
    ServerCase("ranks-turned", "experts", ("capture",), ranks=2, plant="ranks",
          blamed=("layers.1.attn.wq_b", "M16")),
    ServerCase("ranks-exchanged", "experts", plant="w2", ranks=2, refused="experts after loading"),
)  # fmt: skip
_RECORDED = re.compile(r"Capturing CUDA graphs \(([^)]*)\)")


@dataclass(frozen=True)
class ProofPaths:
    """Paths that one proof reads and writes."""

    prepared: Path
    out: Path
    seconds: float = START_SECONDS


def prove(place: ProofPaths, servers: Sequence[ServerCase]) -> dict[str, list[StepOutcome]]:
    """Start all servers, take their steps, end them."""
    place.out.mkdir(parents=True)
    with ThreadPoolExecutor(len(servers)) as pool:
        made = pool.map(lambda pair: one(place, pair[1], FIRST_PORT + pair[0]), enumerate(servers))
        try:
            return {server.name: found for server, found in zip(servers, made, strict=True)}
        except BaseException:  # an interrupted proof ends what it started
            pool.shutdown(wait=False, cancel_futures=True)
            end_all()
            raise


def one(place: ProofPaths, case: ServerCase, port: int) -> list[StepOutcome]:
    """Start a server, take its steps, end it."""
    out = place.out / case.name
    out.mkdir()
    checkpoint = place.prepared / case.checkpoint
    if case.dropped:
        checkpoint = lacking(checkpoint, out / "checkpoint", case.dropped)
    captures = out / "captures"
    line = case.line(checkpoint, port, out / "told")
    around = environment(case, captures, out / "site")
    begin = time.monotonic()
    with RunningServer(line, around, out / "log.txt") as server:
        caller = Caller(port)
        up = server.answers(caller, place.seconds)
        begun = StepOutcome("start", True, f"answered after {time.monotonic() - begin:.0f} s")
        if case.refused:
            return [refusal(case, server, up=up)]
        if not up:
            return [StepOutcome("start", False, f"never answered: {server.last_words()}")]
        told = Answers.read(place.prepared / f"{case.checkpoint}.json")
        session = EngineSession(caller, told, checkpoint, captures, out, case.blamed)
        outcomes = [begun]
        for name in case.steps:
            outcomes.append(taken(name, session))
            say(f"{case.name:10} {time.monotonic() - begin:4.0f} s  {outcomes[-1].line()}")
        if case.graphs:
            outcomes.append(graphs(server.log_text()))
        return outcomes


def refusal(case: ServerCase, server: RunningServer, *, up: bool) -> StepOutcome:
    """Judge a start that has to be refused, by what its log says."""
    if up:
        return StepOutcome("refused", False, "it answered")
    try:
        server.process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        return StepOutcome("refused", False, "it neither answered nor ended")
    lines = [each for each in server.log_text().splitlines() if case.refused in each]
    text = lines[0].rpartition("degarble.harness.base.errors.")[2] if lines else "not said"
    return StepOutcome("refused", bool(lines), text[:300])


def graphs(log: str) -> StepOutcome:
    """Return which CUDA graphs were recorded."""
    kinds = sorted(set(_RECORDED.findall(log)))
    ended = bool(kinds) and "Graph capturing finished" in log
    return StepOutcome("graphs", ended, f"recorded: {'; '.join(kinds) or 'none'}")


def lacking(checkpoint: Path, folder: Path, name: str) -> Path:
    """Copy a checkpoint without a tensor."""
    shutil.copytree(checkpoint, folder)
    (shard,) = folder.glob("*.safetensors")
    tensors = load_file(shard)
    del tensors[name]
    save_file(tensors, shard, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    raw = json.loads(index.read_text(encoding="utf-8"))
    del raw["weight_map"][name]
    index.write_text(json.dumps(raw), encoding="utf-8")
    return folder


def chosen(names: Sequence[str], gpus: int) -> list[ServerCase]:
    """Return the servers of a proof: those named, or all that so many GPUs serve."""
    known = {case.name: case for case in SERVERS}
    for name in names:
        if name not in known:
            raise UnknownName.among("server", name, known)
    if names:
        return [known[name] for name in dict.fromkeys(names)]
    return [case for case in SERVERS if case.ranks <= gpus]


def wanted(given: argparse.Namespace) -> tuple[str, list[ServerCase]]:
    """Return vLLM's version, and servers; refuse what would break off once they start."""
    if given.gpus < 1:
        raise InvalidArgument("--gpus", given.gpus, "1 or more", "Say how many GPUs may be used.")
    if not 0 < given.seconds < math.inf:
        raise InvalidArgument("--seconds", given.seconds, "a number above 0", "Leave it out.")
    servers = chosen(given.only, given.gpus)
    version = require_engine(max(server.ranks for server in servers))
    for name in dict.fromkeys(server.checkpoint for server in servers):
        if not (given.prepared / name).is_dir():
            raise InvalidArgument(
                "PREPARED", str(given.prepared), f"a folder with {name}, as prepare writes it",
                "Write it: python -m degarble.harness.vllm.engine.prepare PREPARED",
            )  # fmt: skip
        Answers.read(given.prepared / f"{name}.json")
    if given.out.exists():
        raise InvalidArgument("OUT", str(given.out), "a folder that does not exist", "Move it.")
    require_folder("OUT", given.out)
    for number in range(len(servers)):
        require_free(FIRST_PORT + number)
    return version, servers


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)  # noqa: T201  a script


def main(arguments: list[str] | None = None) -> int:
    """Prove, print what held, and write it to OUT/proof.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("prepared", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", action="append", default=[], help="a server, by name")
    parser.add_argument("--gpus", type=int, default=1, help="2: tensor parallel ranks as well")
    parser.add_argument("--seconds", type=float, default=START_SECONDS, help="for a start")
    given = parser.parse_args(arguments)
    try:
        version, servers = wanted(given)
        found = prove(ProofPaths(given.prepared, given.out, given.seconds), servers)
    except DegarbleError as error:
        print(f"REFUSED: {error}", file=sys.stderr)  # noqa: T201  a script
        return error.exit_status
    document = {"vllm": version, "servers": {k: told_of(each) for k, each in found.items()}}
    (given.out / "proof.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    say(f"\nvLLM {version}")
    for name, outcomes in found.items():
        for outcome in outcomes:
            say(f"{name:10} {outcome.line()}")
    return int(
        any(
            step_outcome.passed is False for outcomes in found.values() for step_outcome in outcomes
        )
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
