"""Problem and forms of experts for very few tokens, where each row multiplies its own matrices.

Rows: those of the shared expert first, if it takes part, a row a token; then the slots, row
shared + t * K + k. No row waits for another one's plan, and no tile is filled with zeros: two slots
of one expert read its matrices twice. Sums have W4A16's order (w4a16_problem), so a row's bits do
not depend on other rows. Host arithmetic only, no GPU and no DSL.
Shape letters: T tokens, K chosen, D hidden, F width of an expert, E experts, the shared one last.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch
from degarble.harness.formats.layouts import SWIZZLE_128X4, ceil_div
from degarble.kernels.gemm import w4a16_problem as product
from degarble.kernels.gemm import w4a16_walk_problem as walks
from degarble.kernels.gemm.w4a16_problem import W4A16ByRowForm, W4A16Problem, W4A16Tactic
from degarble.kernels.gemm.w4a16_walk_problem import W4A16WalkForm
from degarble.kernels.moe.problem import (
    AFTER_W2,
    GATE_AND_UP,
    MULTIPLE,
    CombineProblem,
    MoeProblem,
)
from degarble.kernels.primitives.quantise_problem import BLOCK, SWIGLU, VALUES
from degarble.kernels.runtime.targets import SM90A

MOST_TOKENS = product.LARGEST_ROWS
WAVE = 8448  # outputs of an H200's 132 processors, four tiles of 16 each
DECODING_THREADS = 128  # of a thread block, a block of 16 values each


@dataclass(frozen=True)
class ByRowProblem:
    """T tokens, K of the routed experts each, and the shared expert where `shared`."""

    moe: MoeProblem
    shared: bool = False

    def __post_init__(self) -> None:
        moe = self.moe
        if moe.tokens > MOST_TOKENS:
            raise ShapeMismatch(
                "tokens whose rows multiply matrices of their own",
                moe.tokens,
                f"at most {MOST_TOKENS}",
                "Use the grouped kernel, which reads an expert once for all of its rows.",
            )
        if moe.experts != moe.routed:
            raise InvalidArgument(
                "experts held here", moe.experts, f"all {moe.routed}", "Use the grouped kernel."
            )
        if moe.weighting != AFTER_W2:
            raise InvalidArgument("weighting", moe.weighting, AFTER_W2, "Use the grouped kernel.")

    @property
    def shared_rows(self) -> int:
        """Return the rows of the shared expert, which come first."""
        return self.moe.tokens if self.shared else 0

    @property
    def rows(self) -> int:
        """Return the rows of all experts."""
        return self.shared_rows + self.moe.slots

    @property
    def experts(self) -> int:
        """Return the experts whose matrices are stacked, the shared one last."""
        return self.moe.experts + self.shared


@dataclass(frozen=True)
class DecodeProblem:
    """Rows quantised with their experts' scales and decoded: x of their tokens, or after SwiGLU."""

    by_row: ByRowProblem
    source: str

    @property
    def columns(self) -> int:
        """Return the values of a decoded row."""
        moe = self.by_row.moe
        return moe.hidden if self.source == VALUES.name else moe.width

    @property
    def input_shape(self) -> tuple[int, int]:
        """Return the shape of what is read: tokens, or gate and then up of each row."""
        if self.source == VALUES.name:
            return self.by_row.moe.tokens, self.columns
        return self.by_row.rows, SWIGLU.read_for_one * self.columns

    @property
    def grid(self) -> tuple[int, int]:
        """Return the thread blocks along a row, and the rows."""
        return ceil_div(self.columns // BLOCK, DECODING_THREADS), self.by_row.rows


@dataclass(frozen=True)
class DecodeForm:
    """Compile-time parameters of what quantises and decodes rows."""

    source: str
    limit: float | None
    target: str


@dataclass(frozen=True)
class ByRowSum(CombineProblem):
    """The sum of a token's slots, and of the shared expert's row, which is among the products."""

    rides: bool


# Two thread blocks share a processor, so that eight warps of a scheduler hide each other's waits.
# Every form and division gives the same bits; times are in docs/design-notes/moe_kernel.md.
WIDE = W4A16Tactic(1, float("inf"), tiles=4, groups=1, ranks=1, stages=4, resident=2)
NARROW = W4A16Tactic(1, float("inf"), tiles=2, groups=1, ranks=1, stages=4, resident=2)
LONG = W4A16Tactic(1, float("inf"), tiles=1, groups=1, ranks=1, stages=4, resident=2)
TACTICS = (WIDE, NARROW, LONG)
LONG_COLUMNS = 4096  # from which on a run of one tile is long enough, where tokens are one


def matrix_problem(problem: ByRowProblem, products: int) -> W4A16Problem:
    """Return the product of one row with one matrix: gate or up, or down."""
    sides = problem.moe.width, problem.moe.hidden
    n, k = sides if products == GATE_AND_UP else sides[::-1]
    return W4A16Problem(1, n, k, SWIZZLE_128X4.name)


def choose_tactic(problem: W4A16Problem, target: str, tokens: int = 1) -> W4A16Tactic:
    """Return the tactic of a product; wide tiles spill elsewhere, since two blocks share it."""
    whole = problem.columns % product.COPIED == 0
    if not whole or target != SM90A.name:
        return NARROW
    return LONG if tokens == 1 and problem.columns >= LONG_COLUMNS else WIDE


def alone(outputs: int, columns: int, target: str = SM90A.name) -> ByRowProblem | None:
    """Return the product of one row with one matrix, where walks are its faster form.

    On sm_90a those of whole lines and whole 128 rows; of others those of more tiles than one wave
    of sm90_gemm_w4a16 has, and of so few that its thread blocks have two each: as measured on an
    H200, docs/design-notes/w4a16_kernel.md. Bits are the same.
    """
    waves = outputs > WAVE or (WAVE // 4 < outputs <= WAVE // 2 and columns >= LONG_COLUMNS)
    if (outputs | columns) % MULTIPLE:
        return None
    problem = ByRowProblem(MoeProblem(1, outputs, columns, experts=1, chosen=1, routed=1))
    walked = walks.serves(matrix_problem(problem, 1), target)
    return problem if walked or waves else None


def form_of(
    problem: ByRowProblem,
    products: int,
    target: str,
    tactic: W4A16Tactic | None = None,
    *,
    early: bool = False,
) -> W4A16ByRowForm:
    """Return the form of both products of a row with gate and up, or of one with down."""
    one = matrix_problem(problem, products)
    chosen = tactic or choose_tactic(one, target, problem.moe.tokens)
    form = product.choose_form(one, chosen, target)
    plain = {field.name: getattr(form, field.name) for field in fields(form)}
    return W4A16ByRowForm(**plain, products=products, early=early)


AnyForm = W4A16ByRowForm | W4A16WalkForm


def choose_first_form(problem: ByRowProblem, target: str) -> AnyForm:
    """Return the form of gate and up."""
    return _walk_or_runs(problem, GATE_AND_UP, target)


def choose_second_form(problem: ByRowProblem, target: str) -> AnyForm:
    """Return the form of down, or of a matrix alone."""
    return _walk_or_runs(problem, 1, target)


def _walk_or_runs(problem: ByRowProblem, products: int, target: str) -> AnyForm:
    one = matrix_problem(problem, products)
    # Early: what decodes its rows, in front, has waited for the router.
    if walks.serves(one, target):
        return walks.form_of(one, products, early=True)
    return form_of(problem, products, target)


def serves_gating(problem: ByRowProblem, target: str) -> bool:
    """Return whether down applies SwiGLU, quantises and decodes its rows itself.

    Every thread block does so anew for each row: for one token's rows of up to two rounds that
    costs less than a launch, as measured on an H200. Such a product loads early, so gate and up in
    front of it have to be a walk as well.
    """
    short = problem.moe.tokens == 1 and problem.moe.width <= 2 * product.ROUND
    ones = (matrix_problem(problem, products) for products in (GATE_AND_UP, 1))
    return short and all(walks.serves(one, target) for one in ones)


def serves_undecoded(problem: ByRowProblem, target: str) -> bool:
    """Return whether gate and up quantise and decode the token as well, which is as short."""
    return problem.moe.hidden <= 2 * product.ROUND and serves_gating(problem, target)


def undecoded_form(problem: ByRowProblem, source: str) -> W4A16WalkForm:
    """Return the form of gate and up on tokens' values, or of down on what gate and up made.

    Gate and up do not load early, because the router may be what is in front.
    """
    if source == VALUES.name:
        one = matrix_problem(problem, GATE_AND_UP)
        return walks.form_of(one, GATE_AND_UP, source=source, places=True)
    limit, one = problem.moe.limit, matrix_problem(problem, 1)
    return walks.form_of(one, 1, source=source, limit=limit, early=True)


def walk_numbers(problem: ByRowProblem, form: W4A16WalkForm, processors: int) -> tuple[int, ...]:
    """Return rows, N, K, experts, shared rows, chosen, thread blocks, shared bytes, division."""
    one = matrix_problem(problem, form.products)
    blocks, *division = walks.shares(problem.rows, one.outputs, form, processors)
    return (
        problem.rows,
        one.outputs,
        one.columns,
        problem.experts,
        problem.shared_rows,
        problem.moe.chosen,
        blocks,
        walks.shared_bytes(one.columns, form.stages),
        *division,
    )


def choose_decode_form(problem: DecodeProblem, target: str) -> DecodeForm:
    """Return the form that quantises and decodes rows."""
    limit = problem.by_row.moe.limit if problem.source == SWIGLU.name else None
    return DecodeForm(problem.source, limit, target)


@dataclass(frozen=True)
class Division:
    """How tiles of all matrices of all rows are divided among thread blocks: a launch's tactic.

    Each walks as many units as another one, or one more; a unit is `unit` tiles.
    """

    blocks: int
    unit: int


def tiles_of(problem: ByRowProblem, form: W4A16ByRowForm) -> tuple[int, int]:
    """Return the tiles of one matrix and those of all rows."""
    of_matrix = product.tiles(matrix_problem(problem, form.products))
    return of_matrix, of_matrix * form.products * problem.rows


def by_turns(problem: ByRowProblem, form: W4A16ByRowForm, turns: int) -> Division:
    """Divide whole runs among the fewest thread blocks of which none walks more than `turns`."""
    _, every = tiles_of(problem, form)
    return Division(ceil_div(every, form.tiles * turns), form.tiles)


def choose_division(problem: ByRowProblem, form: W4A16ByRowForm, processors: int) -> Division:
    """Give the thread blocks that are there at once equal shares; of few tiles, a run each."""
    once, resident = by_turns(problem, form, 1), form.resident * processors
    return once if once.blocks <= resident else Division(resident, 1)


def extents_of(problem: ByRowProblem, form: W4A16ByRowForm, division: Division) -> tuple[int, ...]:
    """Return rows, N, K, experts, shared rows, rounds kept, thread blocks, shared bytes, division.

    The latter: tiles of a matrix, units that each walks, how many walk one more, tiles of a unit.
    """
    one = matrix_problem(problem, form.products)
    of_matrix, every = tiles_of(problem, form)
    units = ceil_div(every, division.unit)
    least, more = divmod(units, division.blocks)
    most = ceil_div(units, division.blocks) * division.unit
    # A walk of one run has it in one matrix, if those have whole units.
    alone = most == division.unit <= form.tiles and of_matrix % division.unit == 0
    turns = 1 if alone else ceil_div(most, form.tiles) + 1
    return (
        problem.rows,
        one.outputs,
        one.columns,
        problem.experts,
        problem.shared_rows,
        product.rounds_kept(one, form, turns),
        division.blocks,
        product.shared_bytes(one, form, turns),
        of_matrix,
        least,
        more,
        division.unit,
    )


def summed(problem: ByRowProblem, *, shared: bool) -> ByRowSum:
    """Return the sum of all rows to tokens; `shared` says that a caller has the shared output."""
    moe = problem.moe
    with_shared = shared or problem.shared
    return ByRowSum(
        moe.tokens, moe.hidden, moe.chosen, problem.rows, True, with_shared, problem.shared
    )
