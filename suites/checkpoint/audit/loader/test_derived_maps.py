"""Loader maps of models that transformers describes: healthy ones are silent, faults are named."""

from __future__ import annotations

import json
import warnings
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.checkpoint.audit.loader.map_files import read_loader_map
from degarble.harness.checkpoint.audit.loader.proof import prove
from degarble.harness.checkpoint.audit.rules import Level
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.commands.audit.audit import derived_loader
from degarble.suites.campaigns.healthy_exports import (
    compressed_export,
    modelopt_export,
    saved_model,
)
from degarble.suites.commands.calls import call
from degarble.suites.commands.test_traced_families import QUICK
from degarble.suites.commands.traced_checkpoints import write_checkpoint
from degarble.suites.references.traced.traced_models import ARCHITECTURES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from degarble.harness.checkpoint.audit.loader.proof import LoaderProof

    Tensors = dict[str, torch.Tensor]

pytestmark = pytest.mark.needs("transformers")

_SLOW = pytest.mark.slow
_ENGINES = ("vllm", "transformers")
_NAMES = [
    pytest.param(name, marks=() if name in (*QUICK, "mixtral", "phi3") else _SLOW)
    for name in ARCHITECTURES
]


def _proof(folder: Path, chosen: str) -> LoaderProof:
    with Checkpoint.open(folder) as checkpoint:
        derive = partial(derived_loader, checkpoint)
        return prove(checkpoint, read_loader_map(chosen, checkpoint, derive))


def _alarms(proof: LoaderProof) -> set[tuple[str, str]]:
    return {
        (finding.rule, finding.tensor or finding.module or "")
        for finding in proof.findings
        if finding.level is not Level.NOTE
    }


@pytest.mark.parametrize("name", _NAMES)
def test_what_transformers_saves_is_read_whole(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path / name, name)
    for engine in _ENGINES:
        proof = _proof(folder, engine)
        assert not _alarms(proof)
        assert proof.counts["transfers"] == len(proof.entries)
        assert set(proof.outcomes.values()) == {"placed"}
    # transformers holds its own parameters, of which none is packed.
    assert not any("w13_" in name for held in proof.rank_parameters() for name in held.targets)


_EXPORTS = [
    ("modelopt", "qwen3-moe", "NVFP4_DEFAULT_CFG"),
    ("compressed", "qwen3-moe", "NVFP4"),
    ("modelopt", "llama-tied", "NVFP4_MLP_ONLY_CFG"),
    pytest.param("modelopt", "v3", "NVFP4_DEFAULT_CFG", marks=_SLOW),
    pytest.param("compressed", "mixtral", "NVFP4A16", marks=_SLOW),
    pytest.param("modelopt", "llama", "FP8_DEFAULT_CFG", marks=_SLOW),
    pytest.param("modelopt", "llama", "FP8_PER_CHANNEL_PER_TOKEN_CFG", marks=_SLOW),
    pytest.param("modelopt", "qwen3", "W4A16_NVFP4_CFG", marks=_SLOW),
    pytest.param("compressed", "v3", "NVFP4", marks=_SLOW),
]


def _exported(tool: str, model: str, scheme: str, folder: Path) -> Path:
    export = modelopt_export if tool == "modelopt" else compressed_export
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what ModelOpt imports
        return export(model, scheme, folder)[0]


@pytest.mark.needs("modelopt", "compressed_tensors")
@pytest.mark.parametrize(("tool", "model", "scheme"), _EXPORTS)
def test_exports_of_other_tools_are_read_whole(
    tmp_path: Path, tool: str, model: str, scheme: str
) -> None:
    folder = _exported(tool, model, scheme, tmp_path)
    for engine in _ENGINES:
        assert not _alarms(_proof(folder, engine))


