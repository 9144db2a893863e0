"""Print what follows from the sm_100a forms of attention and the indexer: derived facts, rooflines.

    python -m degarble.suites.kernels.attention.sm100_attention_table

Nothing of it was run. Data sheet of a B200: 2.25 PFLOP/s of dense BF16, 4.5 of FP8, 148
multiprocessors at 1.85 GHz; shared memory moves 128 bytes a clock. An instruction of 64 rows is
taken to run at half of the rate, because it uses half of the lanes. The design note shows what this
prints.
"""

from __future__ import annotations

import sys

from degarble.kernels.attention import problem as facts
from degarble.kernels.indexer import problem as of_scores
from degarble.kernels.indexer.problem import KeyPages, ScoresForm, ScoresProblem
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.kv_problem import ENTRIES, entry_format
from degarble.kernels.runtime.targets import SM100A

PROCESSORS, HERTZ = 148, 1.85e9
OPERATIONS = {"bf16": 8192, "fp8": 16_384}  # of a multiprocessor's matrix unit, a clock
SHARED_BYTES = 128  # a clock
# Heads and tokens of a launch.
SCORED = {(64, 4): "V4, V3.2", (64, 1): "decoding", (8, 4): "tiny V4", (4, 4): "tiny V3.2"}
SCORED |= {(4, 1): "the fewest"}
OF_V32 = ("fp8-v32", "fp8-v32-ue8m0", "bf16")


def form_of(heads: int, tokens: int, operands: str) -> ScoresForm:
    """Return the form of so many heads and tokens."""
    problem = ScoresProblem(tokens, heads, 5000, 1, KeyPages(operands, 64, 10))
    return of_scores.choose_form(problem, SM100A.name)


def table_of_scores() -> list[str]:
    """Return a line a form of the indexer's scores; stages and on are those of BF16 and FP8."""
    lines = [
        "| heads, tokens | columns held, allocated | stages | instructions | matrix unit, clocks |",
        "|---|---|---|---|---|",
    ]
    for (heads, tokens), name in SCORED.items():
        forms = {operands: form_of(heads, tokens, operands) for operands in of_scores.OPERANDS}
        form = forms["bf16"]
        stages, made = (
            ", ".join(str(count(scores_form)) for scores_form in forms.values())
            for count in (of_scores.stages, of_scores.instructions)
        )
        clocks = ", ".join(
            str(2 * of_scores.KEYS * form.columns * of_scores.WIDTH // OPERATIONS[operands])
            for operands in forms
        )
        lines.append(
            f"| {heads}, {form.at_once} ({name}) | {of_scores.columns_held(form)}, "
            f"{of_scores.columns_allocated(form)} | {stages} | {made} | {clocks} |"
        )
    return lines


def table_of_attention() -> list[str]:
    """Return a line an entry format: instructions of logits and sums, registers by role."""
    lines = [
        f"| entry | of {SM100A.shared_memory_bytes:,} bytes | instructions | registers |",
        "|---|---|---|---|",
    ]
    formats = [*ENTRIES.values(), *(entry_format(name, facts.V32.key) for name in OF_V32)]
    for entry in formats:
        logits, sums = facts.instructions(entry.width)
        registers = ", ".join(map(str, facts.REGISTERS[entry.width]))
        lines.append(
            f"| {entry.name}, {entry.width} | {facts.shared_bytes(entry):,} | {logits}, "
            f"{sums} | {registers} |"
        )
    return lines


def bounds_of_attention() -> list[str]:
    """Return what a tile takes at least: logits, sums; queries and keys, shares and values, all."""
    lines = [
        "| key | matrix unit, clocks | shared memory, clocks | TFLOP/s at most |",
        "|---|---|---|---|",
    ]
    for width in facts.FAMILIES:
        products = [2 * facts.HEADS * facts.TILE * k for k in (width, rows.WIDTH)]
        clocks = [2 * product // OPERATIONS["bf16"] for product in products]  # at half of the rate
        tile = 2 * facts.TILE * width
        moved = [
            2 * facts.HEADS * width + tile,
            2 * 2 * facts.HEADS * facts.TILE + 2 * facts.TILE * rows.WIDTH,
            tile,
        ]
        of_memory = [each // SHARED_BYTES for each in moved]
        least = max(sum(clocks), sum(of_memory))
        bound = sum(products) / least * HERTZ * PROCESSORS / 1e12
        lines.append(
            f"| {width} | {clocks[0]:,}, {clocks[1]:,} | {of_memory[0]:,}, {of_memory[1]:,}, "
            f"{of_memory[2]:,} | {bound:,.0f} |"
        )
    return lines


def main() -> int:
    """Print all tables."""
    tables = (table_of_scores(), table_of_attention(), bounds_of_attention())
    print("\n\n".join("\n".join(table) for table in tables))  # noqa: T201  a script
    return 0


if __name__ == "__main__":
    sys.exit(main())
