"""Kernels against others: all rows are made, calls fit the wheels' schemas, failures are reasons.

Stand-ins have the schemas of vLLM 0.26.0's libraries and compute by definition, so that the bytes
that we hand to a kernel of others mean to it what they mean to ours.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import threading
import time
import zipfile
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import EXIT_AGREES, EXIT_DIFFERS, EXIT_REFUSED, WorkerLost
from degarble.harness.nightly import compiling
from degarble.kernels.gemm.problem import FP8_BLOCK, GemmProblem
from degarble.kernels.gemm.w4a16_problem import W4A16Problem
from degarble.kernels.indexer.problem import TopkProblem
from degarble.kernels.rows.problem import (
    NormProblem,
    ResidualProblem,
    ScaleProblem,
    choose_scale_form,
)
from degarble.kernels.runtime import targets
from degarble.kernels.runtime.forms import KernelForm
from degarble.kernels.runtime.targets import SM90A
from degarble.references.tiny.configs import TINY_V4
from degarble.suites.bench import attention as attention_bench
from degarble.suites.bench import decoder, gpu, moe
from degarble.suites.bench import indexer as indexer_bench
from degarble.suites.bench.kernel_peers import __main__ as command
from degarble.suites.bench.kernel_peers import (
    attention,
    contest,
    experts,
    indexer,
    linears,
    pack,
    report,
    rows,
    tokens,
    vendors,
)
from degarble.suites.bench.kernel_peers.contest import (
    OURS,
    Call,
    Contender,
    DeviceLostError,
    LargeRow,
    Row,
    TimedRow,
    absent,
    measure,
    of_best,
    of_copy,
)
from degarble.suites.bench.runner import COPY, Arm
from degarble.suites.bench.test_gpu_benches import Recording
from degarble.suites.support.pretended_gpu import pretended_gpu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.nightly.compiling import NeededForms

# As the libraries of vLLM 0.26.0 register them.
SCHEMAS = """
cutlass_scaled_mm(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias)
-> ();
marlin_gemm(Tensor a, Tensor? c_or_none, Tensor b_q_weight, Tensor? b_bias_or_none, Tensor
b_scales, Tensor? a_scales, Tensor? global_scale, Tensor? b_zeros_or_none, Tensor? g_idx_or_none,
Tensor? perm_or_none, Tensor workspace, int b_type_id, SymInt size_m, SymInt size_n, SymInt
size_k, bool is_k_full, bool use_atomic_add, bool use_fp32_reduce, bool is_zp_float) -> Tensor;
gptq_marlin_repack(Tensor b_q_weight, Tensor perm, SymInt size_k, SymInt size_n, int num_bits,
bool is_a_8bit) -> Tensor;
rms_norm(Tensor! result, Tensor input, Tensor? weight, float epsilon) -> ();
fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ();
silu_and_mul(Tensor! result, Tensor input) -> ();
silu_and_mul_with_clamp(Tensor! result, Tensor input, float limit, float alpha=1.0, float
beta=0.0) -> ();
top_k_per_row_prefill(Tensor logits, Tensor rowStarts, Tensor rowEnds, Tensor! indices, int
numRows, int stride0, int stride1, int topK) -> ();
top_k_per_row_decode(Tensor logits, int next_n, Tensor seq_lens, Tensor! indices, int numRows, int
stride0, int stride1, int topK) -> ();
persistent_topk(Tensor logits, Tensor lengths, Tensor! output, Tensor workspace, int k, int
max_seq_len) -> ();
cooperative_topk(Tensor logits, Tensor lengths, Tensor! output, Tensor workspace, int k, int
max_seq_len) -> ();
moe_align_block_size(Tensor topk_ids, int num_experts, int block_size, Tensor! sorted_token_ids,
Tensor! experts_ids, Tensor! num_tokens_post_pad, Tensor? maybe_expert_map) -> ();
moe_wna16_marlin_gemm(Tensor! a, Tensor? c_or_none, Tensor! b_q_weight, Tensor? b_bias_or_none,
Tensor! b_scales, Tensor? a_scales, Tensor? global_scale, Tensor? b_zeros_or_none, Tensor?
g_idx_or_none, Tensor? perm_or_none, Tensor! workspace, Tensor sorted_token_ids, Tensor!
expert_ids, Tensor! num_tokens_past_padded, Tensor! topk_weights, int moe_block_size, int top_k,
bool mul_topk_weights, int b_type_id, int size_m, int size_n, int size_k, bool is_full_k, bool
use_atomic_add, bool use_fp32_reduce, bool is_zp_float, int thread_k, int thread_n, int
blocks_per_sm) -> Tensor;
sparse_decode_fwd(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, Tensor? attn_sink,
Tensor(a)? tile_scheduler_metadata, Tensor(b)? num_splits, Tensor? extra_kv, Tensor?
extra_indices, Tensor? extra_topk_length, int d_v, float sm_scale, Tensor(c!)? out_) ->
(Tensor(c!), Tensor, Tensor(a)?, Tensor(b)?);
sparse_prefill_fwd(Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v, Tensor?
attn_sink, Tensor? topk_length, Tensor(a!)? out_) -> Tensor[];
"""
SPACE = "degarble_peers"
LIBRARY = torch.library.Library(SPACE, "DEF")
VLLM_SCALES = (4.0, "27ea7eccbbc1548a")
NEAR = 6e-3  # of BF16 outputs, relative L2


# ---- stand-ins by definition ---------------------------------------------------------------------


def scaled_mm(*given: Any) -> None:
    out, a, b, a_scales, b_scales, _ = given
    wide = a.double() * a_scales.double().repeat_interleave(128, 1)[:, : a.shape[1]]
    other = b.double() * b_scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    out.copy_(wide @ other)


def repack(words: Tensor, _perm: Tensor, size_k: int, size_n: int, bits: int, _b: Any) -> Tensor:
    assert words.shape == (size_k // 8, size_n)
    return words.new_zeros(size_k // 16, size_n * bits // 2)


def marlin_zeros(a: Tensor, out: Tensor, weight: Tensor, *given: Any) -> Tensor:
    scales, rows, columns, inner = given[1], *given[9:12]
    assert a.shape == (rows, inner)
    assert out.shape == (rows, columns)
    assert weight.shape == (inner // 16, 2 * columns)
    assert scales.shape == (inner // 16, columns)
    assert (scales.view(torch.uint8) >= 0x80).all(), "the top bit of every scale is set"
    return out.zero_().clone()


def norm(out: Tensor, x: Tensor, weight: Tensor, epsilon: float) -> None:
    out.copy_(torch.nn.functional.rms_norm(x.float(), weight.shape, weight.float(), epsilon))


def sum_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
    residual += x
    norm(x, residual, weight, epsilon)


def chosen(out: Tensor, scores: Tensor, count: int) -> None:
    out.copy_(scores.topk(count).indices)


def align(ids: Tensor, experts_here: int, rows_: int, order: Tensor, *rest: Any) -> None:
    of_experts, count, _ = rest
    order.fill_(ids.numel())
    of_experts.fill_(0)
    count.fill_(len(order))
    assert experts_here > int(ids.max())
    assert len(of_experts) == -(-len(order) // rows_)


def moe_zeros(a: Tensor, out: Tensor, weight: Tensor, *given: Any) -> Tensor:
    top, weighted, _, rows, columns, inner = given[13:19]
    assert a.shape == (rows, inner)
    assert out.shape == (rows * top, columns)
    assert weight.shape[1:] == (inner // 16, 2 * columns)
    assert weighted == (top == 1)
    return out.zero_().clone()


def decoded(cache_NB: Tensor, slots: Tensor, width: int) -> Tensor:
    """Rows of FlashMLA's entries: 656 bytes with float32 scales, or 584 with exponents behind."""
    pages, entries, _, size = cache_NB.shape
    if size == 656:
        flat = cache_NB.reshape(pages * entries, size)[slots]
        scales = flat[:, 512:528].contiguous().view(torch.float32)
        codes = flat[:, :512].contiguous().view(torch.float8_e4m3fn).double().view(-1, 4, 128)
        plain = (codes * scales[:, :, None]).flatten(1)
        rest = flat[:, 528:]
    else:
        assert size == 584
        flat = cache_NB.reshape(pages, -1)
        values = flat[:, : entries * 576].reshape(-1, 576)[slots]
        exponents = flat[:, entries * 576 :].reshape(-1, 8)[slots][:, :7].double() - 127
        codes = values[:, :448].contiguous().view(torch.float8_e4m3fn).double().view(-1, 7, 64)
        plain, rest = (codes * 2.0 ** exponents[:, :, None]).flatten(1), values[:, 448:]
    made = torch.cat((plain, rest.contiguous().view(torch.bfloat16).double()), 1)
    assert made.shape[1] == width
    return made


