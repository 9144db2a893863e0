"""What a target is recognised as, what is planned for it, and a kernel's saved tensors judged."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from degarble.harness.api import NVFP4, QuantisedTensor, dequantise, quantise
from degarble.harness.base.errors import InvalidArgument, UnreadableFile
from degarble.harness.commands.doctor.kernel_file import judge_file
from degarble.harness.commands.doctor.plan import (
    AUDIT,
    CAPTURE,
    CHECK,
    ENGINE,
    JUDGE,
    KERNELS,
    LOADER,
    PROBE,
    DoctorOptions,
    free_folder,
    next_command,
    plan_for,
)
from degarble.harness.commands.doctor.target import DoctorTarget, TargetKind, recognise
from degarble.harness.formats.layouts import scale_layout, to_layout
from degarble.harness.formats.number_formats import MXFP8
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from pathlib import Path


def checkpoint(folder: Path, *, tokenizer: bool = True) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(1000))
    if tokenizer:
        (folder / "tokenizer.json").write_text("{}")
    return folder


def capture(folder: Path, source: Path | None, backend: str = "torch") -> Path:
    folder.mkdir()
    facts = {"backend": backend} | ({"source": {"path": str(source)}} if source else {})
    manifest = {"format": "degarble-capture", "facts": facts}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_each_kind_of_target_is_recognised(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "ck")
    kernel = tmp_path / "kernel.safetensors"
    kernel.write_bytes(bytes(8))
    found = [
        recognise(str(target))
        for target in (source, capture(tmp_path / "run", source), kernel, "http://127.0.0.1:1")
    ]
    assert [target.kind for target in found] == [
        TargetKind.CHECKPOINT, TargetKind.CAPTURE, TargetKind.KERNEL, TargetKind.SERVER,
    ]  # fmt: skip
    assert (found[0].nbytes, found[0].has_tokenizer) == (1000, True)
    assert (found[1].source, found[1].backend) == (str(source), "torch")


def test_what_is_nothing_of_these_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnreadableFile, match="a checkpoint's folder"):
        recognise(str(tmp_path / "empty"))
    pickled = tmp_path / "kernel.pt"
    pickled.write_bytes(b"never read")
    with pytest.raises(InvalidArgument, match="save_file"):
        recognise(str(pickled))


def test_a_checkpoint_alone_is_audited_and_run_and_no_kernel_is_tested(tmp_path: Path) -> None:
    target = recognise(str(checkpoint(tmp_path / "ck")))
    plan = plan_for(target, DoctorOptions(tmp_path / "out"))
    assert [step.name for step in plan.done] == [AUDIT, CAPTURE, CHECK]
    left_out = {step.name: step.left_out for step in plan.steps if step.left_out}
    assert left_out.keys() == {LOADER, KERNELS}
    assert "No kernel was tested" in left_out[KERNELS]
    assert plan.sentence.startswith("ck is a checkpoint: audit its files, run the built-in")
    options = DoctorOptions(tmp_path / "out")
    assert next_command(target, options, []).endswith(f'--engine "vllm serve {target.text}"')
    assert next_command(target, options, [AUDIT]).endswith("--against SOURCE")
    compared = DoctorOptions(tmp_path / "out", tmp_path / "bf16", prompts=tmp_path / "asked")
    again = f"degarble doctor {target.text} --reference {tmp_path}/bf16 --prompts {tmp_path}/asked"
    for found in ([AUDIT], [CHECK], [AUDIT, CHECK]):
        assert next_command(target, compared, found) == again
    kernel = DoctorTarget(TargetKind.KERNEL, "k.safetensors")
    assert next_command(kernel, options, [JUDGE]) == "degarble doctor k.safetensors"
    run = DoctorTarget(TargetKind.CAPTURE, "run", source="a model")
    assert next_command(run, options, [CHECK]) == "degarble audit 'a model'"
    server = recognise("http://h:1")
    assert next_command(server, options, []) == "degarble probe http://h:1 --against CKPT"


def test_what_a_step_lacks_is_named(tmp_path: Path) -> None:
    target = recognise(str(checkpoint(tmp_path / "ck", tokenizer=False)))
    plan = plan_for(target, DoctorOptions(tmp_path / "out"))
    assert [step.name for step in plan.done] == [AUDIT]
    assert "tokenizer.json" in next(s.left_out for s in plan.steps if s.name == CAPTURE)
    moved = recognise(str(capture(tmp_path / "run", tmp_path / "gone")))
    (step,) = plan_for(moved, DoctorOptions(tmp_path / "out")).steps
    assert "is not here" in step.left_out
    assert f"degarble check {moved.text} --checkpoint CKPT" in step.left_out


def test_a_step_that_takes_too_long_is_left_out_with_its_command() -> None:
    pro = DoctorTarget(TargetKind.CHECKPOINT, "pro", 900_000_000_000, has_tokenizer=True)
    plan = plan_for(pro, DoctorOptions(pro.path / "out", minutes=60))
    assert [step.name for step in plan.done] == [AUDIT]
    long = next(step for step in plan.steps if step.name == CAPTURE)
    assert "more than the 60 minutes" in long.left_out
    assert "degarble capture pro --prompts" in long.left_out


def test_an_engine_is_started_and_its_run_checked(tmp_path: Path) -> None:
    target = recognise(str(checkpoint(tmp_path / "ck")))
    options = DoctorOptions(tmp_path, engine="vllm serve ck", loader="vllm:tp=2", url="http://h:1")
    plan = plan_for(target, options)
    assert [step.name for step in plan.done] == [AUDIT, ENGINE, CHECK]
    assert "--loader" in plan.steps[0].line
    assert "vllm:tp=2" in plan.steps[0].line
    assert "CUDA graphs" in next(step.left_out for step in plan.steps if step.name == PROBE)
    assert next_command(target, options, []) == "degarble probe http://h:1"


def test_no_run_is_checked_that_nobody_has_time_to_record(tmp_path: Path) -> None:
    target = recognise(str(checkpoint(tmp_path / "ck")))
    plan = plan_for(target, DoctorOptions(tmp_path, engine="vllm serve ck", minutes=1))
    assert [step.name for step in plan.done] == [AUDIT]
    left_out = {step.name: step.left_out for step in plan.steps if step.left_out}
    assert left_out[ENGINE].endswith("Allow it: --minutes 2")
    assert left_out[CHECK] == "It needs the run of the step engine."


def test_nothing_that_exists_is_written_into(tmp_path: Path) -> None:
    assert free_folder(tmp_path / "a") == tmp_path / "a"
    (tmp_path / "a").mkdir()
    (tmp_path / "a-2").mkdir()
    assert free_folder(tmp_path / "a") == tmp_path / "a-3"


# --------------------------------------------------------------------------------------------------
# A kernel's saved tensors


def parts(name: str, operand: QuantisedTensor) -> dict[str, torch.Tensor]:
    assert operand.tensor_scale is not None
    return {
        f"{name}.codes": operand.codes,
        f"{name}.block_scale": operand.block_scale,
        f"{name}.tensor_scale": operand.tensor_scale,
    }


def product(gain: float = 1.0) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    x, w = (quantise(torch.randn(rows, 128).bfloat16(), NVFP4) for rows in (16, 32))
    out = gain * (dequantise(x) @ dequantise(w).T)
    return {**parts("x", x), **parts("w", w), "out": out.bfloat16()}


def test_a_saved_product_of_codes_is_judged(tmp_path: Path) -> None:
    file = tmp_path / "kernel.safetensors"
    save_file(product(), file)
    assert judge_file(file).verdict is Verdict.AGREES
    save_file(product(2.0), file)
    wrong = judge_file(file)
    assert wrong.verdict is Verdict.DIFFERS
    assert wrong.cause is not None
    assert wrong.cause.fault == "M43.whole"


def test_codes_are_read_by_the_format_of_the_metadata(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, w = (quantise(torch.randn(rows, 128).bfloat16(), MXFP8) for rows in (16, 32))
    out = (dequantise(x) @ dequantise(w).T).bfloat16()
    tensors = {"x.codes": x.codes, "x.block_scale": x.block_scale, "out": out}
    tensors |= {"w.codes": w.codes, "w.block_scale": w.block_scale}
    file = tmp_path / "kernel.safetensors"
    save_file(tensors, file, metadata={"format": "mxfp8"})
    assert judge_file(file).verdict is Verdict.AGREES
    save_file(product(), file, metadata={"format": "nvfp4"})
    assert judge_file(file).verdict is Verdict.AGREES


def test_swizzled_scales_are_read_by_the_layout_of_the_metadata(tmp_path: Path) -> None:
    tensors = product()
    layout = scale_layout("128x4")
    for name in ("x.block_scale", "w.block_scale"):
        tensors[name] = to_layout(tensors[name], layout)
    file = tmp_path / "kernel.safetensors"
    save_file(tensors, file, metadata={"layout": "128x4"})
    assert judge_file(file).verdict is Verdict.AGREES


def test_a_saved_norm_is_judged(tmp_path: Path) -> None:
    x, w = torch.randn(8, 64, dtype=torch.float64), torch.rand(64, dtype=torch.float64) + 0.5
    x, w = x.bfloat16(), w.bfloat16()
    wide = x.double()
    out = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w.double()
    file = tmp_path / "norm.safetensors"
    stated = {"component": "rmsnorm", "epsilon": "1e-5"}
    save_file({"x": x, "w": w, "out": out.bfloat16()}, file, metadata=stated)
    assert judge_file(file).verdict is Verdict.AGREES
    save_file({"x": x, "w": w, "out": -out.bfloat16()}, file, metadata=stated)
    assert judge_file(file).verdict is Verdict.DIFFERS


@pytest.mark.parametrize(
    ("tensors", "metadata", "told"),
    [
        ({"x": torch.ones(2, 16)}, {}, "Save w, out too"),
        ({"x": torch.ones(2, 16), "model.embed": torch.ones(2)}, {}, "model.embed"),
        (product(), {"format": "mxfp8"}, "mxfp8 has none"),
        ({"x": torch.ones(2, 16), "x.codes": torch.ones(2, 8)}, {}, "either x or its codes"),
        ({"x": torch.ones(2, 16)}, {"component": "attention"}, "attention"),
        ({"x": torch.ones(2, 16), "out": torch.ones(2, 16)},
         {"component": "rmsnorm", "epsilon": "small"}, "epsilon"),
    ],
    ids=["incomplete", "foreign", "tensor-scale", "twice", "component", "epsilon"],
)  # fmt: skip
def test_files_that_cannot_be_judged_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str], told: str
) -> None:
    file = tmp_path / "kernel.safetensors"
    save_file(tensors, file, metadata=metadata)
    with pytest.raises(InvalidArgument, match=told):
        judge_file(file)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "kernel.safetensors"
    file.write_bytes(b"\x80\x04not a header")
    with pytest.raises(UnreadableFile, match="whole"):
        judge_file(file)
