"""Compare the indexer's scores on a GPU with exact products, in budgets that follow from the sums.

Cases vary heads, pages, ragged sequences and spreads. Pages lie in any order, as a cache has them;
pages and entries that may not be read hold NaN, and the table has nonsense after the last page.
BF16 has the budget by which `check` judges a run (harness.engine.budget.chains); FP8 wgmma cuts at
13 bits and has its own, derived below. -inf is compared exactly. Scores are NaN before a launch.

The kernel is that of the installed GPU.
Shape letters: T tokens, N heads, I width, W entries, S sequences, P pages of a sequence.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.harness.engine.budget.bounded_values import BoundedValue, stored
from degarble.harness.engine.budget.rules import U
from degarble.kernels.indexer import problem as facts
from degarble.kernels.indexer.problem import KeyPages, ScoresForm, ScoresProblem
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.modules import module_of
from degarble.kernels.runtime.targets import SM90A, SM100A, target_of_device

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS = CompileSettings()
MODULES = {SM90A.name: "sm90_indexer_scores", SM100A.name: "sm100_indexer_scores"}
NAN_BYTE = 0xFF  # of BF16, E4M3 and float32 alike
NONSENSE = 0x7F00_0000
SPREADS = ("ordinary", "negative", "integers", "wide")
# references.tensor_core, MMA-Sim: 34 terms cut at 13 bits, and the sum at 13; steps of 32 of K.
FP8_LOSS = 35 * 2.0**-13 * (facts.WIDTH // 32)
BF16_LOSS = (facts.WIDTH / 2 + 2) * U  # budget_indexer: half as many u as there are products
HEADS = {"V4": 64, "V3.2": 64, "tiny V4": 8, "tiny V3.2": 4}


class Sides(NamedTuple):
    """What a kernel is given, and what it stands for: float64 queries, and keys a sequence."""

    given: dict[str, Tensor]
    queries: Tensor  # [T, N, I]
    keys: list[Tensor]  # [W_s, I]
    visible: Tensor  # [T]


@dataclass(frozen=True)
class ScoresCase:
    """One launch; `lengths` are entries of each sequence, `fresh` its tokens in this call."""

    operands: str
    heads: int
    lengths: tuple[int, ...]
    fresh: tuple[int, ...]
    ratio: int = 4
    page: int = 64
    arithmetic: str = "float32"
    spread: str = "ordinary"
    stride_bytes: int = 0
    seed: int = 0

    @property
    def name(self) -> str:
        """One line that finds the case again."""
        return " ".join(str(fact).replace(" ", "") for fact in vars(self).values())

    @property
    def problem(self) -> ScoresProblem:
        """What the launch is asked for; there are more pages than the sequences need."""
        used = sum(-(-length // self.page) for length in self.lengths)
        pages = KeyPages(self.operands, self.page, used + 3, self.stride_bytes)
        entries = max(1, *self.lengths)
        return ScoresProblem(
            sum(self.fresh),
            self.heads,
            entries,
            len(self.lengths),
            pages,
            self.ratio,
            self.arithmetic,
        )

    @property
    def positions(self) -> Tensor:
        """Return each token's place in its sequence; the last one sees every entry."""
        tensors = [
            torch.arange(count) + (length + 1) * self.ratio - 1 - (self.ratio - 1) // 2 - count
            for length, count in zip(self.lengths, self.fresh, strict=True)
        ]
        return torch.cat(tensors).clamp(min=-1)


def _generator(case: ScoresCase, device: str) -> torch.Generator:
    return torch.Generator(device).manual_seed(case.seed)