def attend(q: Tensor, keys: Tensor, scale: float, sink: Tensor | None) -> Tensor:
    assert q.shape[0] % 64 == 0, "FlashMLA takes 64 or 128 heads"
    logits = q.double() @ keys.T * scale
    top = torch.exp(logits)
    total = top.sum(-1) + (0 if sink is None else torch.exp(sink.double()))
    return (top / total[:, None]) @ keys[:, :512]


def decode(*given: Any) -> tuple[Tensor, ...]:
    q, cache_NB, indices, _, sink, plan, _, extra, extra_indices, _, _, scale, out = given
    for token in range(len(q)):
        keys = decoded(cache_NB, indices[token, 0].long(), q.shape[-1])
        if extra is not None:
            keys = torch.cat((keys, decoded(extra, extra_indices[token, 0].long(), q.shape[-1])))
        out[token, 0] = attend(q[token, 0], keys, scale, sink)
    plan = torch.zeros(1, dtype=torch.int32) if plan is None else plan.clone()
    return out.clone(), torch.zeros(1), plan, torch.zeros(1)


def prefill(*given: Any) -> list[Tensor]:
    q, rows_S1L, indices, scale, _, sink, _, out = given
    for token in range(len(q)):
        keys = rows_S1L[indices[token, 0].long(), 0].double()
        out[token] = attend(q[token], keys, scale, sink)
    return []


