"""Checkpoints of every layout as models: held, streamed, on another device; logits; refusals."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import MissingDevice, Refused, UnknownName, UnreadableFile
from degarble.harness.checkpoint.read import safetensors_files
from degarble.harness.checkpoint.transform.convert.job import job_for
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.commands.check.check import CheckRun, CheckSettings
from degarble.harness.engine.localise.localise import localise
from degarble.harness.engine.localise.recorded_run import InMemoryRun
from degarble.harness.formats.weight import Weight
from degarble.harness.inference import devices
from degarble.harness.inference.model import HELD_VALUES, open_model, threads_for
from degarble.harness.model.config.config import V4_FLASH
from degarble.harness.model.parameters import parameter_named
from degarble.harness.model.recipes import Formats, recipe_named
from degarble.harness.report.verdict import Verdict
from degarble.references.binding import BoundModel
from degarble.references.model import Sequence
from degarble.references.numerics import Numerics
from degarble.suites.checkpoint.reading_cases import TINY_V4
from degarble.suites.commands.check.test_check import captured
from degarble.suites.inference.speaking_cases import ids, speaker
from degarble.suites.serve.talking_cases import CONFIGS, write_speaker
from degarble.suites.support.families import LAYOUTS
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path


# --------------------------------------------------------------------------------------------------
# Checkpoints of every layout as models: the same tokens held and streamed; recipes; refusals.

PROMPT = torch.arange(9) * 37 % 64
FAMILIES = {"deepseek_v4": "v4", "deepseek_v32": "v32"}
QUICK = {
    *(("v4", name) for name in ("official", "nvfp4-experts")),
    ("v32", "compressed-tensors"),
}
WAYS = [
    pytest.param(family, name, marks=() if (family, name) in QUICK else pytest.mark.slow)
    for family, name in ((FAMILIES.get(family, family), name) for family, name in LAYOUTS)
]


def logits(path: Path, arithmetic: str | None, held_values: int) -> torch.Tensor:
    with open_model(path, arithmetic, held_values=held_values) as model:
        assert (model.streamed is None) == (held_values > 0)
        sequence = Sequence()
        first = model.logits_model.next_logits([sequence], [PROMPT])
        return torch.cat((first, model.logits_model.next_logits([sequence], [PROMPT[:1]])))


@pytest.mark.parametrize(("family", "layout"), WAYS)
def test_a_layout_runs_held_and_streamed_alike(family: str, layout: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", Synthetic(CONFIGS[family], layout, seed=3))
    held = logits(tmp_path / "c", "definition", 1 << 27)
    assert torch.equal(held, logits(tmp_path / "c", "definition", 0))
    assert held.isfinite().all()
    if (family, layout) in (("v4", "nvfp4-experts"), ("v32", "compressed-tensors")):
        assert logits(tmp_path / "c", None, 1 << 27).isfinite().all()


def test_a_narrow_model_takes_one_thread_while_it_is_open(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", Synthetic(TINY_V4, "bf16", seed=3))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with open_model(tmp_path / "c"):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with threads_for(V4_FLASH):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_converted_checkpoint_generates_the_same_text(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", Synthetic(TINY_V4, "official", seed=3))
    wanted = logits(tmp_path / "c", "definition", 1 << 27)
    for form in ("nvfp4-lossless", "fused-compressor"):
        job = job_for(tmp_path / "c", form)
        with job.checkpoint:
            job.run(tmp_path / form)
        if form == "fused-compressor":  # for one kernel, and no model
            with pytest.raises(UnreadableFile, match="is no model: run its source"):
                logits(tmp_path / form, "definition", 0)
        else:
            assert (logits(tmp_path / form, "definition", 0) - wanted).abs().max() < 1e-12


def test_the_logits_are_those_of_the_reference_on_the_same_weights(tmp_path: Path) -> None:
    path = write_speaker(tmp_path / "c")
    with Checkpoint.open(path) as checkpoint, open_model(path, "definition") as model:
        weights = dict(checkpoint.weights)
        bound = BoundModel(model.config, Numerics.definition(), weights)
        ours = model.logits_model.next_logits([Sequence()], [PROMPT])
        model.logits_model.bound.calls, calls = bound.calls, model.logits_model.bound.calls
        model.logits_model.bound.weights = weights
        assert torch.equal(ours, model.logits_model.next_logits([Sequence()], [PROMPT]))
        model.logits_model.bound.calls = calls


@pytest.mark.parametrize(
    ("layout", "arithmetic", "name", "formats"),
    [
        ("bf16", "bf16", "layers.0.attn.wq_a", ("BF16", "BF16")),
        ("official", "twin", "layers.0.ffn.experts.0.w1", ("MXFP4", "FP8_1X128_UE8M0")),
        ("official", "twin", "layers.1.attn.compressor.wkv", ("BF16", "BF16")),
        ("nvfp4-experts", "twin", "layers.0.ffn.experts.0.w1", ("NVFP4", "NVFP4")),
        ("nvfp4-experts", "twin", "layers.0.attn.wkv", ("FP8_128X128_UE8M0", "FP8_1X128_UE8M0")),
        ("nvfp4-full", "twin", "layers.0.attn.wkv", ("NVFP4", "NVFP4")),
    ],
)
def test_arithmetic_and_recipe_follow_the_checkpoint(
    layout: str, arithmetic: str, name: str, formats: tuple[str, str], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "c", Synthetic(TINY_V4, layout, seed=3))
    with open_model(tmp_path / "c") as model:
        assert model.arithmetic == arithmetic
        found = model.recipe.format_of(parameter_named(TINY_V4, name))
        assert found == Formats(*formats)
        if layout in ("bf16", "official"):
            recipe = recipe_named(layout, TINY_V4)
            assert found == recipe.format_of(parameter_named(TINY_V4, name))


def test_what_cannot_be_run_is_refused_by_name(tmp_path: Path) -> None:
    path = write_speaker(tmp_path / "c")
    with pytest.raises(UnknownName, match="--numerics"):
        open_model(path, "fp32")
    shard = next(path.glob("*.safetensors"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    with pytest.raises(UnreadableFile, match=shard.name):
        open_model(path)
    shard.unlink()
    with pytest.raises(UnreadableFile, match=shard.name):
        open_model(path)
    shard.write_bytes(whole)
    (path / "config.json").unlink()
    with pytest.raises(Refused, match=r"config\.json"):
        open_model(path)


def test_a_parameter_that_is_missing_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", Synthetic(TINY_V4, "bf16", seed=3), shards=20)
    lost = next(iter(sorted((tmp_path / "c").glob("*00003-of*.safetensors"))))
    (tmp_path / "c" / "model.safetensors.index.json").unlink()
    (tmp_path / "c" / "manifest.json").unlink()
    lost.unlink()
    with pytest.raises(UnreadableFile, match="parameters missing, such as"):
        open_model(tmp_path / "c")


# --------------------------------------------------------------------------------------------------
# Next logits are the last rows of all logits, for sequences of any length side by side.


@pytest.mark.parametrize("family", ["v4", "v32"])
def test_next_logits_are_the_last_rows(family: str) -> None:
    model = speaker(family)
    prompts = [torch.tensor(ids(n, length)) for n, length in enumerate((5, 1, 140))]
    sequences = [Sequence() for _ in prompts]
    following = model.next_logits(sequences, prompts)
    assert [sequence.length for sequence in sequences] == [5, 1, 140]
    for row, prompt in zip(following, prompts, strict=True):
        alone = model.logits(model.hidden([Sequence()], [prompt]))
        assert alone.shape == (len(prompt), 64)
        assert (row - alone[-1]).abs().max() < 1e-12


def test_the_context_is_the_configs() -> None:
    assert speaker("v4").context == 400


# --------------------------------------------------------------------------------------------------
# Components on another device: what goes there, what comes back, and a device that is absent.

PROMPTS = [[7, 8, 9, 31], [9]]


@pytest.mark.parametrize("family", ["v4", "v32"])
def test_a_model_after_a_round_trip_is_the_same_model(family: str, tmp_path: Path) -> None:
    source = write_speaker(tmp_path / "model", family, "nvfp4-full")
    with open_model(source) as plain, open_model(source) as moved:
        bound = moved.logits_model.bound
        devices.wrap_calls(bound, devices.RecentTensors("cpu"))
        run = InMemoryRun.from_prompts(bound, PROMPTS)
        expected = InMemoryRun.from_prompts(plain.logits_model.bound, PROMPTS)
        assert all(map(torch.equal, run.logits, expected.logits))
        assert localise(bound, moved.recipe, expected).verdict is Verdict.AGREES


def test_a_cause_is_named_on_another_device_and_with_streamed_weights(tmp_path: Path) -> None:
    """Ways that rebind a reference's facts ask the call that computes, not the one in front."""
    source = write_speaker(tmp_path / "model")
    capture = captured(source, tmp_path / "capture", "layers.1.attn.q_norm")
    told = []
    for held_values, device in ((HELD_VALUES, False), (HELD_VALUES, True), (0, False)):
        with CheckRun(CheckSettings(capture, source, held_values=held_values)) as run:
            if device:
                devices.wrap_calls(run.twin, devices.RecentTensors("cpu"))
            (origin,) = run.judge().origins
            assert (run.model.streamed is None) == bool(held_values)
            assert origin.diagnosed is not None
            told.append((origin.diagnosed.sentence, [e.id for e in origin.diagnosed.named]))
    assert told[0][1]
    assert [ids for _, ids in told] == [told[0][1]] * 3
    assert told[1] == told[0]


