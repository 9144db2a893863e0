"""`judge` for one kernel: bare operations, callables, components, messages, refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from degarble.harness.base.errors import (
    DegarbleError,
    DtypeMismatch,
    InvalidArgument,
    ShapeMismatch,
    UnknownName,
)
from degarble.harness.engine.diagnose.judge.judge import Setting, judge
from degarble.harness.formats.number_formats import FP8_128X128_UE8M0, NVFP4, ScaleDirection
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.harness.formats.weight import Weight
from degarble.harness.report.verdict import Verdict
from degarble.references.linears import decode_activations, quantise_activations
from degarble.suites.checkpoint.reading_cases import TINY_V4, TINY_V32
from degarble.suites.engine.diagnose.judge.gemm_faults import FAULTS, gemm, product

# --------------------------------------------------------------------------------------------------
# `judge` for one kernel: bare operations, callables, messages, and what is refused by name.

M, N, K = 48, 96, 256


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X, W, BIAS = random(M, K).bfloat16(), random(N, K, seed=1).bfloat16(), random(N, seed=2)
OUT = X.float() @ W.float().T


def test_operands_may_come_in_every_form() -> None:
    wq = quantise(W, NVFP4)
    made = X.float() @ dequantise(wq, torch.float32).T
    for weight in (wq, Weight.of(wq), wq.with_direction(ScaleDirection.ENCODE)):
        judge("gemm", X, weight, made.bfloat16()).require()
    judge("gemm", {"x": X}, {"w": W, "bias": BIAS}, (OUT + BIAS).bfloat16()).require()
    judge("gemm", X.reshape(2, -1, K), W, OUT.reshape(2, -1, N)).require()
    fp8 = quantise(W, FP8_128X128_UE8M0)
    judge("gemm", X, fp8, X.float() @ dequantise(fp8, torch.float32).T).require()


@pytest.mark.parametrize("rows", [1, M])
@pytest.mark.parametrize("per_row", [False, True])
def test_activations_may_arrive_as_codes(per_row: bool, rows: int) -> None:
    scale = None if per_row else torch.tensor(0.01)
    codes = quantise_activations(X[:rows], "NVFP4", scale)
    values = X.float()
    shown = judge("gemm", codes, W, values.new_zeros(rows, N))
    assert shown.verdict is Verdict.DIFFERS
    x = decode_activations(codes, "NVFP4", torch.float32)
    judge("gemm", codes, W, (x @ W.float().T).bfloat16()).require()
    doubled = judge("gemm", codes, W, (x @ W.float().T).bfloat16() * 2)
    assert doubled.cause is not None
    assert doubled.cause.fault == "M43.whole"


def test_an_output_without_a_difference_is_called_equal() -> None:
    x, w = random(8, 64).bfloat16(), random(16, 64, seed=1).bfloat16()
    out = (x.double() @ w.double().T).bfloat16()
    assert (
        str(judge("gemm", x, w, out)) == "AGREES: gemm agrees with its twin: every number is equal."
    )
    out[3, 4] = torch.nextafter(out[3, 4], out[3, 4] + 1)
    assert "equal" not in judge("gemm", x, w, out).sentence


def test_one_wrong_element_is_reported_with_both_codes() -> None:
    out = OUT.bfloat16()
    out[3, 5] *= 1.5
    kernel = judge("gemm", X, W, out)
    text = str(kernel)
    assert "1 of 4,608 elements are each beyond their budget" in text
    code = int(out[3, 5].view(torch.int16)) & 0xFFFF
    assert f"first at [3, 5]: BF16 0x{code:04x} ({float(out[3, 5]):.7g})" in text
    assert "budget: K = 256 additions in float32" in text
    with pytest.raises(AssertionError, match="DIFFERS: gemm differs"):
        kernel.require()
    assert not kernel
    document = kernel.document()
    assert (document["verdict"], document["causes"]) == ("DIFFERS", [])


def test_a_row_that_was_not_written_is_named() -> None:
    for left in (0.0, math.nan):
        out = OUT.bfloat16()
        out[7] = left
        kernel = judge("gemm", X, W, out)
        assert kernel.cause is not None
        assert kernel.cause.fault == "M41.rows_unwritten"
        told = "NaN" if math.isnan(left) else "zeros"
        assert f"{told} in rows 7 to 7" in kernel.cause.evidence
    assert "96 NaN and 0 infinities" in kernel.census["out"]
    assert "the first at [7, 0]" in kernel.census["out"]


def test_rms_norm_and_its_faults() -> None:
    weight = random(K, seed=3)

    def norm(epsilon: float, w: torch.Tensor) -> torch.Tensor:
        x = X.float()
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * w).bfloat16()

    judge("rmsnorm", X, weight, norm(1e-6, weight)).require()
    judge("rmsnorm", X, None, norm(1e-6, torch.ones(K))).require()
    for wrong, fault in (
        (norm(1e-6, 1 + weight), "M24.gamma"),
        (norm(1e-6, torch.ones(K)), "M24.gamma"),
        (norm(1e-3, weight), "M24.constant"),
        (norm(0.3, weight), "M24.constant"),
        (norm(1e-6, 2 * weight), "M43.whole"),
    ):
        kernel = judge("rmsnorm", X, weight, wrong)
        assert kernel.cause is not None
        assert kernel.cause.fault == fault


def test_swiglu_and_its_faults() -> None:
    x = random(M, 2 * N, seed=4).bfloat16() * 4
    gate, up = x.float().chunk(2, -1)
    silu = torch.nn.functional.silu
    clamped = (silu(gate.clamp(max=5)) * up.clamp(-5, 5)).bfloat16()
    limited = Setting(limit=5.0)
    judge("swiglu", x, None, clamped, setting=limited).require()
    judge("swiglu", {"gate": gate, "up": up}, None, (silu(gate) * up).bfloat16()).require()
    for wrong, fault in (
        ((silu(gate) * up).bfloat16(), "M25.step_left_out"),
        ((silu(up.clamp(max=5)) * gate.clamp(-5, 5)).bfloat16(), "M14.operands"),
    ):
        cause = judge("swiglu", x, None, wrong, setting=limited).cause
        assert (cause.fault if cause else None) == fault
    swapped = judge("swiglu", x, None, (silu(up) * gate).bfloat16()).cause
    assert swapped is not None
    assert swapped.fault == "M14.operands"
    # Below a gate of -88.7 e^-x is no float32, so a kernel puts out zeros; nothing is wrong there.
    cut = (silu(50 * gate) * up).bfloat16()
    exact = (silu(50 * gate.double()) * up.double()).bfloat16()
    assert bool(((cut == 0) & (exact != 0)).any())
    judge("swiglu", {"gate": 50 * gate, "up": up}, None, cut).require()


def test_quantisation_is_judged_code_by_code() -> None:
    made = quantise(X, NVFP4)
    judge("quantise_nvfp4", X, None, made).require()
    wrong = replace(made, codes=(made.codes >> 4) | (made.codes << 4))
    kernel = judge("quantise_nvfp4", X, None, wrong)
    assert kernel.cause is not None
    assert kernel.cause.fault == "M10.nibble_order"
    assert "codes differ" in str(kernel)


def test_a_callable_is_its_own_definition() -> None:
    def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w.T

    stepwise = torch.zeros(M, N)
    for k in range(K):
        stepwise += X[:, k : k + 1].float() * W[:, k].float()[None]
    for out in (OUT, stepwise, OUT.bfloat16()):
        judge(linear, (X, W), None, out).require()
        judge(linear, {"x": X}, {"w": W}, out).require()
    assert not judge(linear, X, W, (OUT * 1.0001))
    assert not judge(linear, X, W, (OUT.bfloat16().float() + 0.01).bfloat16())
    gelu = torch.nn.functional.gelu
    judge(gelu, X, None, gelu(X.float()).bfloat16()).require()
    assert not judge(gelu, X, None, gelu(X.float(), approximate="tanh").bfloat16())
    assert "measured, not derived" in judge(linear, X, W, OUT).outputs["out"].derivation[0]


REFUSED: list[tuple[type[DegarbleError], tuple[Any, ...], str]] = [
    (UnknownName, ("gem", X, W, OUT), "Did you mean gemm"),
    (InvalidArgument, (3, X, W, OUT), "Bare operations"),
    (InvalidArgument, ("gemm", X, W, None), "the tensor that the kernel returned"),
    (InvalidArgument, ("gemm", X, None, OUT), "w = 'NoneType'"),
    (ShapeMismatch, ("gemm", X, W[:, :16], OUT), "x [..., K] and w [N, K]"),
    (ShapeMismatch, ("gemm", X, W, OUT[1:]), "(48, 96)"),
    (ShapeMismatch, ("gemm", X[0], W, OUT[0]), "[1, K]"),
    (ShapeMismatch, ("gemm", X, {"w": W, "bias": BIAS[1:]}, OUT), "bias"),
    (UnknownName, ("gemm", {"y": X}, W, OUT), "input = 'y'"),
    (UnknownName, ("gemm", X, {"v": W}, OUT), "weight = 'v'"),
    (InvalidArgument, ("gemm", X * math.nan, W, OUT), "x[0, 0] = nan"),
    (InvalidArgument, ("gemm", X, W * math.inf, OUT), "w[0, 0]"),
    (DtypeMismatch, ("gemm", X.int(), W, OUT), "QuantisedTensor"),
    (DtypeMismatch, ("gemm", X, W, OUT.double()), "bfloat16, float16 or float32"),
    (InvalidArgument, ("gemm", {"codes": 3, "block_scale": X}, W, OUT), "codes and block_scale"),
    (ShapeMismatch, ("rmsnorm", X, BIAS, OUT), "weight"),
    (UnknownName, ("rmsnorm", {"x": X, "y": X}, None, X), "input = 'y'"),
    (InvalidArgument, ("swiglu", {"gate": X}, None, X), "gate and up"),
    (InvalidArgument, ("quantise_nvfp4", X, None, X), "a QuantisedTensor in NVFP4"),
    (ShapeMismatch, ("gemm", X[:0], W, OUT[:0]), "one number at least"),
    (ShapeMismatch, ("gemm", X, W[:0], OUT[:, :0]), "one number at least"),
    (ShapeMismatch, (lambda x: x, X[:0], None, X[:0]), "one number at least"),
    (InvalidArgument, ("gemm", X.to("meta"), W, OUT), "x = 'meta'"),
    (InvalidArgument, ("gemm", X, W, OUT.to("meta")), "output = 'meta'"),
    (InvalidArgument, ("gemm", X.float().to_sparse(), W, OUT), "x = 'torch.sparse"),
    (
        InvalidArgument,
        ("gemm", {"codes": X, "block_scale": X, "tensor_scale": 0.5}, W, OUT),
        "tensor_scale = 'float'",
    ),
    (InvalidArgument, (lambda x: x.nothing, X, None, OUT), "AttributeError"),
    (InvalidArgument, (lambda x: 3, X, None, OUT), "a tensor of numbers"),  # noqa: ARG005
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_bad_input_is_refused_by_name(case: int) -> None:
    error, arguments, text = REFUSED[case]
    with pytest.raises(error) as raised:
        judge(*arguments)
    assert text in str(raised.value), str(raised.value)


def test_a_reference_that_does_not_fit_is_refused() -> None:
    for reference, text in (
        ({"z": X}, "reference"),
        ({"x": X[1:]}, "reference x"),
        (OUT[1:], "ref"),
    ):
        with pytest.raises(DegarbleError, match=text):
            judge("gemm", X, W, OUT, reference=reference)
    with pytest.raises(InvalidArgument, match="operands by name"):
        judge("gemm", X, W, OUT, reference=3)
    with pytest.raises(InvalidArgument, match="a gemm"):
        judge("rmsnorm", X, None, X, reference=X)


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"config": "v4"}, "config = 'str'"),
        ({"epsilon": "a"}, "epsilon"),
        ({"epsilon": math.nan}, "epsilon = nan"),
        ({"epsilon": -1.0}, "not negative"),
        ({"limit": math.inf}, "limit = inf"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(facts: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        Setting(**facts)
    with pytest.raises(InvalidArgument, match="a Setting"):
        judge("gemm", X, W, OUT, setting=facts)  # type: ignore[call-overload]


def test_a_sign_that_flips_in_a_tile_is_no_scale() -> None:
    x, w = random(64, 256, seed=3), random(96, 256, seed=4)
    out = x.double() @ w.double().T
    out[16:32, 32:64] *= -1
    kernel = judge("gemm", x, w, out.bfloat16())
    assert [cause.fault for cause in kernel.named] == ["M43.one_tile"], str(kernel)


def test_a_reference_output_is_enough_to_see_a_fallback() -> None:
    g = gemm("gaussian", (64, 64, 256))
    exact = g.x.float() @ g.w.float().T
    kernel = judge("gemm", g.xq, g.wq, exact.bfloat16(), reference=exact)
    assert kernel.too_good is not None
    assert "nearer to the reference than the twin" in str(kernel)
    assert judge("gemm", g.xq, g.wq, product(g.xq, g.wq).bfloat16(), reference=exact)
    assert len(FAULTS) == 16


def test_a_kernel_on_weights_that_were_rounded_once_decoded_agrees_and_says_so() -> None:
    wq = quantise(random(N, K, seed=1), NVFP4)
    decoded = dequantise(wq, torch.float32).bfloat16().float()
    out = (X.float() @ decoded.T).bfloat16()
    kernel = judge("gemm", X, wq, out).require()
    assert "weights rounded to BF16 once decoded" in kernel.note
    stated = Setting(conventions={"decoded_operands": "weights_bf16"})
    judge("gemm", X, wq, out, setting=stated).require()
    exact = judge("gemm", X, wq, out, setting=Setting(conventions={"decoded_operands": "exact"}))
    assert exact.verdict is Verdict.DIFFERS
    assert exact.cause is None
    swapped = replace(wq, codes=(wq.codes >> 4) | (wq.codes << 4))
    wrong = (X.float() @ dequantise(swapped, torch.float32).bfloat16().float().T).bfloat16()
    kernel = judge("gemm", X, wq, wrong, setting=stated)
    assert kernel.cause is not None
    assert kernel.cause.fault == "M10.nibble_order"
    with pytest.raises(UnknownName, match="of the setting"):
        Setting(conventions={"decoded_operand": "exact"})


@pytest.mark.parametrize("name", ["rmsnorm", "swiglu"])
def test_an_operation_that_rounds_in_two_steps_agrees_and_says_so(name: str) -> None:
    weight = 1 + 0.1 * random(K, seed=3)
    if name == "rmsnorm":
        normal = X.float() * torch.rsqrt(X.float().square().mean(-1, keepdim=True) + 1e-6)
        out = (weight * normal.bfloat16().float()).bfloat16()
        given, convention = weight, "norm_rounded_before_weight"
    else:
        gate, up = X.float().chunk(2, -1)
        out = (torch.nn.functional.silu(gate).bfloat16().float() * up).bfloat16()
        given, convention = None, "gate_rounded_before_product"
    kernel = judge(name, X, given, out).require()
    assert "rounded to BF16" in kernel.note
    judge(name, X, given, out, setting=Setting(conventions={convention: True})).require()
    assert not judge(name, X, given, out, setting=Setting(conventions={convention: False}))
    assert not judge(name, X, given, (out.float() * 1.01).bfloat16())


# --------------------------------------------------------------------------------------------------
# A component of a known architecture alone: its role and a config are enough.

GENERATOR = torch.Generator().manual_seed(11)


def components_random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR)


COMPONENTS_X = components_random(24, TINY_V4.hidden_size).bfloat16()
COMPONENTS_W = components_random(TINY_V4.q_lora_rank, TINY_V4.hidden_size).bfloat16()
COMPONENTS_OUT = (COMPONENTS_X.float() @ COMPONENTS_W.float().T).bfloat16()
SETTING = Setting(config=TINY_V4)


def test_a_role_or_a_full_name_is_enough() -> None:
    for name in ("attn.wq_a", "layers.1.attn.wq_a"):
        kernel = judge(name, {"x": COMPONENTS_X}, COMPONENTS_W, COMPONENTS_OUT, setting=SETTING)
        assert kernel.require().component.endswith(".attn.wq_a")
    assert judge(
        "attn.wq_a",
        COMPONENTS_X,
        {"attn.wq_a": COMPONENTS_W},
        {"out": COMPONENTS_OUT},
        setting=SETTING,
    )
    wrong = COMPONENTS_OUT.clone()
    wrong[3, 5] *= 2
    kernel = judge("attn.wq_a", COMPONENTS_X, COMPONENTS_W, wrong, setting=SETTING)
    assert kernel.verdict is Verdict.DIFFERS
    assert "first at [3, 5]" in str(kernel)
    assert not judge("attn.wq_a", COMPONENTS_X, COMPONENTS_W, COMPONENTS_OUT * 2, setting=SETTING)


def test_codes_arrive_as_the_recipe_says() -> None:
    wq = quantise(COMPONENTS_W, NVFP4)
    coded = quantise_activations(COMPONENTS_X, "NVFP4", torch.tensor(0.002))
    exact = decode_activations(coded, "NVFP4", torch.float64) @ dequantise(wq, torch.float64).T
    setting = Setting(config=TINY_V4, recipe="nvfp4-full")
    judge("attn.wq_a", coded, Weight.of(wq), exact.bfloat16(), setting=setting).require()
    assert not judge("attn.wq_a", coded, wq, COMPONENTS_OUT, setting=setting)
    swapped = replace(wq, codes=(wq.codes >> 4) | (wq.codes << 4))
    x = decode_activations(coded, "NVFP4", torch.float64)
    wrong = (x @ dequantise(swapped, torch.float64).T).bfloat16()
    kernel = judge("attn.wq_a", coded, wq, wrong, setting=setting)
    assert kernel.cause is not None, str(kernel)
    assert kernel.cause.fault.startswith("M10."), str(kernel)


def test_other_components_by_their_own_budgets() -> None:
    weight = 1 + 0.1 * components_random(TINY_V32.hidden_size)
    x = components_random(9, TINY_V32.hidden_size)
    normal = x.bfloat16().float()
    out = normal * torch.rsqrt(normal.square().mean(-1, keepdim=True) + TINY_V32.rms_norm_eps)
    setting = Setting(config=TINY_V32)
    made = {"out": (out * weight).bfloat16(), "residual": x.bfloat16()}
    kernel = judge("attn.norm", {"x": x.bfloat16()}, weight, made, setting=setting)
    assert kernel.outputs["out"].verdict is Verdict.AGREES, str(kernel)


COMPONENTS_REFUSED: list[tuple[tuple[Any, ...], str]] = [
    (("attn.wq", COMPONENTS_X, COMPONENTS_W, COMPONENTS_OUT), "component = 'attn.wq'"),
    (("attn.wq_a", COMPONENTS_X, None, COMPONENTS_OUT), "weights of layers.0.attn.wq_a"),
    (
        ("attn.wq_a", COMPONENTS_X, {"attn.wq_b": COMPONENTS_W}, COMPONENTS_OUT),
        "weight of layers.0.attn.wq_a",
    ),
    (("attn.wq_a", COMPONENTS_X, {"attn.wq_a": 3}, COMPONENTS_OUT), "weight attn.wq_a = 'int'"),
    (
        ("attn.wq_a", {"y": COMPONENTS_X}, COMPONENTS_W, COMPONENTS_OUT),
        "input of layers.0.attn.wq_a",
    ),
    (("attn.wq_a", {"x": 3}, COMPONENTS_W, COMPONENTS_OUT), "x = 'int'"),
    (("attn.wq_a", {}, COMPONENTS_W, COMPONENTS_OUT), "Add x"),
    (("attn.wq_a", COMPONENTS_X, COMPONENTS_W, {"latent": COMPONENTS_OUT}), "output of attn.wq_a"),
    (("attn.wq_a", COMPONENTS_X, COMPONENTS_W, None), "out = 'NoneType'"),
    (
        ("attn.wq_a", COMPONENTS_X.bool(), COMPONENTS_W, COMPONENTS_OUT),
        "x of layers.0.attn.wq_a = 'torch.bool': expected numbers",
    ),
    (("attn.wq_a", COMPONENTS_X[:, 1:], COMPONENTS_W, COMPONENTS_OUT), "x: numbers [tokens, 128]"),
    (
        ("attn.wq_a", COMPONENTS_X.sum(), COMPONENTS_W, COMPONENTS_OUT),
        "inputs of layers.0.attn.wq_a = {'x': []}",
    ),
]


@pytest.mark.parametrize("case", range(len(COMPONENTS_REFUSED)))
def test_what_does_not_fit_is_refused_by_name(case: int) -> None:
    arguments, text = COMPONENTS_REFUSED[case]
    with pytest.raises(DegarbleError) as raised:
        judge(*arguments, setting=SETTING)
    assert text in str(raised.value), str(raised.value)


def test_tokens_in_more_dimensions_are_taken() -> None:
    assert judge(
        "attn.wq_a",
        COMPONENTS_X.reshape(2, 12, -1),
        COMPONENTS_W,
        COMPONENTS_OUT.reshape(2, 12, -1),
        setting=SETTING,
    )
    assert judge("attn.wq_a", COMPONENTS_X[0], COMPONENTS_W, COMPONENTS_OUT[0], setting=SETTING)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
def test_an_output_of_another_kind_is_a_finding_without_a_cause(dtype: torch.dtype) -> None:
    kernel = judge(
        "attn.wq_a", COMPONENTS_X, COMPONENTS_W, COMPONENTS_OUT.to(dtype), setting=SETTING
    )
    assert (kernel.verdict, kernel.cause) == (Verdict.DIFFERS, None)
    assert f"dtype {dtype} in place of numbers" in str(kernel)


def test_a_component_needs_its_config() -> None:
    with pytest.raises(UnknownName, match="component without a config"):
        judge("attn.wq_a", COMPONENTS_X, COMPONENTS_W, COMPONENTS_OUT)


def test_the_answer_says_where_all_wrong_elements_lie() -> None:
    generator = torch.Generator().manual_seed(7)
    x, w = (torch.randn(rows, 64, generator=generator).bfloat16() for rows in (32, 48))
    out = (x.float() @ w.float().T).bfloat16()
    out[8:16, 40] = float("nan")
    told = judge("gemm", x, w, out)
    assert "in rows 8 to 15, column 40: 8 values NaN or infinite" in told.sentence
    assert told.elements["out"].region == "in rows 8 to 15, column 40"