BY_DEFINITION: dict[str, Callable[..., Any]] = {
    "cutlass_scaled_mm": scaled_mm, "marlin_gemm": marlin_zeros, "gptq_marlin_repack": repack,
    "rms_norm": norm, "fused_add_rms_norm": sum_norm,
    "silu_and_mul": lambda out, _x: out.zero_(),
    "silu_and_mul_with_clamp": lambda out, _x, _limit, *_more: out.zero_(),
    "top_k_per_row_prefill": lambda x, _a, _b, out, *told: chosen(out, x, told[3]),
    "top_k_per_row_decode": lambda x, _n, _l, out, *told: chosen(out, x, told[3]),
    "persistent_topk": lambda x, _l, out, _w, k, _m: chosen(out, x, k),
    "cooperative_topk": lambda x, _l, out, _w, k, _m: chosen(out, x, k),
    "moe_align_block_size": align, "moe_wna16_marlin_gemm": moe_zeros,
    "sparse_decode_fwd": decode, "sparse_prefill_fwd": prefill,
}  # fmt: skip


def _without_result(function: Callable[..., Any]) -> Callable[..., None]:
    def call(*given: Any) -> None:
        function(*given)

    return call


for _schema in (" ".join(each.split()) for each in SCHEMAS.split(";")[:-1]):
    _name = _schema.partition("(")[0]
    LIBRARY.define(_schema)
    _call = BY_DEFINITION[_name]
    LIBRARY.impl(_name, _without_result(_call) if _schema.endswith("-> ()") else _call, "CPU")


def gemm_nt(a: Any, b: Any, out: Tensor, *, disable_ue8m0_cast: bool) -> None:
    assert disable_ue8m0_cast
    scaled_mm(out, a[0], b[0].T, a[1], b[1].T, None)


def mqa_logits(
    q: Any, kv: Any, weights: Tensor, first: Tensor, last: Tensor, *, clean_logits: bool
) -> Tensor:
    assert not clean_logits
    assert first.dtype is last.dtype is torch.int32
    near = torch.einsum("thd,wd->thw", q[0].double(), kv[0].double()).clamp(min=0)
    made: Tensor = (near * weights.double()[..., None]).sum(1) * kv[1].double()
    return made


def paged_logits(
    q: Any, pages: Tensor, weights: Tensor, lengths: Tensor, *told: Any, clean_logits: bool
) -> Tensor:
    table, _, entries = told
    assert lengths.shape == (len(table), 1)
    made = []
    for token, of in enumerate(table):
        flat = pages[of.long()].flatten(1)
        keys = flat[:, : 64 * 128].reshape(-1, 128).view(torch.float8_e4m3fn)
        scales = flat[:, 64 * 128 :].contiguous().view(torch.float32).flatten()
        query, weight = (q[0][token], None), weights[token : token + 1]
        of_one = mqa_logits(query, (keys, scales), weight, of, of, clean_logits=clean_logits)
        made.append(of_one)
    assert entries == made[0].shape[1]
    return torch.cat(made)


DEEP_GEMM = SimpleNamespace(
    fp8_gemm_nt=gemm_nt, bf16_gemm_nt=lambda a, b, out: torch.mm(a, b.T, out=out),
    get_mn_major_tma_aligned_tensor=lambda scales: scales.T.contiguous().T,
    fp8_fp4_mqa_logits=mqa_logits, fp8_fp4_paged_mqa_logits=paged_logits,
    get_paged_mqa_logits_metadata=lambda lengths, _page, _processors: lengths,
)  # fmt: skip


class StoppedClock:
    """Every call takes as long as its arm's name says, else a microsecond."""

    def __init__(self, **seconds: float) -> None:
        self.seconds, self.broken = seconds, False

    def captured(self, arm: Arm) -> Arm:
        arm.make(0)()
        return arm

    def replayed(self, graphs: Any, rounds: int) -> list[tuple[float, ...]]:
        return [(self.seconds.get(arm.name, 1e-6),) * rounds for arm in graphs]

    def wait(self) -> None:
        if self.broken:
            raise RuntimeError("an illegal memory access was encountered")

    def release(self) -> None:
        pass


def record_of(row: Row | LargeRow, clock: Any = None, **lost: str) -> dict[str, Any]:
    return measure(row.ready(), 2, clock or StoppedClock(), lost, lambda _name: None)


