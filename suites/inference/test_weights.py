"""Held and streamed weights: values bit for bit, memory bounded, changed files."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import DegarbleError, UnreadableFile
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.formats.number_formats import BLOCK_FORMATS
from degarble.harness.formats.quantise import quantise
from degarble.harness.formats.weight import Weight
from degarble.harness.inference import weights
from degarble.harness.inference.model import open_model
from degarble.harness.inference.weights import HeldWeights, StreamedWeight, StreamedWeights
from degarble.harness.model.config.config import small_v4
from degarble.harness.model.recipes import recipe_named
from degarble.references.model import Sequence
from degarble.references.weights import quantised_weights, random_weights
from degarble.suites.checkpoint.reading_cases import TINY_V4
from degarble.suites.support.families import LAYOUTS
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path


# --------------------------------------------------------------------------------------------------
# Held weights: the source's own values, decoded once, also under inference mode.

CONFIG = small_v4(num_hidden_layers=2, compress_ratios=(0, 4), num_nextn_predict_layers=0)


def test_values_are_the_sources_and_are_decoded_once() -> None:
    recipe = recipe_named("nvfp4-experts", CONFIG)
    source = quantised_weights(random_weights(CONFIG, 1), CONFIG, recipe)
    held = HeldWeights(source)
    assert list(held) == list(source)
    assert len(held) == len(source)
    for name in ("embed", "layers.0.attn.wq_a", "layers.0.ffn.experts.3.w2"):
        for dtype in (torch.float32, torch.float64):
            with torch.inference_mode():
                values = held[name].values(dtype)
                assert held[name].values(dtype) is values
            assert not values.is_inference()
            assert torch.equal(values, source[name].values(dtype))
        assert held[name].is_quantised == source[name].is_quantised
        assert held[name].shape == source[name].shape


# --------------------------------------------------------------------------------------------------
# Streamed weights: values bit for bit, memory bounded, what is read ahead, changed files.

STREAMED_WEIGHTS_CONFIG = replace(TINY_V4, num_nextn_predict_layers=0)
QUICK = ("official", "nvfp4-full")
V4_LAYOUTS = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for family, name in LAYOUTS
    if family == STREAMED_WEIGHTS_CONFIG.family
]


@pytest.mark.parametrize("name", ["FP8_128X128_UE8M0", "FP8_128X128_F32"])
@pytest.mark.parametrize("shape", [(1, 128), (129, 256), (1300, 128), (128, 200)])
def test_fp8_panels_are_decoded_as_the_definition_does(
    name: str, shape: tuple[int, int], seed: int
) -> None:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    plain = Weight.of(quantise(drawn, BLOCK_FORMATS[name]))
    assert plain.codes is not None
    every = torch.arange(plain.codes.numel()).to(torch.uint8).view_as(plain.codes)
    plain.codes = every.view(plain.codes.dtype)  # all 256 codes, NaN as well
    found = StreamedWeight.of_weight(plain).values(torch.float32)
    wanted = plain.values(torch.float32)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert plain.block_scale is not None
    plain.block_scale = plain.block_scale[:0]
    with pytest.raises(DegarbleError):  # instead of reading beyond the end
        StreamedWeight.of_weight(plain).values(torch.float32)


@pytest.mark.parametrize("layout", V4_LAYOUTS)
def test_values_are_those_of_the_definition(layout: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", Synthetic(STREAMED_WEIGHTS_CONFIG, layout, seed=3))
    with Checkpoint.open(tmp_path / "c") as checkpoint:
        streamed = StreamedWeights(checkpoint, STREAMED_WEIGHTS_CONFIG)
        formats = Counter[str]()
        for name, weight in checkpoint.weights.items():
            found = streamed[name]
            form = weight.storage.format.name if weight.storage else "plain"
            formats[form] += 1
            if formats[form] > 6:
                continue
            for dtype in (torch.float32, torch.float64):
                assert torch.equal(found.values(dtype), weight.values(dtype)), (name, dtype)
        streamed.close()


def test_scales_at_both_ends_are_decoded_as_the_definition_does(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", Synthetic(STREAMED_WEIGHTS_CONFIG, "official", seed=3))
    with Checkpoint.open(tmp_path / "c") as checkpoint:
        weight = StreamedWeights(checkpoint, STREAMED_WEIGHTS_CONFIG)["layers.0.ffn.experts.0.w1"]
        plain = checkpoint.weights["layers.0.ffn.experts.0.w1"]
        assert weight.block_scale is not None
        scales = (
            torch.arange(weight.block_scale.numel()).to(torch.uint8).view_as(weight.block_scale)
        )
        weight.block_scale = plain.block_scale = scales
        for dtype in (torch.float32, torch.float64):
            found, wanted = weight.values(dtype), plain.values(dtype)
            assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))


def test_only_visited_experts_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "c", Synthetic(STREAMED_WEIGHTS_CONFIG, "official", seed=3))
    requested: list[str] = []
    with open_model(tmp_path / "c", "bf16", held_values=0) as model:
        streamed = model.streamed
        assert streamed is not None
        asked: list[str] = []
        streamed.on_read = lambda size, name: asked.append(name) if size else None
        seen = streamed.expect

        def expect(names: list[str]) -> None:
            coming = list(names)
            requested.extend(coming)
            seen(coming)

        monkeypatch.setattr(streamed, "expect", expect)
        model.logits_model.next_logits([Sequence()], [torch.tensor([5])])
        unused = {n for n in requested if ".experts." in n} - set(asked)
        assert not unused
        assert 0 < len({n for n in asked if ".experts." in n}) < 3 * 3 * 3
        assert set(asked) <= {*requested, "embed"}
        assert streamed.total > 0


def test_memory_stays_within_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are given back whenever a window's bytes were handed out."""
    write_checkpoint(tmp_path / "c", Synthetic(STREAMED_WEIGHTS_CONFIG, "official", seed=3))
    monkeypatch.setattr(weights, "WINDOW", 1 << 16)
    with open_model(tmp_path / "c", "bf16", held_values=0) as model:
        streamed, released = model.streamed, list[int]()
        assert streamed is not None
        release = model.checkpoint.release

        def watched() -> None:
            released.append(streamed.read)
            release()

        monkeypatch.setattr(model.checkpoint, "release", watched)
        model.logits_model.next_logits([Sequence()], [torch.arange(64)])
        steps = [b - a for a, b in zip([0, *released], [*released, streamed.read], strict=True)]
        largest = 1 << 18  # one weight of this model
        assert len(released) > 10
        assert max(steps) <= (1 << 16) + largest


