"""The backend `cutedsl` with a stand-in for the kernels: wiring, the table, what is refused.

The stand-in checks every tensor as a kernel's entry point does and computes its contract, so that a
capture by it agrees with the twin exactly if every tensor reached the right argument. That this
says something is shown by handing over the wrong one, component by component.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.backends.cutedsl import kernels as cutedsl_kernels
from degarble.harness.backends.cutedsl.backend import CONVENTIONS, decided, parts_of, use_kernels
from degarble.harness.backends.cutedsl.kernels import NOTHING, SUM
from degarble.harness.capture.files.reader import Capture
from degarble.harness.commands.check.report import check_text
from degarble.harness.generate.generate import GenerationOptions, TextGenerator
from degarble.harness.inference.generation import Limits
from degarble.harness.inference.model import open_model
from degarble.harness.model.recipes import recipe_named
from degarble.harness.report.verdict import Verdict
from degarble.references.binding import BoundModel
from degarble.references.numerics import Numerics
from degarble.suites.backends import cutedsl_cases as cases
from degarble.suites.backends.cutedsl_standin import StandIn
from degarble.suites.commands.calls import call

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Change = Callable[[str, Any, dict[str, Any]], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cutedsl")


QUICK = {("v4", "nvfp4-full"), ("v32", "nvfp4-experts")}
FEW = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in cases.CASES]


@pytest.mark.parametrize(("family", "layout"), FEW)
def test_a_run_by_kernels_agrees_and_names_the_kernel_of_each_component(
    folder: Path, tmp_path: Path, family: str, layout: str
) -> None:
    model = cases.write_model(folder, family, layout)
    done = cases.capture_by(StandIn(), model.checkpoint, tmp_path / "run")
    capture = Capture.open(tmp_path / "run")
    table = capture.facts["kernels"]
    every = {call.component for call in capture.calls}
    told = set(table["kernels"]) | set(table["reference"])
    assert not set(table["kernels"]) & set(table["reference"])
    assert every == told - {"layers.0.attn.wkv_b", "layers.1.attn.wkv_b"}, "absorbed: never called"
    assert all(table["reference"].values()), "no component falls without a reason"
    assert capture.facts["conventions"] == {
        "head_norm": "once", "routing_weight_before_w2": False,
        "attention_in_storage_dtype": False,
    }  # fmt: skip
    assert all(launch["launches"] > 0 for each in table["kernels"].values() for launch in each)
    result = cases.checked(tmp_path / "run", model)
    assert result.verdict is Verdict.AGREES, [
        str(origin.discrepancy.site) for origin in result.origins
    ]
    text = check_text(result, "agrees")
    for line in done.paired.lines()[2:]:
        assert line.rstrip() in text, line


def _swapped(kernel: str, t: dict[str, Any], names: tuple[str, str]) -> None:
    del kernel
    t[names[0]], t[names[1]] = t[names[1]], t[names[0]]


def _wrong(at: str, change: Callable[[Any, dict[str, Any]], None]) -> Change:
    def seen(kernel: str, problem: Any, given: dict[str, Any]) -> None:
        if kernel == at:
            change(problem, given)

    return seen


def _set(name: str, make: Callable[[Any], Any]) -> Callable[[Any, dict[str, Any]], None]:
    def change(_problem: Any, given: dict[str, Any]) -> None:
        if name in given:
            given[name] = make(given[name])

    return change


# What is handed over wrongly, in which recipe, and which component it has to be found in.
WRONG: dict[str, tuple[str, str, Change]] = {
    "token ids": ("bf16", "embed", _wrong("simt_embed", _set("ids", lambda x: (x + 1) % 64))),
    "norm's weight": (
        "bf16", "q_norm", _wrong("simt_rmsnorm", _set("weight", lambda x: x.roll(1)))
    ),
    "positions of queries": (
        "bf16", "q_head_norm_rope",
        _wrong("simt_qnorm_rope", _set("positions", lambda x: x + 1)),
    ),
    "sines of the way back": (
        "bf16", "inverse_rope", _wrong("simt_inverse_rope", _set("turns", lambda x: x.roll(32, 1)))
    ),
    "slots of a cache": (
        "bf16", "kv_write", _wrong("simt_kv_read", _set("indices", lambda x: x.flip(0)))
    ),
    "post of another token": (
        "bf16", "hc_post", _wrong("simt_mhc", _set("post", lambda x: x.roll(1, 0).contiguous()))
    ),
    "the ring of another token": (
        "bf16", "compressor.pool",
        _wrong("simt_compressor", _set("projected", lambda x: x.roll(1, 0).contiguous())),
    ),
    "pages of keys": (
        "bf16", "indexer.scores",
        _wrong("sm90_indexer_scores", _set("weights", lambda x: x.roll(1, 1).contiguous())),
    ),
    "window one to the left": (
        "bf16", "attend",
        _wrong("sm90_sparse_attention", _set("window_slots", lambda x: (x - 1).clamp(min=-1))),
    ),
    "sinks": (
        "bf16", "attend", _wrong("sm90_sparse_attention", _set("sink", lambda x: x.roll(1)))
    ),
    "base of mHC": (
        "bf16", "hc_pre", _wrong("simt_mhc", _set("base", lambda x: x.roll(4)))
    ),
    "weights of slots": (
        "bf16", "combine", _wrong(SUM, _set("weights", lambda x: x.roll(1, 1)))
    ),
    "router's bias": (
        "bf16", "topk", _wrong("simt_router", _set("bias", lambda x: x.roll(1, -1)))
    ),
    "scales of activations in linear order": (
        "nvfp4-full", "wq_a",
        _wrong("sm90_gemm_nvfp4", _set("a_scales", lambda x: x.roll(16).contiguous())),
    ),
    "tensor scale of the weight": (
        "nvfp4-full", "wq_a",
        _wrong("sm90_gemm_nvfp4", _set("b_decode_scale", lambda x: x * 2)),
    ),
    "gate and up": (
        "nvfp4-full", "act",
        _wrong("simt_quantise_nvfp4", _set("values", lambda x: x.roll(x.shape[1] // 2, 1))),
    ),
    "scales of FP8 weights": (
        "nvfp4-experts", "wo_b",
        _wrong("sm90_gemm_fp8_block", _set("b_scales", lambda x: x.flip(1).contiguous())),
    ),
}  # fmt: skip


IN_CI = ("slots of a cache", "window one to the left", "scales of activations in linear order")
SLOW = [pytest.param(what, marks=pytest.mark.slow) for what in WRONG if what not in IN_CI]


@pytest.mark.slow
@pytest.mark.parametrize("what", [*IN_CI, *SLOW])
def test_a_tensor_at_the_wrong_argument_is_found_in_its_component(
    folder: Path, tmp_path: Path, what: str
) -> None:
    layout, component, change = WRONG[what]
    model = cases.write_model(folder, "v4", layout)
    role = f"*{component}"
    cases.capture_by(
        StandIn(change), model.checkpoint, tmp_path / "run", components=role, new_tokens=1
    )
    result = cases.checked(tmp_path / "run", model)
    assert result.verdict is Verdict.DIFFERS, what
    assert any(origin.discrepancy.component.endswith(component) for origin in result.origins)


def test_a_word_by_kernels_is_that_of_a_twin_with_their_conventions(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = cases.write_model(folder, "v4", "nvfp4-full")
    asked: list[bool] = []

    def kernels(_settings: object, *, poison: bool) -> StandIn:
        asked.append(poison)
        return StandIn()

    monkeypatch.setattr(cutedsl_kernels, "KernelsOnGpu", kernels)
    monkeypatch.setattr(cutedsl_kernels, "require_gpu", lambda: None)
    line = ("--json", "generate", model.checkpoint, "--prompt", "w7 w8 w9", "--max-new-tokens", 1)
    with open_model(model.checkpoint, switches=CONVENTIONS) as alone:
        manner = GenerationOptions(limits=Limits(1))
        twin = TextGenerator(alone, manner).speak(["w7 w8 w9"]).document()
    mine = call(capsys, *line, "--backend", "cutedsl")
    assert mine.status == 0, mine.err
    assert mine.document["texts"] == twin["texts"]
    assert asked == [True], "what a kernel leaves unwritten has to be seen"
    assert mine.document["backend"]["kernels"]["kernels"]["head"][0]["kernel"] == "simt_gemv_bf16"
    result = call(capsys, *line[1:], "--backend", "cutedsl")
    assert "Kernels on sm_90a" in result.err
    strict = call(capsys, *line[1:], "--backend", "cutedsl", "--strict")
    assert strict.status == 0, "V4 in NVFP4 is whole"
    assert "reference:" not in strict.err


def test_memory_that_is_allocated_for_a_kernel_holds_no_number() -> None:
    with cutedsl_kernels.poisoned():
        assert torch.empty(64, dtype=torch.bfloat16).isnan().all()
        assert torch.empty(64, dtype=torch.uint8).eq(255).all()
    assert not torch.are_deterministic_algorithms_enabled()


COMMANDS = (
    ("capture", "--prompt", "w7", "--out", "OUT"),
    ("generate", "--prompt", "w7"),
    ("check", "CAPTURE", "--reference", "MODEL"),
)


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: line[0])
def test_without_a_gpu_it_is_refused_before_anything_is_written(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = cases.write_model(folder, "v4", "bf16")
    before = tmp_path / "capture"
    if line[0] == "check":
        cases.capture_by(StandIn(), model.checkpoint, before, ((7, 8),), components="embed")
    given = {"OUT": tmp_path / "out", "MODEL": model.reference, "CAPTURE": before}
    words = [given.get(word, word) for word in line]
    if line[0] != "check":
        words.insert(1, model.checkpoint)
    done = call(capsys, *words, "--backend", "cutedsl")
    assert done.status == 2, done.out
    assert "an NVIDIA GPU of sm_90a or sm_100a" in done.err
    assert not (tmp_path / "out").exists()


def test_strict_needs_a_backend_and_refuses_a_mixture(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model = cases.write_model(folder, "v32", "nvfp4-full")
    line = ("capture", model.checkpoint, "--prompt", "w7", "--out", tmp_path / "out", "--strict")
    assert "a backend with kernels" in call(capsys, *line).err
    elsewhere = StandIn()
    elsewhere.target = "sm_100a"  # which some components have no form for
    monkeypatch.setattr(cutedsl_kernels, "KernelsOnGpu", lambda _settings, **_how: elsewhere)
    monkeypatch.setattr(cutedsl_kernels, "require_gpu", lambda: None)
    done = call(capsys, *line, "--backend", "cutedsl")
    assert done.status == 2
    assert "every component by backend cutedsl" in done.err
    assert not (tmp_path / "out").exists()


def _bound(config: Any, recipe_name: str, **switches: Any) -> tuple[BoundModel, Any]:
    recipe = recipe_named(recipe_name, config)
    numerics = Numerics.twin().with_switches(**(dict(CONVENTIONS) | switches))
    return BoundModel(config, numerics, {}, recipe), recipe


def test_what_does_not_fit_a_kernel_has_a_reason() -> None:
    wide = replace(cases.CONFIG_V4, head_dim=576, qk_rope_head_dim=64)
    bound, recipe = _bound(wide, "nvfp4-full", routing_weight_before_w2=True)
    table = use_kernels(bound, recipe, StandIn()).table
    assert table is not None
    reasons = {name.split(".", 2)[-1]: why for name, why in table.reasons.items()}
    assert "rows of 576 with 64 turned" in reasons["attn.q_head_norm_rope"]
    assert "rows of 576 with 64 turned" in reasons["attn.attend"]
    assert "takes no routing weight" in reasons["ffn.experts.act_quant"]
    odd = replace(cases.CONFIG_V4, moe_intermediate_size=72)
    bound, recipe = _bound(odd, "nvfp4-experts")
    found = {part.component.name: decided(part) for part in parts_of(bound, recipe, "sm_90a")}
    assert "multiples of 32" in str(found["layers.0.ffn.experts.w2"])
    bound, recipe = _bound(cases.CONFIGS["v4"], "nvfp4-full")
    found = {part.component.name: decided(part) for part in parts_of(bound, recipe, "sm_100a")}
    assert "has run on sm_90a alone" in str(found["layers.0.attn.wq_a"])
    assert not isinstance(found["layers.0.attn.norm"], str)


def test_a_launch_without_rows_is_recorded_as_none(folder: Path, tmp_path: Path) -> None:
    model = cases.write_model(folder, "v4", "bf16")
    cases.capture_by(
        StandIn(), model.checkpoint, tmp_path / "run", ((7, 8),), components="*compressor.write",
        new_tokens=1,
    )  # fmt: skip
    told = Capture.open(tmp_path / "run").facts["kernels"]["kernels"]
    assert told["layers.1.attn.compressor.write"][0]["tactic"] == NOTHING


def test_weights_are_laid_out_once_and_again_when_they_are_others(folder: Path) -> None:
    model = cases.write_model(folder, "v4", "nvfp4-full")
    handed: list[int] = []

    def seen(kernel: str, _problem: Any, given: dict[str, Any]) -> None:
        if kernel == "sm90_gemm_nvfp4":
            handed.append(given["b"].data_ptr())

    with open_model(model.checkpoint, switches=CONVENTIONS) as opened, torch.inference_mode():
        bound = opened.logits_model.bound
        use_kernels(bound, opened.recipe, StandIn(seen))
        x = torch.randn(4, 192).to(torch.bfloat16)
        name = "layers.0.attn.wq_a"
        codes = bound(f"{name}.act_quant", x=x)
        first = bound(name, **codes)["out"]
        bound(name, **codes)
        assert handed[0] == handed[1]
        record = bound.weights[name]
        assert record.tensor_scale is not None
        other = replace(record, tensor_scale=record.tensor_scale * 2)
        bound.weights = {**{n: bound.weights[n] for n in bound.weights}, name: other}
        assert torch.equal(bound(name, **codes)["out"], first * 2)