@pytest.fixture
def with_stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels of others by definition; ours are launched and do nothing."""
    monkeypatch.setattr(vendors, "vllm", lambda *_names: getattr(torch.ops, SPACE))
    monkeypatch.setattr(vendors, "deep_gemm", lambda: DEEP_GEMM)
    monkeypatch.setattr(vendors, "float4", lambda: 1)
    monkeypatch.setattr(vendors, "processors", lambda _device: 132)
    torch.manual_seed(0)
    with pretended_gpu(device="cpu"):
        yield


def small_attention(mode: str, model: str) -> Row:
    entry = "bf16" if mode == "prefill" else attention.ENTRIES[model]
    problem = attention.problem_of(model, mode, entry, 2, 16)
    return attention.row("a", problem, {attention.FLASH_MLA: getattr(attention, f"{mode}_by_vllm")})


SMALL: dict[str, Callable[[], Row]] = {
    "w4a16": lambda: linears.w4a16_row(W4A16Problem(3, 128, 256)),
    "fp8": lambda: linears.fp8_row(GemmProblem(16, 256, 384, FP8_BLOCK.name, "float32")),
    "bf16": lambda: linears.bf16_row(GemmProblem(16, 128, 128)),
    "norm": lambda: rows.norm_row(NormProblem(5, 256)),
    "sum and norm": lambda: rows.sum_row(ResidualProblem(5, 256)),
    "scores, prefill": lambda: indexer.scores_row(
        "p", indexer_bench.scores_problem(5, 128, 1, ("fp8", "float32")),
        indexer.prefill_by_deep_gemm,
    ),
    "scores, decode": lambda: indexer.scores_row(
        "d", indexer_bench.scores_problem(3, 128, 3, ("fp8", "float32")),
        indexer.decode_by_deep_gemm,
    ),
    "top-k": lambda: indexer.topk_row(TopkProblem(3, 4096, indexer.COUNT)),
    **{
        f"attention, {mode}, {model}": partial(small_attention, mode, model)
        for model in attention.ENTRIES
        for mode in ("prefill", "decode")
    },
}  # fmt: skip
ZEROS = ("Marlin",)  # whose stand-in checks shapes alone


@pytest.mark.needs("cutlass")
@pytest.mark.usefixtures("with_stand_ins")
@pytest.mark.parametrize("name", SMALL)
def test_others_read_our_operands_as_we_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel of others, given what the row hands it, computes the float64 reference."""
    monkeypatch.setattr(attention_bench, "CHOSEN", 128)
    monkeypatch.setattr(attention_bench, "LATENT_CHOSEN", 128)
    monkeypatch.setattr(attention_bench, "CONTEXT", 1024)
    arms = record_of(SMALL[name]())["arms"]
    there = {each: arm for each, arm in arms.items() if "reason" not in arm}
    peers = there.keys() - {OURS, COPY, *ZEROS}
    assert peers
    assert OURS in arms
    for peer in peers:
        assert there[peer]["relative_l2"] <= NEAR, peer
        assert there[peer].get("same_bits_twice", True), peer


@pytest.mark.slow
@pytest.mark.needs("cutlass")
def test_every_kernel_of_ours_is_launched_at_its_true_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: dict[str, int] = {}
    groups = [group for group in command.GROUPS if group not in ("experts", "tokens", "layers")]
    monkeypatch.setattr(contest, "tried", lambda each, *_rest: each.make(0).run() and {})
    with pretended_gpu():
        for group in groups:
            for planned in command.rows_of(group):
                assert not isinstance(planned, TimedRow)
                row = planned.ready()
                ours = [each for each in row.contenders if each.name == OURS]
                arms = record_of(Row(row.name, ours, row.moved, goals=row.goals))["arms"]
                made[f"{group} {row.name}"] = 1
                if "captures" not in row.name:
                    assert "microseconds" in arms[OURS], (row.name, arms)
    names = [name.partition(" ")[0] for name in made]
    counts = {group: names.count(group) for group in groups}
    assert counts["w4a16"] == 4 * 6
    assert counts["decode"] == 2 * 3 * 4
    assert counts["prefill"] == 5
    assert counts["scores"] == 3 + 6
    assert counts["topk"] == 3 * 4
    assert counts["fp8"] == counts["bf16"] == 5


@pytest.mark.needs("cutlass")
@pytest.mark.usefixtures("with_stand_ins")
def test_experts_are_given_to_marlin_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "MODELS", {"V4-Flash": (128, 64, 4, 2)})
    layer = experts.Layer("V4-Flash")
    record = record_of(experts.row(layer, 3))
    assert "microseconds" in record["arms"]["Marlin W4A16"], record["arms"]
    assert record["arms"]["Marlin W4A16"]["relative_l2"] == 1.0  # the stand-in's zeros
    given = layer.given(3, 1)
    wanted = experts.reference(layer, given, 10.0)
    by_experts = torch.zeros(128, dtype=torch.float64)
    for expert, share in zip(given.routing.experts[0], given.routing.weights[0], strict=True):
        w13 = layer.weights.w13
        gate, up = (experts.expert_of(w13, (int(expert), part)) for part in range(2))
        x = given.x[0].double()
        middle = torch.nn.functional.silu((gate @ x).clamp(max=10)) * (up @ x).clamp(-10, 10)
        second = experts.expert_of(layer.weights.w2, (int(expert),))
        by_experts += float(share) * (second @ middle)
    assert torch.allclose(wanted[0], by_experts)


@pytest.mark.needs("cutlass")
def test_experts_of_up_to_four_tokens_go_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "MODELS", {"V4-Flash": (128, 64, 4, 2)})
    layer, heard = experts.Layer("V4-Flash"), list[str]()
    with pretended_gpu("sm_90a", "cpu", lambda _, form: heard.append(type(form).__name__)):
        for tokens_here, products in ((4, "W4A16ByRowForm"), (5, "MoeForm")):
            heard.clear()
            experts.row(layer, tokens_here).contenders[0].make(0).run()
            assert heard.count(products) == 2