PEAK = """
import sys, torch
from pathlib import Path
from degarble.harness.inference.model import open_model
from degarble.references.model import Sequence
torch.set_num_threads(1)
def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024
with open_model(Path(sys.argv[1]), "bf16", held_values=0) as model:
    for tokens in (4, 96):
        model.speaker.next_logits([Sequence()], [torch.arange(tokens) % 64])
        if tokens == 4:
            Path("/proc/self/clear_refs").write_text("5")
            before = status("VmRSS")
    print(status("VmHWM") - before, model.streamed.total)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_model_many_times_its_window_runs_in_bounded_memory(tmp_path: Path) -> None:
    """The scaled-down form of the bench with 15 GB: of 45 MB of weights half are resident."""
    config = replace(
        STREAMED_WEIGHTS_CONFIG, n_routed_experts=64, hidden_size=256, moe_intermediate_size=512
    )
    write_checkpoint(tmp_path / "c", Synthetic(config, "official", seed=3))
    script = "from degarble.harness.inference import weights as s; s.WINDOW = 1 << 22\n" + PEAK
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "c")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    peak, total = map(int, done.stdout.split())
    assert total > 30 << 20
    assert peak < total // 2, f"{peak >> 20} MiB over {total >> 20} MiB of weights"


def test_a_file_that_shrinks_meanwhile_is_refused_by_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", Synthetic(STREAMED_WEIGHTS_CONFIG, "official", seed=3))
    with open_model(tmp_path / "c", "bf16", held_values=0) as model:
        model.logits_model.next_logits([Sequence()], [torch.arange(4)])
        shard = next((tmp_path / "c").glob("*.safetensors"))
        with shard.open("r+b") as stream:
            stream.truncate(shard.stat().st_size // 2)
        with pytest.raises(UnreadableFile, match=shard.name):
            model.logits_model.next_logits([Sequence()], [torch.arange(4)])
