"""`degarble quantise` of any model of transformers: ModelOpt's bytes, and true refusals."""

from __future__ import annotations

import json
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from degarble.suites.campaigns.healthy_exports import modelopt_export, saved_model
from degarble.suites.commands.calls import call
from degarble.suites.commands.test_traced_families import captured, checked
from degarble.suites.commands.traced_checkpoints import PROMPT, write_checkpoint, write_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    Capsys = pytest.CaptureFixture[str]

pytestmark = pytest.mark.needs("transformers")

_SLOW = pytest.mark.slow
_EXPORTS = [
    ("llama", "NVFP4_DEFAULT_CFG", "nvfp4-full"),
    ("qwen3-moe", "NVFP4_EXPERTS_ONLY_CFG", "nvfp4-experts"),
    pytest.param("qwen3-moe", "NVFP4_DEFAULT_CFG", "nvfp4-full", marks=_SLOW),
    pytest.param("v3", "NVFP4_DEFAULT_CFG", "nvfp4-full", marks=_SLOW),
    pytest.param("mixtral", "NVFP4_DEFAULT_CFG", "nvfp4-full", marks=_SLOW),
    ("gpt-oss", "NVFP4_DEFAULT_CFG", "nvfp4-full"),
    pytest.param("llama4", "NVFP4_DEFAULT_CFG", "nvfp4-full", marks=_SLOW),
    pytest.param("qwen3", "W4A16_NVFP4_CFG", "weights", marks=_SLOW),
]
_WEIGHTS = "name: weights\nrules:\n- {match: 'layers.*', weight: NVFP4}\n"


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    held: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        held |= load_file(file)
    return held


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (one, other)))


@pytest.mark.needs("modelopt")
@pytest.mark.parametrize(("model", "scheme", "recipe"), _EXPORTS)
def test_the_bytes_are_those_of_modelopt(
    capsys: Capsys, tmp_path: Path, model: str, scheme: str, recipe: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what ModelOpt imports
        theirs, source = modelopt_export(model, scheme, tmp_path)
    wanted = _tensors(theirs)
    end, options = "input_scale", []
    records = {
        name.removesuffix(end)[:-1]: {"amax": float(scale) * 2688, "tokens": 1}
        for name, scale in wanted.items() if name.endswith(end)
    }  # fmt: skip
    if records:
        raw = {"format": "degarble-amax", "version": 1, "linears": records}
        (tmp_path / "amax.json").write_text(json.dumps(raw))
        options = ["--calibration", tmp_path / "amax.json"]
    if recipe == "weights":
        (tmp_path / "weights.yaml").write_text(_WEIGHTS)
        recipe = str(tmp_path / "weights.yaml")
    out = tmp_path / "out"
    made = call(capsys, "quantise", source, out, "--recipe", recipe, *options)
    assert made.status == 0, made.err
    found = _tensors(out)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not _equal(found[name], wanted[name])] == []
    stated = [json.loads((each / "hf_quant_config.json").read_text()) for each in (theirs, out)]
    assert stated[0]["quantization"]["quant_algo"] == stated[1]["quantization"]["quant_algo"]
    ignored = [each["quantization"]["exclude_modules"] for each in stated]
    assert ignored[0] == ignored[1] or "experts" in recipe  # where ModelOpt writes patterns
    loaded = ("--loader", "transformers" if model in {"gpt-oss", "llama4"} else "vllm")
    assert call(capsys, "audit", out, "--against", source, *loaded).status == 0
    if model == "gpt-oss":
        write_tokenizer(out)
        assert captured(capsys, out, tmp_path / "capture", "--backend", "transformers").status == 0
        assert checked(capsys, tmp_path / "capture", source)["verdict"] == "AGREES"


def test_a_model_is_calibrated_quantised_run_and_judged(capsys: Capsys, tmp_path: Path) -> None:
    source, _ = saved_model("llama", "bf16", tmp_path)
    write_tokenizer(source)
    ranges = tmp_path / "ranges"
    made = call(capsys, "capture", source, "--amax-only", "--out", ranges, "--prompt", PROMPT)
    assert made.status == 0, made.err
    out = tmp_path / "out"
    recipe = ("--recipe", "nvfp4-full", "--calibration", ranges)
    assert call(capsys, "quantise", source, out, *recipe).status == 0
    assert (out / "tokenizer.json").exists()
    done = captured(capsys, out, tmp_path / "capture", "--backend", "transformers")
    assert done.status == 0, done.err
    assert checked(capsys, tmp_path / "capture", source)["verdict"] == "AGREES"
    # It is decoded again by the conversion that any model has.
    made = call(capsys, "convert", out, tmp_path / "bf16", "--to", "bf16", "--prove")
    assert made.status == 0, made.err


