"""What others measure by hand or miss, through the Python surface: a toy decoder, and one product.

Two measurements. A plain decoder of 16 layers, d = 1024, 512 tokens, whose linears hold decoded
NVFP4 weights: clean, and with one of three faults in `layers.7.mlp.down_proj`. And a W4A4 product
of 512 x 1024 x 2048 with sixteen faults, on Gaussian, heavy-tailed and small inputs, healthy in
every legal order of its sum; published gates are applied to the same outputs.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.harness import api
from degarble.suites.bench.timing import Neighbours, Section, Table, Target
from degarble.suites.engine.diagnose.judge.decoder_toy import FAULTS as TOY_FAULTS
from degarble.suites.engine.diagnose.judge.decoder_toy import PLACE, Toy, toy
from degarble.suites.engine.diagnose.judge.gemm_faults import (
    FAULTS,
    HEALTHY,
    INPUTS,
    Gemm,
    gemm,
    values,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from degarble.suites.bench.timing import Settings

PACKAGES = ("torch", "numba")
SECONDS = 8
FULL, SMALL = (512, 1024, 2048), (128, 256, 256)
_WIDTH = 1024


def _cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


def _difference(a: Tensor, b: Tensor) -> float:
    return float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())


# Published rules, as they are stated; `bf16` is the unquantised product, `twin` the decoded one.
GATES: Mapping[str, Callable[[Tensor, Tensor, Tensor], bool]] = {
    "cosine with BF16 > 0.97": lambda out, bf16, _twin: _cosine(out, bf16) > 0.97,
    "1 - 2 xy / (xx + yy) with BF16 < 0.02": lambda out, bf16, _t: _difference(out, bf16) < 0.02,
    "cosine with BF16 > 0.99, norm within 25 %": lambda out, bf16, _twin: (
        _cosine(out, bf16) > 0.99 and abs(float(out.norm() / bf16.norm()) - 1) <= 0.25
    ),
    "assert_close 0.1, 0.1 with the decoded product": lambda out, _bf16, twin: bool(
        torch.isclose(out, twin, rtol=0.1, atol=0.1).all()
    ),
}


class Scenario(NamedTuple):
    """One judged run of the toy: what was planted, what was said, and how long it took."""

    name: str
    found: api.Checked
    expected: str | None
    seconds: float

    @property
    def right(self) -> bool:
        """Nothing in a clean model; the one module and its cause in another."""
        causes = [(e.component, e.cause.fault if e.cause else None) for e in self.found.troubles]
        return causes == ([] if self.expected is None else [(PLACE, self.expected)])


class Case(NamedTuple):
    """One output of the product, judged."""

    kind: str
    name: str
    expected: str | None
    judged: api.JudgedKernel
    passed: tuple[str, ...]  # gates that let it pass


def scenarios(made: Toy) -> list[Scenario]:
    """Capture the clean toy and the three faulty ones, then judge them one after the other."""
    runs: list[tuple[str, str | None, Any]] = [
        ("clean", None, api.capture(made.model, made.tokens))
    ]
    for name, (change, fault) in TOY_FAULTS.items():
        made.put(PLACE, change(made.weights[PLACE]))
        runs.append((name, fault, api.capture(made.model, made.tokens)))
    made.put(PLACE, made.weights[PLACE])
    twin = api.Twin(made.weights)
    found = []
    for name, expected, run in runs:
        begin = time.perf_counter()
        checked = api.check(run, twin)
        found.append(Scenario(name, checked, expected, time.perf_counter() - begin))
    return found


def cases(shape: tuple[int, int, int], kinds: Sequence[str] = INPUTS) -> list[Case]:
    """Every legal order and every fault, on kinds of inputs."""
    found = []
    for kind in kinds:
        made = gemm(kind, shape)
        outputs: list[tuple[str, str | None, Tensor]] = [
            (name, None, order(made)) for name, order in HEALTHY.items()
        ]
        outputs += [(name, each.named, each.run(made)) for name, each in FAULTS.items()]
        for name, expected, out in outputs:
            found.append(_judged(made, kind, name, expected, out.bfloat16()))
    return found


def _judged(made: Gemm, kind: str, name: str, expected: str | None, out: Tensor) -> Case:
    judged = api.judge("gemm", made.xq, made.wq, out, reference={"x": made.x, "w": made.w})
    x, w = values(made)
    bf16, twin = made.x.float() @ made.w.float().T, x @ w.T
    passed = tuple(gate for gate, rule in GATES.items() if rule(out.float(), bf16, twin))
    return Case(kind, name, expected, judged, passed)


def run(settings: Settings) -> Section:
    """Measure both."""
    full = settings.size >= _WIDTH
    small = toy(layers=9, width=64, wide=128, tokens=32)
    scenarios(small)  # loops are compiled once
    with Neighbours() as neighbours:
        toys = scenarios(toy() if full else small)
        begin = time.perf_counter()
        judged = cases(FULL) if full else cases(SMALL, INPUTS[:1])
        seconds = time.perf_counter() - begin
    total = sum(each.seconds for each in toys)
    clean = [each for each in judged if each.expected is None]
    faulty = [each for each in judged if each.expected is not None]
    named = [e for e in faulty if e.judged.cause and e.judged.cause.fault == e.expected]
    alarms = sum(not each.judged for each in clean) + len(toys[0].found.troubles)
    return Section(
        key="peers",
        title="Faults that published gates miss",
        tables=(_toy_table(toys), _gate_table(judged), _fault_table(faulty)),
        targets=(
            Target("toy, clean and three faults, s", total, SECONDS, False),
            Target(
                "toy: verdict, place and cause right, of 4", sum(e.right for e in toys), 4, True
            ),
            Target("product: faults missed", sum(bool(e.judged) for e in faulty), 0, False),
            Target("false alarms", alarms, 0, False),
            Target("product: cause named first, share", len(named) / len(faulty), 0.9, True),
        ),
        notes=(
            f"toy: {len(toys[0].found.judged)} linears; capturing is not counted",
            f"product: {len(judged)} outputs judged in {seconds:.1f} s, diagnosis included",
            f"other processes took {neighbours.cores:.2f} cores of this machine meanwhile",
        ),
    )


def _toy_table(toys: list[Scenario]) -> Table:
    rows = []
    for each in toys:
        told = [f"{e.component}: {e.cause.fault if e.cause else '-'}" for e in each.found.troubles]
        rows.append((each.name, str(each.found.verdict), ", ".join(told) or "-",
                     f"{each.seconds:.2f}"))  # fmt: skip
    return Table("Toy decoder", ("planted", "verdict", "place and cause", "s"), tuple(rows))


def _gate_table(judged: list[Case]) -> Table:
    """How many faults each gate lets pass, and whether it passes healthy ones."""
    rows, kinds = [], tuple(dict.fromkeys(each.kind for each in judged))
    ours: Callable[[Case], bool] = lambda case: bool(case.judged)  # noqa: E731  one rule of many
    rules = {gate: (lambda case, gate=gate: gate in case.passed) for gate in GATES}
    for name, passes in {**rules, "judge (this project)": ours}.items():
        missed = [
            sum(passes(e) for e in judged if e.kind == kind and e.expected is not None)
            for kind in kinds
        ]
        healthy = all(passes(e) for e in judged if e.expected is None)
        rows.append((name, "yes" if healthy else "no", *map(str, missed)))
    header = ("rule", "healthy ones pass", *(f"missed of 16, {kind}" for kind in kinds))
    return Table("Published gates beside ours", header, tuple(rows))


def _fault_table(faulty: list[Case]) -> Table:
    rows, kinds = [], tuple(dict.fromkeys(each.kind for each in faulty))
    for name in FAULTS:
        found = [each for each in faulty if each.name == name]
        told = [e.judged.cause.fault if e.judged.cause else "-" for e in found]
        rows.append((name, *(f"{e.judged.ratio:.3g}" for e in found), *told))
    header = ("fault", *(f"ratio, {kind}" for kind in kinds), *(f"cause, {k}" for k in kinds))
    return Table(
        "Faults of the product: times the budget, and the cause named", header, tuple(rows)
    )
