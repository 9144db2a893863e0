"""What the kernels of the caches register: forms with derived figures, cases, replays."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from degarble.kernels.cache import problem as facts
from degarble.kernels.cache.problem import (
    KINDS,
    PagedForm,
    PagedPoolProblem,
    PoolForm,
    SlotsForm,
    StatePages,
)
from degarble.kernels.primitives.kv_problem import (
    ENTRIES,
    KEY,
    KEY_WIDTH,
    SOURCES,
    WITH_KEY,
    ReadForm,
    ReadProblem,
    WriteForm,
)
from degarble.kernels.runtime.modules import kernel_named
from degarble.kernels.runtime.targets import TARGETS
from degarble.suites.kernels import cache_checks
from degarble.suites.kernels.cache import compressor_checks, paged_pool_checks
from degarble.suites.kernels.contract import (
    SETTINGS,
    Detection,
    Judged,
    MachineCode,
    Replay,
    ReplayCase,
    Round,
    kernels_of,
    require_early_reads_alone,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.kernels.runtime.compiling import CompiledKernel

POOLS = ((5, ((4, 512), (128, 512))), (3000, ((128, 512),)))  # tokens; ratio and width
OTHER_POOLS = (
    (5, ((4, 128), (128, 128))), (200, ((4, 512), (4, 128), (128, 512))),
    (3000, ((4, 512), (4, 128))),
)  # fmt: skip


def _code(target: str) -> Iterator[MachineCode]:
    for kind in KINDS:
        yield MachineCode("simt_slots", SlotsForm(kind, target), 32)
    for entry in ENTRIES:
        slow = entry not in {"fp8", "nvfp4"}
        yield MachineCode("simt_kv_read", ReadForm(entry, target), 40, fused=0, slow=slow)
    for entry in cache_checks.WITH_KEY:
        yield MachineCode("simt_kv_read", ReadForm(entry, target, WITH_KEY), slow=True)
        for source in SOURCES:
            writing = WriteForm(entry, source, "bf16", "last", True, target, WITH_KEY)
            yield MachineCode("simt_kv_write", writing, launched=2, slow=True)
    yield from _written(target)
    for ratio, width in product((4, 128), (512, 128)):
        for alone, few in ((True, True), (True, False), (False, False)):
            pool = PoolForm(ratio, width, alone, target, few)
            usual = width == 512 and (few if ratio == 4 else not alone)
            launched = 1 if alone else 2
            yield MachineCode(
                "simt_compressor", pool, 168, launched=launched, reads_early=True,
                more=_guesses_alone if alone else _reads_weights_alone, slow=not usual,
            )  # fmt: skip
    for tokens, served in (*POOLS, *OTHER_POOLS):
        for ratio, width in served:
            columns = width * (2 if ratio == 4 else 1)
            pages = StatePages(paged_pool_checks.ROWS[ratio], 9, columns)
            paged = facts.choose_paged_form(
                PagedPoolProblem(tokens, 1, ratio, pages, width), target
            )
            slow = (tokens, served) not in POOLS
            yield MachineCode(
                "simt_paged_pool", paged, 96, launched=3, reads_early=True,
                more=_guesses_alone, slow=slow,
            )  # fmt: skip


def _guesses_alone(kernel: CompiledKernel, form: PagedForm | PoolForm) -> None:
    """Of the only token the bias of a row is read before the wait, which nothing writes."""
    pool = form.pool if isinstance(form, PagedForm) else form
    weights = pool.columns // pool.width + pool.turns_of_row
    require_early_reads_alone(kernel.ptx, weights, guesses=True)


def _reads_weights_alone(kernel: CompiledKernel, form: PoolForm) -> None:
    """What keeps rows reads them while windows are pooled, which only read them."""
    assert not form.alone
    assert "ld.relaxed" not in kernel.ptx


def _written(target: str) -> Iterator[MachineCode]:
    for few in (True, False):
        # An indexer's keys.
        yield _write_code(WriteForm(KEY, "latent", "bf16", "absent", few, target, KEY_WIDTH))
    for entry, duplicates, few, width in product(
        ENTRIES, ("absent", "last"), (True, False), (512, 128)
    ):
        for source, weight in (("latent", "bf16"), ("latent", "fp32"), ("row", "bf16")):
            form = WriteForm(entry, source, weight, duplicates, few, target, width)
            usual = entry in {"fp8", "nvfp4"} and width == 512 and duplicates == "absent"
            yield _write_code(form, slow=not (usual and (source, weight) == ("latent", "bf16")))


def _write_code(form: WriteForm, *, slow: bool = False) -> MachineCode:
    # The sum of squares; for NVFP4, in each of two halves, the inverse's error and eight quotients,
    # on sm_90a the inverse, and quotients and codes of four pairs. Of an indexer's keys the inverse
    # and eight quotients, and where it is no power of two the scale.
    nvfp4, halves = form.format.code_bits == 4, 2 if form.width == 512 else 1
    fused = 7 * halves * (form.source == "latent")
    fused += halves * nvfp4 * (1 + 8 if TARGETS[form.target].converts_e2m1 else 2 + 4 + 4)
    if form.format.numbers:
        fused += halves * (2 + 4 * 8 + 4 * (not form.format.powers))
    launched = 2 if form.duplicates == "last" else 1
    return MachineCode("simt_kv_write", form, 56 if form.few else 32, 0, launched, fused, slow=slow)


CODE = [code for target in TARGETS for code in _code(target)]
JUDGED = [
    Judged(
        "simt_kv_write", cache_checks.cases(), cache_checks.mismatch, cache_checks.fuzzed, 10, 50,
        cache_checks.on_device, 20,
    ),
    Judged(
        "simt_kv_read", cache_checks.cases(), cache_checks.read_mismatch, cache_checks.fuzzed,
        10, 50,
    ),
    Judged(
        "simt_compressor", compressor_checks.cases(), compressor_checks.mismatch,
        compressor_checks.fuzzed, 10, 50,
    ),
    Judged(
        "simt_paged_pool", paged_pool_checks.cases(), paged_pool_checks.mismatch,
        paged_pool_checks.fuzzed, 10, 30,
    ),
]  # fmt: skip


def _rows(cache_NB: Any, asked: Any, problem: ReadProblem) -> Any:
    return cache_checks.read_by_definition(cache_NB, asked, problem.pages)


DETECTIONS = [
    Detection(
        f"simt_kv_read-{entry}", cache_checks, "read_on_device", cache_checks.read_mismatch,
        cache_checks.Case(cache_checks.write_problem(entry, 6, 3), "wide"), _rows,
    )
    for entry in ENTRIES
]  # fmt: skip


def _replay_write(entry: str, duplicates: str) -> Replay:
    kernels = kernels_of("simt_kv_write")
    problem = cache_checks.write_problem(entry, 257, duplicates=duplicates)
    kind = "repeated" if duplicates == "last" else "spread"
    cases = [cache_checks.Case(problem, "wide", kind, seed) for seed in range(3)]
    given = cache_checks.operands_of(cases[0], "cuda")
    if duplicates == "last":
        given["claims"] = kernels.empty_claims(problem, torch.device("cuda"))
    changed = ("values", "weight", "positions", "slots")
    rounds = [
        Round([getattr(case, name) for name in changed], partial(cache_checks.by_definition, case))
        for case in cases
    ]
    cache_NB = cases[0].cache().cuda()
    return Replay(
        lambda: kernels.KERNEL.run(problem, SETTINGS, **given, cache=cache_NB),
        [given[name] for name in changed], cache_NB, rounds,
    )  # fmt: skip


def _replay_read(entry: str) -> Replay:
    case = cache_checks.Case(cache_checks.write_problem(entry, 131), "wide")
    pages, cache_NB = case.problem.pages, cache_checks.by_definition(case)
    problem, kernel = ReadProblem(200, pages), kernel_named("simt_kv_read")
    asked, held = torch.zeros(200, dtype=torch.int32, device="cuda"), cache_NB.cuda()
    given: dict[str, Any] = {"indices": asked, "cache": held}
    out, rounds = kernel.run_one(problem, SETTINGS, **given), []
    for seed in range(3):
        drawn = torch.Generator().manual_seed(seed)
        chosen = torch.randint(-1, pages.slots, (200,), generator=drawn).to(torch.int32)
        rounds.append(
            Round([chosen], partial(cache_checks.read_by_definition, cache_NB, chosen, pages))
        )
    return Replay(lambda: kernel.run(problem, SETTINGS, **given, out=out), [asked], out, rounds)


REPLAYS = [
    ReplayCase(f"simt_kv_write-{entry}-{duplicates}", partial(_replay_write, entry, duplicates))
    for entry, duplicates in product(ENTRIES, ("absent", "last"))
] + [ReplayCase(f"simt_kv_read-{entry}", partial(_replay_read, entry)) for entry in ENTRIES]