def test_ranges_of_experts_are_those_of_the_model_itself(capsys: Capsys, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  heavy

    source, ranges = write_checkpoint(tmp_path / "moe", "qwen3_moe"), tmp_path / "ranges"
    settled = ("--amax-only", "--out", ranges, "--prompt", "hello", "--json")
    made = call(capsys, "capture", source, *settled).document
    found = json.loads((ranges / "amax.json").read_text())["linears"]
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.bfloat16, experts_implementation="eager"
    )
    seen: dict[int, torch.Tensor] = {}
    linear = torch.nn.functional.linear

    def watched(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen[weight.data_ptr()] = x
        return linear(x, weight, *rest)

    tokens = Tokenizer.from_file(str(source / "tokenizer.json")).encode("hello").ids
    with torch.no_grad(), mock.patch.object(torch.nn.functional, "linear", watched):
        model(input_ids=torch.tensor([tokens]))
    reached = 0
    for number, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        for leaf, stack in (("gate_proj", experts.gate_up_proj), ("up_proj", experts.gate_up_proj),
                            ("down_proj", experts.down_proj)):  # fmt: skip
            for expert in range(len(stack)):
                name = f"model.layers.{number}.mlp.experts.{expert}.{leaf}"
                x = seen.get(stack[expert].data_ptr(), torch.zeros(0, 1))
                assert found[name]["tokens"] == len(x)
                if len(x):
                    reached += 1
                    assert found[name]["amax"] == pytest.approx(float(x.abs().max()), rel=0.02)
                else:
                    assert name in made["unreached"]
    assert 0 < reached < 48  # of 2 layers, 8 experts, 3 matrices


def test_experts_without_a_token_take_the_largest_range(capsys: Capsys, tmp_path: Path) -> None:
    source, ranges = write_checkpoint(tmp_path / "moe", "qwen3_moe"), tmp_path / "ranges"
    call(capsys, "capture", source, "--amax-only", "--out", ranges, "--prompt", "hello")
    records = json.loads((ranges / "amax.json").read_text())["linears"]
    out = tmp_path / "out"
    made = call(
        capsys, "quantise", source, out, "--recipe", "nvfp4-experts", "--calibration", ranges
    )
    assert made.status == 0, made.err
    report = json.loads((out / "conversion_report.json").read_text())
    missed = [name for name, record in records.items() if not record["tokens"]]
    assert report["flagged"]["unreached_experts"] == sorted(missed)
    largest = max(each["amax"] for name, each in records.items() if name.endswith("down_proj"))
    tensors = _tensors(out)
    for name in missed:
        if name.endswith("down_proj"):
            assert float(tensors[f"{name}.input_scale"]) == pytest.approx(largest / 2688)


def test_a_stack_has_the_largest_range_of_its_experts(capsys: Capsys, tmp_path: Path) -> None:
    source, ranges = write_checkpoint(tmp_path / "gpt_oss", "gpt_oss"), tmp_path / "ranges"
    call(capsys, "capture", source, "--amax-only", "--out", ranges, "--prompt", PROMPT)
    records = json.loads((ranges / "amax.json").read_text())["linears"]
    out = tmp_path / "out"
    made = call(
        capsys, "quantise", source, out, "--recipe", "nvfp4-experts", "--calibration", ranges
    )
    assert made.status == 0, made.err
    experts = [each["amax"] for name, each in records.items() if name.endswith("down_proj")
               and name.startswith("layers.1.")]  # fmt: skip
    found = _tensors(out)["model.layers.1.mlp.experts.down_proj_input_scale"]
    assert float(found) == pytest.approx(max(experts) / 2688)


def _granite(folder: Path) -> Path:
    transformers = import_module("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    config = transformers.GraniteMoeConfig(num_local_experts=4, **sizes, **heads)
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)
    return folder


def test_refusals_have_remedies_that_are_true(capsys: Capsys, tmp_path: Path) -> None:
    dense = write_checkpoint(tmp_path / "llama", "llama")
    out = tmp_path / "out"

    def refused(*words: object) -> str:
        made = call(capsys, *words)
        assert made.status == 2
        assert not out.exists()
        assert "into the folder of its shards" not in made.err
        return " ".join(made.err.split())

    text = refused("quantise", dense, out, "--recipe", "nvfp4-full")
    assert f"degarble capture {dense} --amax-only" in text
    assert "nvfp4-full or nvfp4-experts" in refused("quantise", dense, out, "--recipe", "official")
    assert "no linear" in refused("quantise", dense, out, "--recipe", "nvfp4-experts")
    assert "quantise --recipe nvfp4-full" in refused("convert", dense, out, "--to", "nvfp4")
    assert "degarble quantise" in refused("convert", dense, out, "--to", "fp8-block")
    mixture = write_checkpoint(tmp_path / "moe", "qwen3_moe")
    text = refused("quantise", mixture, out, "--recipe", "nvfp4-full")
    assert f"degarble capture {mixture} --amax-only" in text
    ranges = tmp_path / "ranges"
    made = call(capsys, "capture", mixture, "--amax-only", "--out", ranges, "--prompt", PROMPT)
    assert made.status == 0
    others = ("--recipe", "nvfp4-full", "--calibration", ranges)
    text = refused("quantise", dense, out, *others)
    assert "amax record of" in text
    assert "a linear of this llama" in text
    stacked = write_checkpoint(tmp_path / "gpt_oss", "gpt_oss")
    text = refused("quantise", stacked, out, "--recipe", "nvfp4-full")
    assert f"degarble capture {stacked} --amax-only" in text
    stacked = _granite(tmp_path / "granite")
    text = refused("quantise", stacked, out, "--recipe", "nvfp4-full")
    assert "one stack [experts, outputs, inputs] a layer" in text
    (tmp_path / "weights.yaml").write_text(_WEIGHTS)
    recipe = ("--recipe", tmp_path / "weights.yaml")
    assert call(capsys, "quantise", dense, tmp_path / "made", *recipe).status == 0
    text = refused("quantise", tmp_path / "made", out, *recipe)
    assert "--to bf16" in text
    next(dense.glob("*.safetensors")).unlink()
    assert "No such file" in refused("quantise", dense, out, *recipe)
