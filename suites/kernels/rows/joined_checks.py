"""Compare launches that do what several kernels do with those kernels, one by one, on a GPU.

Each of the others has a proof of its own, by its definition. Every bit of what a joined launch
leaves has to be theirs; outputs hold poison before. Kernels: simt_mhc_onward, simt_mhc_norm,
and the forms of simt_gemv_bf16 that turn back or quantise.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.formats.layouts import LINEAR
from degarble.kernels.gemm.gemv_problem import GemvProblem, decodes
from degarble.kernels.moe.by_row_problem import ByRowSum
from degarble.kernels.primitives.kv_problem import ROTATED
from degarble.kernels.primitives.quantise_problem import QuantiseProblem
from degarble.kernels.rows.mhc_few_problem import MOST_TOKENS, MhcNormProblem, OnwardProblem
from degarble.kernels.rows.mhc_problem import (
    SPAN,
    STREAMS,
    InnerCut,
    ProjectProblem,
    split_weight,
)
from degarble.kernels.rows.problem import InverseRopeProblem
from degarble.kernels.runtime.modules import kernel_named
from degarble.suites.kernels import row_checks as checks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    Given = dict[str, Tensor]

POSITIONS = 70  # rows of a table of turns
STREAMS_OF_TOKENS = ((1, 4096), (4, 4096), (1, 7168), (3, 7168), (2, 192), (1, 64))
ONWARD, MIXED, GEMV = KERNELS = ("simt_mhc_onward", "simt_mhc_norm", "simt_gemv_bf16")
NAMES = {kernel: kernel for kernel in KERNELS} | {GEMV: f"{GEMV}-joined"}


@dataclass(frozen=True)
class Case:
    """One launch; everything follows from these facts."""

    kernel: str
    problem: Any
    spread: str = "ordinary"
    seed: int = 0

    @property
    def name(self) -> str:
        """One line that finds the case again."""
        return f"{self.kernel} {self.problem} {self.spread} seed={self.seed}"

    def values(self, offset: int, *shape: int) -> Tensor:
        """Draw BF16 values."""
        flat = (shape[0], math.prod(shape[1:]))
        return checks.spread(flat, self.spread, self.seed + offset).reshape(shape)

    def numbers(self, offset: int, *shape: int) -> Tensor:
        """Draw float32 numbers."""
        generator = torch.Generator().manual_seed(self.seed + offset)
        return torch.randn(shape, generator=generator)

    def scale(self, offset: int) -> Tensor:
        """Draw a decode scale."""
        return self.numbers(offset, 1).abs() * 1e-2 + 1e-4

    def weight(self, kind: str, columns: int) -> Tensor:
        """Draw a norm's weight."""
        drawn = self.numbers(77, columns) * 0.1 + 1
        return drawn if kind == "fp32" else drawn.bfloat16()


# ---- operands ------------------------------------------------------------------------------------


def _rows_of_experts(case: Case, rows: int, width: int) -> Given:
    """Draw rows of experts; one slot in nine has none."""
    p = case.problem
    chosen, every = p.chosen, p.rows
    first = rows if p.rides else 0
    generator = torch.Generator().manual_seed(case.seed + 5)
    places = torch.randperm(rows * chosen, generator=generator).int() + first
    places[torch.rand(len(places), generator=generator) < 1 / 9] = -1
    given = {
        "made": case.values(1, every, width), "places": places,
        "weights": case.numbers(6, rows, chosen).sigmoid(),
    }  # fmt: skip
    return given if p.rides else given | {"shared": case.values(8, rows, width)}


def _onward(case: Case) -> Given:
    p: OnwardProblem = case.problem
    fn = case.numbers(2, 24, STREAMS * p.width) * (STREAMS * p.width) ** -0.5
    given = {
        "streams": case.values(0, p.tokens, STREAMS, p.width), "split": split_weight(fn),
        "post": 2 * case.numbers(3, p.tokens, STREAMS).sigmoid(),
        "mix": case.numbers(4, p.tokens, STREAMS, STREAMS).softmax(-1),
    }  # fmt: skip
    if p.source == "rows":
        return given | _rows_of_experts(case, p.tokens, p.width)
    return given | {"made": case.values(1, p.tokens, p.width)}


def _mixed(case: Case) -> Given:
    p: MhcNormProblem = case.problem
    scales = {f"decode_scale{number}": case.scale(20 + number) for number in range(p.decoded)}
    return scales | {
        "streams": case.values(0, p.tokens, STREAMS, p.width),
        "partials": case.numbers(1, p.tokens, p.pieces, 32).abs(),
        "base": case.numbers(2, 24) / 2, "scale": case.numbers(3, 3).abs() / p.pieces,
        "weight": case.weight(p.weight, p.width),
    }  # fmt: skip