def test_layers_take_the_next_buffers_of_their_kind() -> None:
    seen: list[str] = []

    def step(kind: str, number: int) -> decoder.Step:
        def run(shared: str) -> None:
            seen.append(f"{kind}{number} {shared}")

        def shared() -> str:
            seen.append(f"lists of {kind}")
            return f"with {kind}"

        return decoder.Step(run, [], (), shared)

    tokens.layers_call("abaab", {kind: [step(kind, 0), step(kind, 1)] for kind in "ab"})()
    assert seen == [
        "lists of a", "lists of b", "a0 with a", "b0 with b", "a1 with a", "a0 with a", "b1 with b",
    ]  # fmt: skip


def test_memory_that_tensors_share_is_counted_once() -> None:
    every = torch.zeros(6, 4)
    assert tokens.memory_of([every, every[:2], {"one": every[2:]}]) == {every.data_ptr(): 96}
    assert sum(tokens.memory_of((every, torch.zeros(3))).values()) == 108


NO_EXPERTS: Any = None


@pytest.mark.parametrize("rows", [4, 64])
def test_the_routers_of_a_bench_visit_as_many_experts_as_are_counted(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of a step follow from it: routing that prefers some experts reads fewer."""
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    config: Any = replace(TINY_V4, hidden_size=512, n_routed_experts=256, num_experts_per_tok=6)
    chosen = []
    for _ in range(8):
        router = decoder.routed_to(config, NO_EXPERTS)
        logits = gpu.normal(rows, 512).double() @ router.gate.double().T
        scores = torch.nn.functional.softplus(logits).sqrt() + router.source
        chosen.append(len(scores.topk(6, -1).indices.unique()) / 256)
    assert sum(chosen) / 8 == pytest.approx(tokens.visited_share(config, rows), abs=0.04)


@pytest.mark.slow
def test_a_whole_model_is_every_layer_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(
        TINY_V4, hidden_size=256, q_lora_rank=128, o_lora_rank=128, moe_intermediate_size=128,
        num_hash_layers=0,
    )  # fmt: skip
    monkeypatch.setattr(decoder, "SETS", 1)
    monkeypatch.setattr(decoder, "ENTRY", "bf16")
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    every = decoder.experts(256, 128, small.n_routed_experts)
    given = decoder.Given(Recording(), small, every, tokens.RECIPE, "bf16", 256)
    row = tokens.token_row("t", given, 2, 5)
    given.kernels.calls = []
    row.contenders[0].make(0).run()
    launched = [name for name, *_ in given.kernels.calls]
    assert launched.count("sm90_sparse_attention") == len(small.layers)
    routed = sum(tokens.memory_of(every).values())
    dense_and_routed = len(small.layers) * routed * tokens.visited_share(small, 2)
    assert row.moved > dense_and_routed
    assert row.moved < dense_and_routed + len(small.layers) * (routed + (8 << 20))


def test_marlin_scales_lose_their_sign_bit_and_keep_their_value() -> None:
    scales = torch.arange(8, 0x7F, dtype=torch.uint8).repeat(64, 1)[:, :64].contiguous()
    factor = vendors.marlin_factor(scales.view(torch.float8_e4m3fn))
    made = vendors.marlin_scales(scales, factor)
    assert made.shape == (64, 64)
    values = (made.view(torch.uint8).to(torch.int16) << 7).view(torch.float16).float()
    of_one = scales.view(torch.float8_e4m3fn).float()[0] * factor * 2**7
    assert sorted(values.unique().tolist()) == sorted(of_one.unique().tolist())


def test_marlin_scales_are_those_of_vllm() -> None:
    """The digest is that of vLLM 0.26's own functions on the same scales."""
    scales = (torch.arange(128 * 16) * 7 % 0x60 + 8).to(torch.uint8).view(128, 16)
    factor = vendors.marlin_factor(scales.view(torch.float8_e4m3fn))
    made = vendors.marlin_scales(scales, factor).view(torch.uint8)
    assert (factor, hashlib.sha256(made.numpy().tobytes()).hexdigest()[:16]) == VLLM_SCALES


@pytest.mark.parametrize(
    ("slots", "experts_here", "rows_"), [(6, 256, 8), (1536, 256, 8), (49152, 256, 64)]
)
def test_blocks_of_marlins_experts(slots: int, experts_here: int, rows_: int) -> None:
    assert vendors.moe_rows(slots, experts_here) == rows_


# ---- rows, failures, time ------------------------------------------------------------------------


def fixed(name: str, value: float) -> Contender:
    out = torch.full((4,), value, dtype=torch.float64)
    return Contender(name, lambda _number: Call(lambda: None, lambda: out))


def raising(name: str, error: Exception) -> Contender:
    def make(_number: int) -> Call:
        raise error

    return Contender(name, make)


def row_of(*contenders: Contender, **told: Any) -> Row:
    ceilings = [Arm(COPY, lambda _number: lambda: None, 50)]
    goals = [of_best(1.15), of_copy(0.8)]
    return Row("r", contenders, 100, 10, lambda: torch.ones(4, dtype=torch.float64), goals,
               ceilings=ceilings, **told)  # fmt: skip


def test_a_row_has_ratio_goals_and_errors() -> None:
    clock = StoppedClock(degarble=2e-6, slow=4e-6, fast=2.2e-6, copy=1e-6)
    record = record_of(row_of(fixed(OURS, 1), fixed("slow", 1.25), fixed("fast", 1)), clock)
    assert record["best"] == "fast"
    assert record["ratio"] == pytest.approx(1.1)
    assert record["of_copy"] == pytest.approx(1.0)
    assert [goal["met"] for goal in record["goals"]] == [False, True]
    assert record["arms"]["slow"]["relative_l2"] == 0.25
    assert record["arms"][OURS]["largest"] == 0.0
    assert record["arms"][OURS]["same_bits_twice"]


def test_what_fails_is_a_reason_and_the_others_are_timed() -> None:
    nan = fixed("nan", float("nan"))
    broken = raising("broken", RuntimeError("no kernel\nimage"))
    record = record_of(
        row_of(fixed(OURS, 1), broken, absent("other", "needs sm_100a"), nan), None, gone="hung"
    )
    arms = record["arms"]
    assert arms["broken"] == {"reason": "RuntimeError: no kernel image"}
    assert arms["other"] == {"reason": "needs sm_100a"}
    assert arms["nan"]["relative_l2"] != arms["nan"]["relative_l2"]
    assert "microseconds" in arms[OURS]
    lost = record_of(row_of(fixed(OURS, 1), fixed("gone", 1)), None, gone="hung")
    assert lost["arms"]["gone"] == {"reason": "hung"}
    assert "ratio" not in lost


def test_a_different_second_run_is_told() -> None:
    numbers = iter(range(10))
    call = Call(lambda: None, lambda: torch.full((4,), float(next(numbers))))
    record = record_of(row_of(Contender(OURS, lambda _number: call)))
    assert record["arms"][OURS]["same_bits_twice"] is False
    assert "two runs differ" in report.error_text(record["arms"][OURS])


def test_a_broken_device_names_its_kernel() -> None:
    clock = StoppedClock()

    def make(_number: int) -> Call:
        clock.broken = True
        raise RuntimeError("illegal memory access")

    with pytest.raises(DeviceLostError) as caught:
        record_of(row_of(fixed(OURS, 1), Contender("bad", make)), clock)
    assert caught.value.args == ("bad", "RuntimeError: illegal memory access")


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two groups of stand-in rows on a machine without a GPU; no kernel is compiled for them."""
    monkeypatch.setenv("DEGARBLE_KERNEL_CACHE", "off")
    state = SimpleNamespace(clock=StoppedClock(degarble=1e-6, peer=2e-6), restarts=[], rows={})
    monkeypatch.setattr(command, "origin_here", lambda: "2026-01-01, no GPU")
    monkeypatch.setattr(command, "Gpu", lambda: state.clock)
    monkeypatch.setattr(command, "rows_of", lambda group: iter(state.rows.get(group, ())))

    def restarted(arguments: Any, _deadline: float) -> None:
        state.restarts.append(list(arguments))
        raise SystemExit(7)

    monkeypatch.setattr(command, "restarted", restarted)
    good = Row(
        "one",
        [fixed(OURS, 1), fixed("peer", 1), absent("none", "no wheel")],
        100,
        reference=lambda: torch.ones(4, dtype=torch.float64),
        goals=[of_best(1.15)],
    )
    state.rows = {"fp8": [good], "bf16": [good]}
    return state


def test_a_dry_run_writes_tables_and_history(planted: Any, tmp_path: Path) -> None:
    assert command.main(["--out", str(tmp_path), "--only", "fp8"]) == EXIT_AGREES
    document = json.loads((tmp_path / "kernels.json").read_text())
    assert document["speeds"] == {"fp8: one": {"microseconds": 1.0, "share": 2.0, "of": "peer"}}
    assert document["failed"] == {}
    text = (tmp_path / "kernels.md").read_text()
    assert "| one | 1.0 | 2.0 | 2.00 (peer) | 2.00 of the best peer (>= 1.15: met) |" in text
    assert "not timed: none: no wheel (one)" in text
    assert "2026-01-01, no GPU" in text
    planted.rows["bf16"] = [Row("worse", [fixed(OURS, 1), fixed("peer", 1)],
                                goals=[of_best(3.0)])]  # fmt: skip
    arguments = ["--out", str(tmp_path), "--resume"]
    assert command.main(arguments) == EXIT_DIFFERS
    rows_now = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    assert [report.key_of(record) for record in rows_now] == ["fp8: one", "bf16: worse"]


@pytest.mark.usefixtures("planted")
def test_time_that_is_up_leaves_rows_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--out", str(tmp_path), "--within", "1"]) == EXIT_DIFFERS
    document = json.loads((tmp_path / "kernels.json").read_text())
    assert document["rows"] == []
    assert document["left"] == ["fp8: one", "bf16: one"]
    assert "not measured, time was up: fp8: one" in capsys.readouterr().out


def test_a_kernel_that_breaks_the_device_is_left_out_of_the_next_process(
    planted: Any, tmp_path: Path
) -> None:
    def make(_number: int) -> Call:
        planted.clock.broken = True
        raise RuntimeError("illegal memory access")

    planted.rows = {"fp8": [Row("one", [fixed(OURS, 1), Contender("bad", make)])]}
    arguments = ["--out", str(tmp_path)]
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert planted.restarts == [arguments]
    timers = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
    assert all(each.finished.is_set() for each in timers)  # no watch is left
    planted.clock.broken = False
    assert command.main([*arguments, "--resume"]) == EXIT_AGREES
    (row,) = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    assert row["arms"]["bad"] == {"reason": "RuntimeError: illegal memory access"}
    assert "microseconds" in row["arms"][OURS]


def test_a_row_that_cannot_be_made_is_a_reason(planted: Any, tmp_path: Path) -> None:
    def ready() -> Row:
        raise MemoryError("140 GB")

    planted.rows["fp8"] = [LargeRow("large", ready)]
    assert command.main(["--out", str(tmp_path)]) == EXIT_DIFFERS
    document = json.loads((tmp_path / "kernels.json").read_text())
    assert document["failed"] == {"fp8: large": "MemoryError: 140 GB"}
    assert len(document["rows"]) == 2


def test_a_kernel_that_hangs_ends_the_process(planted: Any, tmp_path: Path) -> None:
    run = command.Run(tmp_path, "here")
    hang = command.Hang(run, lambda: planted.restarts.append("again"), 60)
    hang.at("fp8: one", "slow")
    assert hang._timer is not None
    hang._expired("fp8: one", "before")  # it ended just as its time was up
    assert planted.restarts == []
    hang._expired("fp8: one", "slow")
    hang.at("", "")
    assert planted.restarts == ["again"]
    assert json.loads((tmp_path / "kernels.json").read_text())["lost"] == {
        "fp8: one": {"slow": "did not end in 60 s"}
    }


@pytest.mark.usefixtures("planted")
def test_several_runs_are_joined_into_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for group in ("fp8", "bf16"):
        assert command.main(["--out", str(tmp_path / group), "--only", group]) == EXIT_AGREES
        files.append(str(tmp_path / group / "kernels.json"))
    page = tmp_path / "page.md"
    page.write_text("before\n\n<!-- figures: kernel-peers -->\nold\n"
                    "<!-- end of figures: kernel-peers -->\nafter\n")  # fmt: skip
    assert command.main(["--join", *files, "--page", str(page)]) == EXIT_AGREES
    text = page.read_text()
    assert text.startswith("before")
    assert text.endswith("after\n")
    assert "old" not in text
    assert text.count("| one |") == 2
    assert "Not measured: w4a16" in text
    assert "2 of 2 rows reach what is wanted; in 0 a peer is faster" in capsys.readouterr().out
    # The rows are kept beside the page: a later run of one group leaves the other as it stands.
    first = tmp_path / "fp8" / "kernels.json"
    record = json.loads(first.read_text())
    record["rows"][0]["origin"] = "9999-01-01, another day"
    first.write_text(json.dumps(record))
    assert command.main(["--join", files[0], "--page", str(page)]) == EXIT_AGREES
    later = page.read_text()
    assert later.count("another day") == 1
    # Neither an older run nor one in which ours failed takes its place.
    row = record["rows"][0]
    failed = {**row, "arms": {**row["arms"], "degarble": {"reason": "broke"}}}
    for other in ({**row, "origin": "2000-01-01, long ago"}, failed):
        first.write_text(json.dumps({**record, "rows": [other]}))
        assert command.main(["--join", files[0], "--page", str(page)]) == EXIT_AGREES
        assert page.read_text() == later
    assert later.partition("**BF16")[2] == text.partition("**BF16")[2]
    # Of rows measured apart the page says which run had which.
    record["rows"] = [{**row, "row": "two", "origin": "a third day"}]
    first.write_text(json.dumps(record))
    assert command.main(["--join", files[0], "--page", str(page)]) == EXIT_AGREES
    assert "- 9999-01-01, another day (one)\n- a third day (two)\n" in page.read_text()
    page.write_text("nothing")
    assert command.main(["--join", *files, "--page", str(page)]) == EXIT_REFUSED
    assert page.read_text() == "nothing"


def test_wrong_groups_and_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--join", str(tmp_path / "none.json")]) == EXIT_REFUSED
    assert "none.json" in capsys.readouterr().err
    (tmp_path / "list.json").write_text("[]")
    assert command.main(["--join", str(tmp_path / "list.json")]) == EXIT_REFUSED
    assert command.main(["--list"]) == EXIT_AGREES
    assert "w4a16" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and this shows its absence")
def test_refuses_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--out", str(tmp_path / "o")]) == EXIT_REFUSED
    assert "NVIDIA GPU" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


# ---- kernels that are compiled ahead -------------------------------------------------------------

LISTED = {
    rows: KernelForm(
        "degarble.kernels.rows.simt_scale:KERNEL",
        choose_scale_form(ScaleProblem(8, 0.5, "bf16", out), SM90A.name),
    )
    for rows, out in (("fp8: one", "bf16"), ("bf16: one", "fp32"))
}


@pytest.fixture
def listed(planted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A list with a form for each planted row, a GPU to compile for, and a cache."""
    planted.forms = tmp_path / "forms.json"
    raw = [{**form.plain(), "rows": ["other: row", row]} for row, form in LISTED.items()]
    planted.forms.write_text(json.dumps({"forms": raw}))
    monkeypatch.setattr(command, "FORMS", planted.forms)
    monkeypatch.setattr(targets, "target_of_device", lambda: SM90A)
    monkeypatch.setenv("DEGARBLE_KERNEL_CACHE", str(tmp_path / "cache"))
    return planted


@pytest.fixture
def ahead(listed: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:  # noqa: ARG001  a list first
    """What is compiled ahead, and until when; in truth nothing is."""
    found: list[Any] = []

    def compile_ahead(needed: NeededForms, *_told: Any, until: float) -> Any:
        found.append((needed.listed, until))
        return SimpleNamespace(sentence="kernels are ready", found={})

    monkeypatch.setattr(compiling, "compile_ahead", compile_ahead)
    return found


@pytest.mark.needs("cutlass")
def test_kernels_of_rows_that_will_be_measured_are_compiled_first(
    ahead: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_fp8, of_bf16 = LISTED.values()
    out = ["--out", str(tmp_path / "out")]
    for arguments, wanted in (
        (["--only", "bf16"], (of_bf16,)), (["--rows", "fp8: o"], (of_fp8,)),
        (["--only", "fp8"], (of_fp8,)), (["--resume"], (of_bf16,)), ([], (of_fp8, of_bf16)),
    ):  # fmt: skip
        ahead.clear()
        assert command.main([*arguments, *out]) == EXIT_AGREES
        assert ahead == [(wanted, float("inf"))], arguments
        assert capsys.readouterr().out.startswith("kernels are ready\n")


@pytest.mark.needs("cutlass")
def test_nothing_is_compiled_ahead_for_no_row_or_no_cache(
    ahead: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = ["--out", str(tmp_path / "out")]
    assert command.main(out) == EXIT_AGREES
    ahead.clear()
    assert command.main([*out, "--resume"]) == EXIT_AGREES
    monkeypatch.setenv("DEGARBLE_KERNEL_CACHE", "off")
    assert command.main(out) == EXIT_AGREES
    assert ahead == []


@pytest.mark.needs("cutlass")
def test_no_kernel_is_begun_after_half_of_the_time(ahead: list[Any], tmp_path: Path) -> None:
    before = time.monotonic()
    assert command.main(["--out", str(tmp_path / "out"), "--within", "1000"]) == EXIT_AGREES
    ((_, until),) = ahead
    assert before + 500 <= until <= time.monotonic() + 500
    ahead.clear()
    assert command.main(["--out", str(tmp_path / "out"), "--within", "8"]) == EXIT_AGREES
    assert ahead == []


@pytest.mark.needs("cutlass")
@pytest.mark.usefixtures("listed")
def test_rows_are_measured_where_compiling_ahead_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(*_given: Any, **_told: Any) -> Any:
        raise WorkerLost("worker process", "killed by SIGKILL", "a worker that lives", "Run again.")

    monkeypatch.setattr(compiling, "compile_ahead", lost)
    assert command.main(["--out", str(tmp_path / "out")]) == EXIT_AGREES
    said = capsys.readouterr().out
    assert "kernels are not compiled ahead: worker process" in said
    assert "bf16: one: degarble" in said


@pytest.mark.slow
@pytest.mark.needs("cutlass")
@pytest.mark.usefixtures("listed")
def test_a_second_run_takes_its_kernels_from_the_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ("2 compiled by", "0 compiled by"):
        assert command.main(["--out", str(tmp_path / "out")]) == EXIT_AGREES
        first = capsys.readouterr().out.partition("\n")[0]
        assert first.startswith(f"2 kernels for {SM90A.name} are ready after")
        assert words in first


# ---- the pack ------------------------------------------------------------------------------------


def test_a_pack_has_kernels_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = ("vllm/_C_stable_libtorch.abi3.so", "vllm/scalar_type.py")
    left = ("vllm/__init__.py", "vllm/_rust_tool_parser.abi3.so")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    assert pack.main([str(wheels), str(tmp_path / "to")]) == EXIT_REFUSED
    assert "make peers-pack" in capsys.readouterr().err
    for name in pack.WANTED:
        with zipfile.ZipFile(wheels / f"{name}-1-py3-none-any.whl", "w") as wheel:
            for file in (*kept, *left) if name == "vllm" else (f"{name}.py",):
                wheel.writestr(file, b"bytes")
    assert pack.main([str(wheels), str(tmp_path / "to")]) == 0
    site = tmp_path / "site"
    unpack = str(tmp_path / "to" / "unpack.sh")
    subprocess.run(["sh", unpack, str(site)], check=True, capture_output=True)
    there = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    assert there == {*kept, *(f"{name}.py" for name in pack.WANTED if name != "vllm")}
