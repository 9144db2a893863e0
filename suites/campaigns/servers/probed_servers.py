"""Probe healthy stand-ins and planted ones.

    python -m degarble.suites.campaigns.servers.probed_servers --seed 5003

Healthy sessions differ in seed, arithmetic, experts, cache, chunks, what the server offers, and the
rounding of sums. Each line is one session; the last two say how many there were.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING

from degarble.harness.probe.client import Client, RequestLimits
from degarble.harness.probe.probe import probe
from degarble.harness.probe.session import ProbeOptions
from degarble.harness.report.verdict import Verdict
from degarble.suites.probe.faults import FAULTS
from degarble.suites.probe.small_model import SmallConfig
from degarble.suites.probe.stand_in import Manner, ScoringEngine, opened, serving, texts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.harness.inference.model import OpenModel
    from degarble.harness.probe.probe import ProbeResult

_RATE = 1e6  # a stand-in needs no politeness


def session(model: OpenModel, config: SmallConfig, manner: Manner) -> ProbeResult:
    """Probe one stand-in."""
    with serving(model, config, manner) as url:
        client = Client(url, None, RequestLimits(rate=_RATE))
        return probe(client, ProbeOptions(texts(config.seed), max_prompt_tokens=600))


def healthy(first: int = 1000) -> Iterator[tuple[SmallConfig, Manner]]:
    """Yield healthy servers, each another one, of seeds from `first` on."""
    kinds = product(
        ("bf16", "fp8", "exact"), (False, True), (True, False), (False, True), (96, 32, 1024)
    )
    for seed, (arithmetic, experts, caches, ids, chunk) in enumerate(kinds, first):
        config = SmallConfig(
            seed, arithmetic=arithmetic, experts=experts, caches=caches, chunk=chunk,
            noise=seed % 4 == 0, sharpness=(1.5, 2.5, 4.0)[seed % 3],
        )  # fmt: skip
        refused = (("echo",), ("seed",), (), (), ())[seed % 5]
        yield config, Manner(engine=ScoringEngine, ids=ids, refused=refused)


def _said(what: str, result: ProbeResult, seconds: float) -> str:
    found = ", ".join(f"{f.check}: {f.cause}" for f in result.findings) or "nothing"
    count = result.server.client.traffic.requests
    return f"{result.verdict:9} {count:3} requests {seconds:5.1f} s  {what}: {found}\n"


def main() -> int:
    """Run both parts; give 1 where a fault was missed or a healthy server alarmed."""
    parser = argparse.ArgumentParser(
        prog="python -m degarble.suites.campaigns.servers.probed_servers"
    )
    parser.add_argument("--healthy", type=int, default=72)
    parser.add_argument("--first", type=int, default=0, help="healthy session to begin with")
    parser.add_argument("--faults", type=int, default=len(FAULTS))
    parser.add_argument("--seed", type=int, default=1000, help="of the first healthy server")
    options = parser.parse_args()
    alarms = missed = unnamed = most = 0
    with tempfile.TemporaryDirectory() as folder, opened(Path(folder) / "model") as model:
        for config, manner in islice(
            healthy(options.seed), options.first, options.first + options.healthy
        ):
            begin = time.process_time()
            result = session(model, config, manner)
            alarms += result.verdict is not Verdict.AGREES
            most = max(most, result.server.client.traffic.requests)
            words = f"{config.arithmetic} seed {config.seed} experts {config.experts}"
            sys.stdout.write(_said(words, result, time.process_time() - begin))
            sys.stdout.flush()
        for seed, fault in enumerate(FAULTS[: options.faults], options.seed - 1000):
            begin = time.process_time()
            config = SmallConfig(seed, experts=seed % 2 == 0)
            result = session(model, config, fault.manner)
            missed += result.verdict not in (Verdict.DIFFERS, Verdict.UNSTABLE)
            unnamed += not {f.check for f in result.findings} & set(fault.found_by)
            most = max(most, result.server.client.traffic.requests)
            sys.stdout.write(_said(fault.name, result, time.process_time() - begin))
            sys.stdout.flush()
    total = len(FAULTS[: options.faults])
    sys.stdout.write(f"{options.healthy} healthy sessions, {alarms} alarms\n")
    sys.stdout.write(
        f"{total} faults, {total - missed} found, {total - unnamed} by the expected check; "
        f"at most {most} requests a session\n"
    )
    return int(bool(alarms or missed))


if __name__ == "__main__":
    sys.exit(main())