def _gemv(case: Case) -> Given:
    p: GemvProblem = case.problem
    given = {
        "x": case.values(0, p.rows, p.groups * p.inner),
        "weight": checks.spread((p.sums, p.inner), "ordinary", case.seed + 1),
    }
    if p.positions:
        generator = torch.Generator().manual_seed(case.seed + 2)
        given["turns"] = torch.randn(p.positions, ROTATED, generator=generator)
        # Some lie outside.
        given["positions"] = torch.randint(-2, p.positions + 2, (p.rows,), generator=generator)
    return given | ({"decode_scale": case.scale(3)} if p.decoded else {})


# ---- the same by several kernels -----------------------------------------------------------------


def _run(kernel: str, problem: Any, **given: Tensor | None) -> dict[str, Any]:
    made: dict[str, Any] = kernel_named(kernel).run(problem, checks.SETTINGS, **given)
    return made


def _decoded(values: Tensor, scale: Tensor) -> Tensor:
    rows, columns = values.shape
    problem = QuantiseProblem(rows, columns, LINEAR.name, decoded=True)
    made: Tensor = _run("simt_quantise_nvfp4", problem, values=values, decode_scale=scale)[
        "decoded"
    ]
    return made


def _summed(given: Given, rows: int, width: int, p: Any) -> Tensor:
    every = given["made"].shape[0]
    problem = ByRowSum(rows, width, p.chosen, every, True, True, p.rides)
    made: Tensor = _run(
        "sm90_moe_by_row.SUM", problem, products=given["made"], places=given["places"],
        weights=given["weights"], shared=given.get("shared"),
    )["out"]  # fmt: skip
    return made


def _onward_apart(p: OnwardProblem, given: Given) -> Given:
    made = given["made"]
    rest = {}
    if p.source == "rows":
        made = rest["summed"] = _summed(given, p.tokens, p.width, p)
    post = replace(MhcNormProblem(p.tokens, p.width).mix, part="post")
    told = {name: given[name] for name in ("streams", "post", "mix")}
    out = _run("simt_mhc", post, layer=made, **told)["out"]
    shape = (p.tokens, p.project.partials, 32)
    partials = torch.zeros(shape, device=out.device)
    _run(
        "simt_mhc_project", ProjectProblem(p.tokens, p.width), streams=out, split=given["split"],
        partials=partials,
    )  # fmt: skip
    return {"out": out, "partials": partials[..., :25]} | rest


def _mixed_apart(p: MhcNormProblem, given: Given) -> Given:
    products, squares = whole(given["partials"], p)
    told = {name: given[name] for name in ("streams", "base", "scale")}
    mixed = _run("simt_mhc", p.mix, products=products, squares=squares, **told)
    made = {name: mixed[name] for name in ("post", "mix", "out")}
    normed = _run("simt_rmsnorm", p.norm, values=made["out"], weight=given["weight"])["normed"]
    rows = {
        f"decoded{number}": _decoded(normed, given[f"decode_scale{number}"])
        for number in range(p.decoded)
    }
    return made | {"normed": normed} | rows


def whole(partials: Tensor, p: MhcNormProblem) -> tuple[Tensor, Tensor]:
    """Add up partial sums in the order that mhc_problem states: pieces, groups, spans."""
    cut = InnerCut(STREAMS * p.width)

    def in_turn(lines: Iterable[Tensor]) -> Tensor:
        total = torch.zeros_like(partials[:, 0])
        for line in lines:
            total = total + line
        return total

    groups = [in_turn(each.unbind(1)) for each in partials.split(cut.per_group, 1)]
    spans = [in_turn(groups[at : at + SPAN]) for at in range(0, len(groups), SPAN)]
    total = in_turn(spans)
    return total[:, :24].contiguous(), total[:, 24].contiguous()


