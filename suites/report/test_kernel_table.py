"""The table of who computed what: counted by component, told by role, read back from a manifest."""

from __future__ import annotations

import json

from degarble.harness.report.kernel_table import KernelTable, Launch, table_lines

GEMM, TALL = Launch("sm90_gemm_bf16", "64x64x64"), Launch("sm90_gemm_bf16", "128x128x64")


def table() -> KernelTable:
    reasons = {"layers.0.attn.attend": "none yet", "layers.1.attn.attend": "none yet"}
    made = KernelTable("sm_90a", reasons)
    made.note("layers.0.attn.wq_a", [GEMM])
    made.note("layers.0.attn.wq_a", [TALL, GEMM])
    made.note("layers.1.attn.wq_a", [GEMM])
    made.note("head", [Launch("simt_gemv_bf16", "")])
    return made


def test_launches_are_counted_by_component_and_listed_by_role() -> None:
    document = table().document()
    assert document["kernels"]["layers.0.attn.wq_a"] == [
        {"kernel": "sm90_gemm_bf16", "tactic": "128x128x64", "launches": 1},
        {"kernel": "sm90_gemm_bf16", "tactic": "64x64x64", "launches": 2},
    ]
    lines = table().lines()
    assert lines[0] == "Kernels on sm_90a, by component:"
    assert any("sm90_gemm_bf16 [64x64x64] x3" in line and "attn.wq_a" in line for line in lines)
    assert any(line.endswith("simt_gemv_bf16 x1") for line in lines)
    assert sum("reference: none yet" in line for line in lines) == 1


def test_a_table_read_from_json_has_the_same_lines_and_a_partial_one_fewer() -> None:
    back = json.loads(json.dumps(table().document()))
    assert table_lines(back) == table().lines()
    assert table_lines({}) == ["Kernels on an unknown target, by component:"]
    assert table_lines({"kernels": [], "reference": 3})[1:] == []