def test_experts_are_divided_among_ranks(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "moe", "qwen3_moe")
    proof = _proof(folder, "vllm:ep=2")
    assert not _alarms(proof)
    stack = "model.layers.1.mlp.experts.w13_weight"
    sources = [[each.source for each in proof.fills(stack, rank)] for rank in (0, 1)]
    assert [len(each) for each in sources] == [8, 8]  # four experts, gate and up of each
    assert all(".experts.4." in name or ".experts.5." in name for name in sources[1][:4])
    for ranks, expected in (("ep=3", "divisor"), ("tp=2", "tp=1")):
        with pytest.raises(InvalidArgument, match=expected):
            _proof(folder, f"vllm:{ranks}")


# --------------------------------------------------------------------------------------------------
# Faults of a checkpoint


def _changed(folder: Path, change: Callable[[Tensors], object], **config: object) -> None:
    held: Tensors = {}
    for shard in sorted(folder.glob("*.safetensors")):
        held |= load_file(shard)
        shard.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    change(held)
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def _without(*words: str) -> Callable[[Tensors], object]:
    def change(held: Tensors) -> None:
        gone = [name for name in held if all(word in name for word in words)]
        assert gone
        for name in gone:
            del held[name]

    return change


_L = "model.layers.1."
_CHECKPOINT_FAULTS: dict[str, tuple[Callable[[Tensors], object], set[tuple[str, str]]]] = {
    "a norm is missing": (
        _without("layers.1.input_layernorm"), {("loader.unwritten", f"{_L}input_layernorm.weight")}
    ),
    "values of one slot are missing": (
        _without("layers.1.self_attn.k_proj"),
        {("loader.slot_unwritten", f"{_L}self_attn.qkv_proj.weight")},
    ),
    "an expert's matrix is missing": (
        _without("layers.1.mlp.experts.3.up_proj"),
        {("loader.slot_unwritten", f"{_L}mlp.experts.w13_weight")},
    ),
    "nobody reads a tensor": (
        lambda held: held.update({f"{_L}mlp.experts.3.up_proj.g_idx2": torch.ones(2)}),
        {("loader.unread_name", f"{_L}mlp.experts.3.up_proj.g_idx2")},
    ),
    "a matrix is too small": (
        lambda held: held.update({f"{_L}self_attn.o_proj.weight": torch.ones(64, 32).bfloat16()}),
        {("loader.shape", f"{_L}self_attn.o_proj.weight")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", _CHECKPOINT_FAULTS)
def test_a_fault_of_the_checkpoint_is_named(tmp_path: Path, fault: str) -> None:
    folder = write_checkpoint(tmp_path / "moe", "qwen3_moe")
    change, expected = _CHECKPOINT_FAULTS[fault]
    _changed(folder, change)
    assert _alarms(_proof(folder, "vllm")) == expected
    named = {rule for rule, _ in _alarms(_proof(folder, "transformers"))}
    slot = "loader.unwritten" if fault == "values of one slot are missing" else None
    assert named == {slot or rule for rule, _ in expected}


_SCALES: dict[str, tuple[str, Callable[[Tensors], object], set[tuple[str, str]]]] = {
    "one expert lost its global scale": (
        "modelopt", _without("layers.1.mlp.experts.2.down_proj.weight_scale_2"),
        {("loader.unwritten", f"{_L}mlp.experts.w2_weight_scale_2")},
    ),
    "one expert was not calibrated": (
        "modelopt", _without("layers.1.mlp.experts.2.gate_proj.input_scale"),
        {("loader.slot_unwritten", f"{_L}mlp.experts.w13_input_scale")},
    ),
    "no expert was calibrated": (
        "compressed", _without(".experts.", "input_global_scale"),
        {
            ("loader.unwritten", f"model.layers.{layer}.mlp.experts.{stack}_input_global_scale")
            for layer in (0, 1) for stack in ("w13", "w2")
        },
    ),
}  # fmt: skip


@pytest.mark.needs("modelopt", "compressed_tensors")
@pytest.mark.parametrize("fault", _SCALES)
def test_experts_that_lost_scales_are_named(tmp_path: Path, fault: str) -> None:
    tool, change, expected = _SCALES[fault]
    scheme = "NVFP4_DEFAULT_CFG" if tool == "modelopt" else "NVFP4"
    folder = _exported(tool, "qwen3-moe", scheme, tmp_path)
    _changed(folder, change)
    assert _alarms(_proof(folder, "vllm")) == expected


def test_tied_weights_are_stored_once_or_alike(tmp_path: Path) -> None:
    folder, _ = saved_model("llama-tied", "bf16", tmp_path)
    assert not _alarms(_proof(folder, "vllm"))
    table = "model.embed_tokens.weight"
    _changed(folder, lambda held: held.update({"lm_head.weight": held[table].clone()}))
    assert not _alarms(_proof(folder, "vllm"))
    _changed(folder, lambda held: held["lm_head.weight"].add_(1))
    assert _alarms(_proof(folder, "vllm")) == {("loader.tied_apart", "lm_head")}
    _changed(folder, lambda held: held.pop("lm_head.weight"), tie_word_embeddings=False)
    assert _alarms(_proof(folder, "transformers")) == {("loader.unwritten", "lm_head.weight")}


# --------------------------------------------------------------------------------------------------
# Faults of a loader: its own rules, in a file that begins from the derived map


def _stacks(*rules: tuple[str, str, int]) -> list[dict[str, object]]:
    return [{"match": match, "into": into, "slot": slot} for match, into, slot in rules]


_LOADER_FAULTS: dict[str, tuple[dict[str, object], str, int]] = {
    "gate and up": (
        {"stack": _stacks((r"\.experts\.(?P<expert>\d+)\.gate_proj\.", ".experts.w13_", 1),
                          (r"\.experts\.(?P<expert>\d+)\.up_proj\.", ".experts.w13_", 0))},
        "loader.swapped_partners", 32,
    ),
    "key and value": (
        {"stack": _stacks((r"\.k_proj\.", ".qkv_proj.", 2), (r"\.v_proj\.", ".qkv_proj.", 1))},
        "loader.swapped_partners", 4,
    ),
    "the norm of another layer": (
        {"rename": [{"match": r"layers\.1\.input_layernorm", "to": "layers.0.input_layernorm"}]},
        "loader.wrong_parameter", 1,
    ),
    "skipped": ({"skip": [r"\.o_proj\."]}, "loader.skipped", 2),
    "dropped": (
        {"rename": [{"match": r"\.q_norm\.", "to": ".query_norm."}]}, "loader.dropped", 2
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", _LOADER_FAULTS)
def test_a_fault_of_the_loader_is_named(tmp_path: Path, fault: str) -> None:
    folder = write_checkpoint(tmp_path / "moe", "qwen3_moe")
    rules, expected, count = _LOADER_FAULTS[fault]
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"base": "vllm", **rules}))
    found = [finding for finding in _proof(folder, str(path)).findings if finding.rule == expected]
    assert sum(finding.count for finding in found) == count


def test_the_command_proves_a_model_by_its_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "llama", "llama")
    for engine in _ENGINES:
        report = tmp_path / f"report-{engine}"
        made = call(capsys, "audit", folder, "--loader", engine, "--report", report, "--json")
        assert made.status == 0, made.err
        assert made.document["loader"]["map"] == f"{engine} for llama"
    _changed(folder, _without("layers.1.mlp.up_proj"))
    made = call(capsys, "audit", folder, "--loader", "vllm", "--json")
    assert made.status == 1
    told = {each["rule"] for each in made.document["findings"] if each["level"] != "note"}
    assert told == {"loader.slot_unwritten"}
    # What transformers does not know is refused by name.
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"no_such"'))
    made = call(capsys, "audit", folder, "--loader", "vllm")
    assert made.status == 2
    assert "no_such" in made.err