def test_a_quantised_model_that_is_its_own_reference_is_opened_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_speaker(tmp_path / "model", "v4", "nvfp4-full")
    capture = captured(source, tmp_path / "capture", "layers.1.attn.q_norm")
    read, opened = safetensors_files.read_header, []

    def counted(path: Path) -> Any:
        opened.append(path.name)
        return read(path)

    monkeypatch.setattr(safetensors_files, "read_header", counted)
    found = {}
    for own in (None, source, write_speaker(tmp_path / "other", "v4", "nvfp4-full")):
        opened.clear()
        with CheckRun(CheckSettings(capture, own, source, held_values=0)) as run:
            localised = localise(run.twin, run.recipe, run.capture, run.reference)
            run.model.close()
            name = "layers.0.attn.wq_a"
            assert run.reference.weights[name].values(torch.float32).isfinite().all()
        found[len(opened)] = [(row.component.name, row.output, row.ratio) for row in localised.rows]
    once, twice = sorted(found)
    assert twice == 2 * once
    assert found[once] == found[twice]


def test_what_a_kernel_writes_into_its_inputs_there_is_written_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A copy stands for another device: no machine of the suites has one."""
    plain = torch.Tensor.to

    def away(tensor: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        made = plain(tensor, *args, **named)
        return made.clone() if args and isinstance(args[0], torch.device) else made

    source = write_speaker(tmp_path / "model")
    seen: dict[str, torch.Tensor] = {}

    def kernel(inputs: Any, weights: Any) -> Any:
        (weight,) = weights.values()
        seen["weight"] = weight.values(torch.float32)
        inputs["x"].mul_(2)
        return {"out": inputs["x"]}

    with open_model(source) as model:
        bound = model.logits_model.bound
        bound.calls["norm"] = kernel
        devices.wrap_calls(bound, devices.RecentTensors("cpu"))
        monkeypatch.setattr(torch.Tensor, "to", away)
        x = torch.ones(2, 3)
        made = bound.calls["norm"]({"x": x}, bound.weights_of("norm"))["out"]
        (own,) = bound.weights_of("norm").values()
        assert isinstance(own, Weight)
        assert seen["weight"] is not own.values(torch.float32)
        assert torch.equal(seen["weight"], own.values(torch.float32))
        first = seen["weight"]
        bound.calls["norm"]({"x": x}, bound.weights_of("norm"))
        assert seen["weight"] is first, "a held weight goes there once"
    assert torch.equal(made, torch.full((2, 3), 2.0))
    assert torch.equal(x, torch.full((2, 3), 4.0))


def test_streamed_weights_and_budgets_on_another_device_give_the_same_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(devices, "_SMALL", 0)
    source = write_speaker(tmp_path / "model", "v4", "nvfp4-full")
    capture = captured(source, tmp_path / "capture", "layers.1.attn.q_norm")
    found = []
    for device in (False, True):
        with CheckRun(CheckSettings(capture, source, held_values=0)) as run:
            if device:
                devices.wrap_calls(run.twin, devices.RecentTensors("cpu"))
            localised = localise(run.twin, run.recipe, run.capture, run.reference)
            found.append([(row.component.name, row.output, row.ratio) for row in localised.rows])
    assert found[0] == found[1]
    assert any(ratio > 0 for _, _, ratio in found[0])


def test_what_was_moved_is_kept_until_there_is_too_much_or_it_was_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved: list[torch.Tensor] = []

    def copied(tensor: torch.Tensor, _device: torch.device) -> torch.Tensor:
        moved.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(devices, "_copied", copied)
    monkeypatch.setattr(devices, "_COUNTED", 0)
    monkeypatch.setattr(devices, "_KEPT_ON_CPU", 100)
    recent = devices.RecentTensors("cpu:0")
    first, second = torch.arange(10), torch.arange(10)
    assert recent.moved(first) is recent.moved(first)
    first.mul_(2)
    assert torch.equal(recent.moved(first), first), "what was written since is seen"
    assert len(moved) == 2
    assert torch.equal(recent.moved(second), second)
    recent.moved(first)
    assert len(moved) == 4, "the first one had to go"


def test_large_models_get_several_processes_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def machine(cores: int, memory: int) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (memory << 30, 200 << 30))
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores), raising=False)

    machine(cores=64, memory=139)
    one, two = ("cuda:0",), ("cuda:0", "cuda:1")
    counts = [devices.processes_on(one, size << 30) for size in (1, 4, 20, 500)]
    assert counts == [1, 1, 5, 8]
    assert [devices.processes_on(two, size << 30) for size in (1, 500)] == [2, 16]
    spread = [devices.is_spread(one, size << 30) for size in (1, 7, 8, 500)]
    assert spread == [False, False, True, True], "whatever memory is free"
    kept = [devices.RecentTensors("cuda:0", sharing)._most >> 30 for sharing in (1, 4, 8)]
    assert kept == [17, 17, 8]
    machine(cores=64, memory=24)
    assert devices.processes_on(one, 500 << 30) == 2
    machine(cores=8, memory=139)
    assert [devices.processes_on(each, 500 << 30) for each in (one, two)] == [4, 4]


@pytest.mark.gpu
def test_a_copy_through_pinned_pages_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_STAGED", 1 << 16)
    devices._staging.cache_clear()
    for count in (1, 1 << 16, (5 << 20) + 3):
        tensor = torch.randint(256, (count,), dtype=torch.uint8)
        with torch.inference_mode():
            made = devices._copied(tensor, torch.device("cuda"))
        assert torch.equal(made.cpu(), tensor)
    devices._staging.cache_clear()


def test_a_device_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    devices.require_device("--device", "cpu")
    with pytest.raises(MissingDevice, match="--device = 'cuda'"):
        devices.require_device("--device", "cuda")