def _drawn(case: ScoresCase, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    device = generator.device
    if case.spread == "integers":
        return torch.randint(-3, 4, shape, generator=generator, device=device).float()
    x = torch.randn(shape, generator=generator, device=device)
    if case.spread == "wide":
        rows = torch.randint(-6, 7, (*shape[:-1], 1), generator=generator, device=device)
        x *= torch.exp2(rows.float())
    return x - 0.2 if case.spread == "negative" else x


def sides(case: ScoresCase, device: str) -> Sides:
    """Draw operands and lay keys into pages."""
    p, generator = case.problem, _generator(case, device)
    by_head = (p.tokens, p.heads)
    q_TNI = _drawn(case, (*by_head, facts.WIDTH), generator)
    weight_TN = torch.randn(by_head, generator=generator, device=device) * 0.1
    fp8 = case.operands == "fp8"
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    queries = q_TNI.to(dtype)
    exact, scales = queries.double(), None
    if fp8:
        exponent = torch.randint(-9, -3, by_head, generator=generator, device=device)
        scales = torch.exp2(exponent.float())
        exact = exact * scales.double().unsqueeze(-1)
    if case.arithmetic == "stored":
        weight_TN = weight_TN.bfloat16()
    pages, table, keys = paged(case, generator)
    sequences = torch.repeat_interleave(torch.tensor(case.fresh)).int().to(device)
    positions = case.positions.to(device)
    visible = facts.visible_entries(positions, case.ratio).clamp(0, p.entries)
    given = {
        "queries": queries, "weights": weight_TN, "positions": positions, "sequences": sequences,
        "table": table, "pages": pages,
    }  # fmt: skip
    given |= {} if scales is None else {"scales": scales}
    return Sides(given, exact, keys, visible)


def paged(case: ScoresCase, generator: torch.Generator) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return pages as bytes, the table, and each sequence's keys in float64."""
    p, device = case.problem, generator.device
    fp8, e = case.operands == "fp8", case.page
    shape = (p.pages.count, p.pages.stride)
    pages = torch.full(shape, NAN_BYTE, dtype=torch.uint8, device=device)
    table = torch.full((p.sequences, p.pages_of_sequence), NONSENSE, dtype=torch.int32)
    order = torch.randperm(p.pages.count, generator=torch.Generator().manual_seed(case.seed))
    row_bytes, taken, keys = facts.WIDTH * facts.OPERANDS[case.operands].bytes, 0, []
    for sequence, length in enumerate(case.lengths):
        codes = _drawn(case, (length, facts.WIDTH), generator)
        codes = codes.to(torch.float8_e4m3fn if fp8 else torch.bfloat16)
        scales = torch.exp2(
            torch.randint(-8, -2, (length,), generator=generator, device=device).float()
        )
        keys.append(codes.double() * (scales.double()[:, None] if fp8 else 1.0))
        for column in range(-(-length // e)):
            page = int(order[taken])
            table[sequence, column], taken = page, taken + 1
            part = slice(column * e, min((column + 1) * e, length))
            rows = codes[part].view(torch.uint8).flatten()
            pages[page, : rows.numel()] = rows
            if fp8:
                own = scales[part].view(torch.uint8)
                pages[page, e * row_bytes : e * row_bytes + own.numel()] = own
    return pages, table.to(device), keys


def kernels_here() -> Any:
    """Return the module of the GPU that is installed."""
    return import_module(module_of(MODULES[target_of_device().name]))


def on_device(case: ScoresCase, given: dict[str, Tensor], form: ScoresForm | None = None) -> Tensor:
    """Run a case into NaN, with a form if one is given."""
    p, kernel = case.problem, kernels_here().KERNEL
    out = torch.full((p.tokens, p.entries), torch.nan, device=given["queries"].device)
    if form is None:
        kernel.run(p, SETTINGS, **given, out=out)
    else:
        kernel.launch(kernel.compile_form(form, SETTINGS), form, p, {**given, "out": out})
    return out


def exact_scores(case: ScoresCase, of: Sides) -> tuple[Tensor, Tensor]:
    """Return scores [T, W] in float64, -inf unseen, and how far each may be off before rounding."""
    p = case.problem
    device = of.queries.device
    want_TW = torch.full((p.tokens, p.entries), -torch.inf, dtype=torch.float64, device=device)
    slack_TW = torch.zeros_like(want_TW)
    loss = FP8_LOSS if case.operands == "fp8" else BF16_LOSS
    begin = 0
    for count, key_WI in zip(case.fresh, of.keys, strict=True):
        tokens = slice(begin, begin + count)
        q_TNI, factor = of.queries[tokens], of.given["weights"][tokens].double().unsqueeze(-1)
        size = torch.matmul(q_TNI.abs(), key_WI.abs().T)
        near = BoundedValue(torch.matmul(q_TNI, key_WI.T).clamp(min=0), size * loss)
        if case.arithmetic == "stored":
            near = stored(near, torch.bfloat16)
            near = stored(
                BoundedValue(near.value * factor, near.error * factor.abs()), torch.bfloat16
            )
        else:
            near = BoundedValue(near.value * factor, near.error * factor.abs())
        added = (p.heads + 3) * U * near.value.abs().sum(1)
        want_TW[tokens, : len(key_WI)] = near.value.sum(1)
        slack_TW[tokens, : len(key_WI)] = near.error.sum(1) + added
        begin += count
    hidden = torch.arange(p.entries, device=device) >= of.visible[:, None]
    return want_TW.masked_fill(hidden, -torch.inf), slack_TW.masked_fill(hidden, 0.0)


def difference(case: ScoresCase, got_TW: Tensor, of: Sides) -> str:
    """Say how scores leave their budget; empty where they do not."""
    want_TW, slack_TW = exact_scores(case, of)
    low, high = want_TW - slack_TW, want_TW + slack_TW
    if case.arithmetic == "stored":  # rounding keeps the order
        low, high = low.bfloat16().double(), high.bfloat16().double()
    got = got_TW.double()
    fine = (got >= low) & (got <= high)  # NaN is wrong; -inf lies between -inf and -inf
    if bool(fine.all()):
        return ""
    wrong = (~fine).nonzero()
    first = tuple(wrong[0].tolist())
    unseen = int((got.isneginf() != want_TW.isneginf()).sum())
    return (
        f"{case}: {len(wrong)} of {fine.numel()} beyond their budget, {unseen} of them about what "
        f"is seen, first at {first}: got {float(got[first])}, want {float(want_TW[first])} within "
        f"{float(slack_TW[first]):.2e}"
    )


def mismatch(case: ScoresCase, device: str = "cuda") -> str:
    """Say how a case differs from the exact scores on the GPU."""
    of = sides(case, device)
    return difference(case, on_device(case, of.given), of)


def alone_differ(case: ScoresCase) -> list[int]:
    """Return tokens whose scores are others in a launch without company, in the form for one."""
    of = sides(case, "cuda")
    whole, p, found = on_device(case, of.given), case.problem, []
    for token in range(0, p.tokens, max(1, p.tokens // 6)):
        of_token = {"queries", "weights", "positions", "sequences", "scales"}
        one = {
            name: tensor[token : token + 1].clone() if name in of_token else tensor
            for name, tensor in of.given.items()
        }
        got = kernels_here().KERNEL.run_one(replace(p, tokens=1), SETTINGS, **one)
        if not torch.equal(got[0].view(torch.int32), whole[token].view(torch.int32)):
            found.append(token)
    return found


# ---- cases ---------------------------------------------------------------------------------------


def cases() -> list[ScoresCase]:
    """Return the named cases: models' heads, pages, lengths around pages and stages, ragged."""
    made = []
    for operands in ("bf16", "fp8"):
        for arithmetic in facts.ARITHMETICS:
            for seed, spread in enumerate(SPREADS):
                one = ScoresCase(operands, 64, (700,), (150,), 4, 64, arithmetic, spread)
                made.append(replace(one, seed=seed))
                ragged = (1, 63, 64, 65, 127, 128, 129, 513, 1100)
                made.append(replace(one, lengths=ragged, fresh=(1,) * len(ragged), seed=seed))
                made.append(replace(one, lengths=ragged, fresh=(3, 1, 2, 7, 1, 1, 5, 9, 30)))
            small = ScoresCase(operands, 8, (40, 700), (50, 90), 4, 64, arithmetic)
            made += [small, replace(small, heads=4, ratio=1), replace(small, heads=4, fresh=(1, 1))]
    base = ScoresCase("bf16", 64, (400, 90), (60, 9), 1)
    made += [replace(base, page=page) for page in (16, 32, 128, 256)]
    made += [replace(base, heads=heads) for heads in (1, 24, 40, 128)]
    made.append(ScoresCase("fp8", 64, (640,), (100,), 4, stride_bytes=8640))
    # Scales lie behind a page's keys: boxes of all sizes, and stages taken one and several at once.
    fp8 = ScoresCase("fp8", 64, (400, 90), (60, 9), 1)
    for page in (8, 16, 24, 32, 128, 256):
        made += [replace(fp8, page=page), replace(fp8, page=page, lengths=(1400, 90), fresh=(1, 1))]
    made += [replace(fp8, heads=heads, page=16) for heads in (1, 24, 128, 256)]
    several = (191, 192, 193, 255, 256, 257, 319, 321, 512, 513, 577)
    made += [
        replace(fp8, lengths=several, fresh=(count,) * len(several), ratio=4, arithmetic=arithmetic)
        for count in (1, 5)
        for arithmetic in facts.ARITHMETICS
    ]
    made.append(ScoresCase("bf16", 64, (9000,), (5,), 4, arithmetic="stored"))
    made.append(ScoresCase("bf16", 64, (9000, 3, 5000), (1, 1, 1), 4))
    return made


def fuzzed(seed: int, count: int) -> list[ScoresCase]:
    """Draw cases among few forms."""
    drawn = random.Random(f"indexer {seed}")
    made = []
    for _ in range(count):
        sequences = drawn.choice((1, 1, 2, drawn.randint(1, 12)))
        lengths = tuple(drawn.randint(1, drawn.choice((90, 1500))) for _ in range(sequences))
        alone = drawn.random() < 0.3
        fresh = tuple(1 if alone else drawn.randint(1, 40) for _ in range(sequences))
        operands = drawn.choice(("bf16", "fp8"))
        made.append(
            ScoresCase(
                operands,
                drawn.choice((64, 64, drawn.randint(1, 8), drawn.randint(57, 64))),
                lengths,
                fresh,
                drawn.choice((1, 4)),
                64,
                drawn.choice(facts.ARITHMETICS),
                drawn.choice(SPREADS),
                seed=drawn.randrange(1 << 30),
            )
        )
    return made