def _gemv_apart(p: GemvProblem, given: Given) -> Given:
    x, plain = given["x"], GemvProblem(p.rows, p.columns, p.inner, p.out, p.groups)
    turning = {name: given[name] for name in ("turns", "positions") if name in given}
    if p.turned:
        back = InverseRopeProblem(p.rows, x.shape[1] // p.turned, p.positions, width=p.turned)
        heads = x.reshape(p.rows, -1, p.turned)
        x = _run("simt_inverse_rope", back, heads=heads, **turning)["out"].flatten(1)
    out = _run(GEMV, plain, x=x, weight=given["weight"])["out"]
    return {"out": out} | ({"decoded": _decoded(out, given["decode_scale"])} if p.decoded else {})


GIVEN: dict[str, Callable[[Case], Given]] = {
    ONWARD: _onward, MIXED: _mixed, GEMV: _gemv,
}  # fmt: skip
APART: dict[str, Callable[[Any, Given], Given]] = {
    ONWARD: _onward_apart, MIXED: _mixed_apart, GEMV: _gemv_apart,
}  # fmt: skip


def given(case: Case) -> Given:
    """Draw what a launch is given, on the CPU."""
    return GIVEN[case.kernel](case)


def on_device(case: Case) -> Given:
    """Run a case on the GPU, into poisoned memory; what it wrote stays there."""
    kernel = kernel_named(case.kernel)
    out = {
        name: tensor
        for name, tensor in kernel.allocate(case.problem, torch.device("cuda")).items()
        if tensor is not None
    }
    for tensor in out.values():
        tensor.view(torch.uint8).fill_(checks.POISON)
    tensors = {name: tensor.cuda() for name, tensor in given(case).items()}
    made = kernel.run(case.problem, checks.SETTINGS, **tensors, **out)
    if case.kernel == ONWARD:  # columns behind the squares are nobody's
        made["partials"] = made["partials"][..., :25]
    return {name: tensor for name, tensor in made.items() if tensor is not None}


def by_kernels(case: Case) -> Given:
    """Return what several kernels make of the same."""
    tensors = {name: tensor.cuda() for name, tensor in given(case).items()}
    return APART[case.kernel](case.problem, tensors)


def mismatch(case: Case) -> str:
    """Say how a case differs from several kernels; empty where it does not."""
    got, want = on_device(case), by_kernels(case)
    if missing := got.keys() ^ {name for name, tensor in want.items() if tensor is not None}:
        return f"{case.name}: outputs {', '.join(sorted(missing))}"
    found = [checks.bits_differ(f"{case.name}, {name}", got[name], want[name]) for name in got]
    return "; ".join(filter(None, found))


# ---- cases ---------------------------------------------------------------------------------------


def _onward_problems() -> Iterator[OnwardProblem]:
    for tokens, width in STREAMS_OF_TOKENS:
        yield OnwardProblem(tokens, width)
        yield OnwardProblem(tokens, width, "rows", 6, 6 * tokens)
        yield OnwardProblem(tokens, width, "rows", 8, 9 * tokens, rides=True)


def _mixed_problems() -> Iterator[MhcNormProblem]:
    for tokens, width in STREAMS_OF_TOKENS:
        yield MhcNormProblem(tokens, width, decoded=2)
        yield MhcNormProblem(tokens, width, 3)
        yield MhcNormProblem(tokens, width, weight="fp32", decoded=1)


def _gemv_problems() -> Iterator[GemvProblem]:
    for rows in (1, 2, 3, 4):
        turned = GemvProblem(rows, 1024, 4096, "bf16", 8, 512, POSITIONS)
        narrow = GemvProblem(rows, 48, 256, "bf16", 2, 128, POSITIONS)
        values = GemvProblem(rows, 128, 512, "bf16", 128)
        yield from (turned, narrow)
        yield from (
            replace(each, decoded=True) for each in (turned, narrow, values) if decodes(each)
        )


PROBLEMS: dict[str, Callable[[], Iterator[Any]]] = {
    ONWARD: _onward_problems, MIXED: _mixed_problems, GEMV: _gemv_problems,
}  # fmt: skip


def cases(kernel: str) -> list[Case]:
    """Return the named cases: widths of the models and of small ones, every number of tokens."""
    made = list(PROBLEMS[kernel]())
    named = [Case(kernel, problem) for problem in made]
    return named + [Case(kernel, made[0], spread, 3) for spread in checks.SPREADS]


def fuzzed(kernel: str, seed: int, count: int) -> list[Case]:
    """Draw cases."""
    drawn = random.Random(seed)
    problem = {
        ONWARD: _any_onward, MIXED: _any_mixed, GEMV: _any_gemv,
    }[kernel]  # fmt: skip
    return [
        Case(kernel, problem(drawn), drawn.choice(checks.SPREADS), drawn.randrange(1 << 30))
        for _ in range(count)
    ]


def _any_streams(drawn: random.Random) -> tuple[int, int]:
    return drawn.randint(1, MOST_TOKENS), 64 * drawn.choice((drawn.randint(1, 9), 64, 112))


def _any_onward(drawn: random.Random) -> OnwardProblem:
    tokens, width = _any_streams(drawn)
    if drawn.random() < 0.3:
        return OnwardProblem(tokens, width)
    chosen, rides = drawn.randint(1, 9), drawn.random() < 0.5
    return OnwardProblem(tokens, width, "rows", chosen, (chosen + rides) * tokens, rides)


def _any_mixed(drawn: random.Random) -> MhcNormProblem:
    tokens, width = _any_streams(drawn)
    told = drawn.randint(1, 20), drawn.choice((1e-6, 1e-4)), drawn.choice((1e-6, 1e-20))
    return MhcNormProblem(tokens, width, *told, drawn.choice(("bf16", "fp32")), drawn.randint(0, 2))


def _any_gemv(drawn: random.Random) -> GemvProblem:
    rows, groups = drawn.randint(1, 4), drawn.randint(1, 9)
    width = drawn.choice((128, 512))
    told = (rows, 16 * drawn.randint(1, 70), width * drawn.randint(1, 5), "bf16", groups)
    problem = GemvProblem(*told, width, POSITIONS)
    return replace(problem, decoded=True) if decodes(problem) else problem
