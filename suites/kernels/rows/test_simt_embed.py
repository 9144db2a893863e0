"""Rows of the embedding: compiled for every target, refusals, on an H200 equal to indexing."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import (
    DtypeMismatch,
    InvalidArgument,
    LayoutMismatch,
    ShapeMismatch,
)
from degarble.kernels.rows.problem import ID_DTYPES, EmbedForm, EmbedProblem
from degarble.kernels.runtime import operands
from degarble.kernels.runtime.compiling import CompileSettings, cubin_facts
from degarble.kernels.runtime.targets import TARGETS, Target

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
SETTINGS = CompileSettings()


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.rows.simt_embed")


@each_target
@pytest.mark.parametrize("ids", ID_DTYPES)
def test_compiles_without_spills_and_copies_vectors(
    kernels: ModuleType, target: Target, ids: str
) -> None:
    kernel = kernels.compile_form(EmbedForm(ids, target.name), SETTINGS)
    assert f".target {target.name}\n" in kernel.ptx
    (facts,) = cubin_facts(kernel.cubin)
    assert not facts.spills, facts
    assert facts.registers <= 64, facts
    assert kernel.ptx.count("ld.global.v4") == kernel.ptx.count("st.global.v4") == 4


def test_refuses_by_name(kernels: ModuleType) -> None:
    table, ids = torch.zeros(9, 64, dtype=torch.bfloat16), torch.tensor([0, 8])

    def run(ids: torch.Tensor, table: torch.Tensor = table, **more: torch.Tensor) -> None:
        kernels.embed(ids, table, EmbedProblem(2, 9, 64), SETTINGS, **more)

    for error, name, arguments in (
        (DtypeMismatch, "ids", (ids.int(),)),
        (ShapeMismatch, "ids", (ids[:1],)),
        (InvalidArgument, "id of token 1 = 9", (torch.tensor([0, 9]),)),
        (InvalidArgument, "id of token 0 = -1", (torch.tensor([-1, 9]),)),
        (DtypeMismatch, "table", (ids, table.float())),
        (LayoutMismatch, "strides of table", (ids, torch.zeros(64, 9).bfloat16().T)),
        (InvalidArgument, "one CUDA device", (ids,)),
    ):
        with pytest.raises(error, match=name):
            run(*arguments)
    with pytest.raises(ShapeMismatch, match="rows to write"):
        run(ids, out=table)


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("ids", ID_DTYPES)
@pytest.mark.parametrize(("tokens", "columns"), [(1, 8), (7, 264), (300, 7168), (33, 20_000)])
def test_equal_to_indexing_and_zeros_outside(
    kernels: ModuleType, ids: str, tokens: int, columns: int
) -> None:
    problem = EmbedProblem(tokens, 1000, columns, ids)
    table = torch.randn(1000, columns, device="cuda").bfloat16()
    id_T = torch.randint(-40, 1040, (tokens,), device="cuda").to(operands.DTYPES[ids])
    id_T[0] = 999
    out = torch.full((tokens, columns), torch.nan, dtype=torch.bfloat16, device="cuda")
    kernels.embed(id_T, table, problem, SETTINGS, out=out)
    inside = (id_T >= 0) & (id_T < 1000)
    want = torch.where(inside[:, None], table[torch.where(inside, id_T, 0).long()], 0.0)
    assert torch.equal(out, want)
    on_cpu = id_T.clamp(0, 999).cpu()
    got = kernels.embed(on_cpu, table, problem, SETTINGS)
    assert torch.equal(got, table[on_cpu.cuda().long()])


@pytest.mark.h200
@pytest.mark.b200
def test_a_table_larger_than_32_bits_and_a_graph(kernels: ModuleType) -> None:
    problem = EmbedProblem(64, 400_000, 7168)  # 5.7 GB
    table = torch.empty(400_000, 7168, dtype=torch.bfloat16, device="cuda")
    table[::1000] = torch.randn(400, 7168, device="cuda").bfloat16()
    table[-1] = 3.0
    id_T = torch.zeros(64, dtype=torch.int64, device="cuda")
    out = torch.empty(64, 7168, dtype=torch.bfloat16, device="cuda")
    kernels.embed(id_T, table, problem, SETTINGS, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.embed(id_T, table, problem, SETTINGS, out=out)
    for start in (0, 100_000, 336_000):
        id_T.copy_(torch.arange(start, start + 64_000, 1000))
        id_T[-1] = 399_999
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, table[id_T])
