"""Where an engine's source sends stored tensors: small sources of our own, read and never run."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from degarble.harness.base.errors import InvalidArgument, UnreadableFile
from degarble.harness.checkpoint.audit.loader.engine_sources import EngineSource
from degarble.harness.checkpoint.audit.loader.map_files import read_loader_map
from degarble.harness.checkpoint.audit.loader.proof import prove
from degarble.harness.checkpoint.audit.rules import Level
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.commands.audit.audit import PACKING_TABLE, derived_loader
from degarble.suites.campaigns.servers.vllm_maps import compared
from degarble.suites.commands.calls import call
from degarble.suites.commands.traced_checkpoints import write_checkpoint
from degarble.suites.references.traced.traced_models import ARCHITECTURES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from degarble.harness.checkpoint.audit.loader.proof import LoaderProof

pytestmark = pytest.mark.needs("transformers")

_LINEAR = """
import torch
from torch import nn
raise RuntimeError("nobody imports this")

class LinearBase(nn.Module):
    def __init__(self, a, b, bias=False, disable_tp=False, prefix=""): ...
class ReplicatedLinear(LinearBase): ...
class ColumnParallelLinear(LinearBase): ...
class MergedColumnParallelLinear(ColumnParallelLinear): ...
class QKVParallelLinear(ColumnParallelLinear):
    def __init__(self, hidden, head_size, total_num_heads, total_num_kv_heads=None, bias=False): ...
class RowParallelLinear(LinearBase): ...
class VocabParallelEmbedding(nn.Module): ...
class ParallelLMHead(VocabParallelEmbedding): ...
class RMSNorm(nn.Module):
    def __init__(self, size, eps=1e-6):
        self.weight = nn.Parameter(torch.ones(size))
def FusedMoE(num_experts, ckpt_names=("gate_proj", "down_proj", "up_proj"), **more): ...
"""
_UTILS = """
class WeightsMapper: ...
class AutoWeightsLoader: ...
def make_layers(count, layer_fn, prefix): ...
"""
_MODEL = """
from torch import nn
from ..layers.linear import *  # not followed: what a model needs is imported by name
from ..layers.linear import (
    FusedMoE, MergedColumnParallelLinear, ParallelLMHead, QKVParallelLinear, ReplicatedLinear,
    RMSNorm, RowParallelLinear, VocabParallelEmbedding,
)
from .utils import AutoWeightsLoader, WeightsMapper, make_layers

class Attention(nn.Module):
    def __init__(self, config):
        heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, config.head_dim, config.num_attention_heads, heads
        )
        self.o_proj = RowParallelLinear(1, 1)
        if config.QK_NORM:
            self.q_norm = RMSNorm(config.head_dim)
            self.k_norm = RMSNorm(config.head_dim)

class Dense(nn.Module):
    def __init__(self, config):
        self.gate_up_proj = MergedColumnParallelLinear(1, [1, 1])
        self.down_proj = RowParallelLinear(1, 1)

class Sparse(nn.Module):
    def __init__(self, config):
        self.gate = ReplicatedLinear(1, 1)
        self.experts = FusedMoE(config.num_experts)

class Layer(nn.Module):
    def __init__(self, config, number=0):
        self.self_attn = Attention(config)
        sparse = getattr(config, "num_experts", 0) > 0
        sparse = sparse and number not in config.mlp_only_layers
        self.mlp = Sparse(config) if sparse else Dense(config)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(1), RMSNorm(1)

class Decoder(nn.Module):
    hf_to_vllm_mapper = WeightsMapper(orig_to_new_stacked={
        ".q_proj": (".qkv_proj", "q"), ".k_proj": (".qkv_proj", "k"), ".v_proj": (".qkv_proj", "v"),
        ".mlp.gate_proj": (".mlp.gate_up_proj", GATE), ".mlp.up_proj": (".mlp.gate_up_proj", UP),
    })
    def __init__(self, config, layer_type=Layer):
        self.embed_tokens = VocabParallelEmbedding(1, 1)
        _, _, self.layers = make_layers(2, lambda prefix: layer_type(config), prefix="layers")
        self.NORM = RMSNorm(1)
    def load_weights(self, weights):
        return AutoWeightsLoader(self).load_weights(LOADED, mapper=self.hf_to_vllm_mapper)

class Base(nn.Module):
    def __init__(self, vllm_config):
        self.model = self._made(vllm_config.model_config.hf_config)
        self.lm_head = ParallelLMHead(1, 1)
    def _made(self, config):
        return Decoder(config)
    def load_weights(self, weights):
        return AutoWeightsLoader(self).load_weights(weights, LOADS)

class TinyForCausalLM(Base): ...
"""
_LOOP = """
    def load_weights(self, weights):
        stacked_params_mapping = [
            ("qkv_proj", "q_proj", "q"), ("qkv_proj", "k_proj", "k"), ("qkv_proj", "v_proj", "v"),
            ("gate_up_proj", "gate_proj", 0), ("gate_up_proj", "up_proj", 1),
        ]
        for name, tensor in weights:
            name = name.replace("final.", "norm.")
            self.take(name, tensor)
"""


def _source(folder: Path, **changes: str) -> Path:
    """Write a package like vLLM's with one model."""
    given = {
        "QK_NORM": "qk_norm",
        "GATE": "0",
        "UP": "1",
        "LOADED": "weights",
        "NORM": "norm",
        "LOADS": "",
    }
    model = _MODEL
    for word, text in (given | changes).items():
        model = model.replace(word, text)
    if "loop" in changes:
        begin = model.index("    def load_weights")
        model = model[:begin] + _LOOP.lstrip("\n") + model[model.index("\nclass Base") :]
    architectures = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
    table = dict.fromkeys(architectures, ("tiny", "TinyForCausalLM"))
    files = {
        "__init__": "raise RuntimeError", "_version": "__version__ = '0.0.1'",
        "model_executor/layers/linear": _LINEAR, "model_executor/models/utils": _UTILS,
        "model_executor/models/registry": f"_TEXT_GENERATION_MODELS = {table}",
        "model_executor/models/tiny": model,
    }  # fmt: skip
    for name, text in files.items():
        path = folder / "vllm" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def _proof(checkpoint: Path, source: Path, chosen: str = "vllm") -> LoaderProof:
    with Checkpoint.open(checkpoint) as held:
        derive = partial(derived_loader, held, vllm_source=source)
        return prove(held, read_loader_map(chosen, held, derive))


def _alarms(proof: LoaderProof) -> set[tuple[str, str]]:
    return {
        (each.rule, each.tensor or each.module or "")
        for each in proof.findings
        if each.level is not Level.NOTE
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a tiny model, written once."""
    written: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in written:
            written[name] = write_checkpoint(tmp_path_factory.mktemp(name) / name, name)
        return written[name]

    return folder


_NORMED = {"QK_NORM": "qk_norm or True"}


@pytest.mark.parametrize(
    ("model", "changes"),
    [("llama", {"QK_NORM": "rope_theta is None"}), ("qwen3", _NORMED), ("qwen3_moe", _NORMED)],
)
@pytest.mark.parametrize("loop", [False, True])
def test_a_source_and_the_table_agree_where_names_are_usual(
    tmp_path: Path,
    models: Callable[[str], Path],
    model: str,
    changes: dict[str, str],
    loop: bool,
) -> None:
    more = {"loop": ""} if loop else {"LOADS": "mapper=self.model.hf_to_vllm_mapper"}
    found = compared(models(model), _source(tmp_path, **changes, **more))
    assert found.origin.startswith("TinyForCausalLM of vLLM 0.0.1 (vllm/model_executor/models/tiny")
    assert (found.differ, found.undecided, found.alarms) == ((), (), ())
    assert found.alike > 20
    assert "vllm" not in sys.modules


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_cut_what_their_layers_cut(
    tmp_path: Path, models: Callable[[str], Path], tp: int
) -> None:
    source, folder = _source(tmp_path, **_NORMED), models("qwen3_moe")
    _even_vocabulary(folder)
    proof = _proof(folder, source, f"vllm:tp={tp}")
    assert not _alarms(proof)
    assert len(proof.ranks) == tp
    one = {name: t.shape for held in _proof(folder, source).rank_parameters()
           for name, t in held.targets.items()}  # fmt: skip
    prefix = "model.layers.0."
    config = json.loads((folder / "config.json").read_text())
    heads, keys, width = (
        config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    for held in proof.rank_parameters():
        shapes = {name: target.shape for name, target in held.targets.items()}
        rows = (heads // tp + 2 * max(1, keys // tp)) * width
        assert shapes[f"{prefix}self_attn.qkv_proj.weight"][0] == rows
        for name, axis in (
            ("self_attn.o_proj.weight", 1), ("mlp.experts.w13_weight", 1),
            ("mlp.experts.w2_weight", 2),
        ):  # fmt: skip
            assert shapes[prefix + name][axis] * tp == one[prefix + name][axis]
        assert shapes[f"{prefix}mlp.gate.weight"] == one[f"{prefix}mlp.gate.weight"]
        assert shapes["lm_head.weight"][0] * tp == one["lm_head.weight"][0]
    # Each key head lies on tp / heads neighbours.
    key = f"{prefix}self_attn.k_proj.weight"
    taken = {rank: transfer.source_box.ranges[0] for rank, _, transfer in proof.reaches(key)}
    assert taken == {
        rank: (width * (rank * keys // tp), width * (rank * keys // tp + max(1, keys // tp)))
        for rank in range(tp)
    }


def _even_vocabulary(folder: Path) -> None:
    """Make the vocabulary a multiple of 64, as vLLM pads it."""
    config = json.loads((folder / "config.json").read_text())
    if config["vocab_size"] % 64 == 0:
        return
    config["vocab_size"] = 128
    (folder / "config.json").write_text(json.dumps(config))
    for shard in folder.glob("*.safetensors"):
        held = load_file(shard)
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            if name in held:
                held[name] = torch.ones(128, held[name].shape[1], dtype=held[name].dtype)
        save_file(held, shard, {"format": "pt"})


_FAULTS: dict[str, tuple[dict[str, str], str, set[tuple[str, str]]]] = {
    "the class has no such norm": (
        {"QK_NORM": "vocab_size == 0"}, "qwen3",
        {("loader.dropped", f"model.layers.{at}.self_attn.{x}_norm.weight")
         for at in (0, 1) for x in "qk"},
    ),
    "another name": (
        {"NORM": "final", "QK_NORM": "rope_theta is None"}, "llama",
        {("loader.dropped", "model.norm.weight")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", _FAULTS)
def test_a_name_that_the_class_lacks_is_a_finding(
    tmp_path: Path, models: Callable[[str], Path], fault: str
) -> None:
    changes, model, expected = _FAULTS[fault]
    assert _alarms(_proof(models(model), _source(tmp_path, **changes))) == expected


def test_what_a_source_leaves_open_is_no_alarm(
    tmp_path: Path, models: Callable[[str], Path]
) -> None:
    changes = {"NORM": "final", "QK_NORM": "rope_theta is None"}
    proof = _proof(models("llama"), _source(tmp_path, **changes, LOADED="self.renamed(weights)"))
    assert not _alarms(proof)
    (note,) = [each for each in proof.findings if each.rule == "loader.undecided"]
    assert (note.tensor, note.level) == ("model.norm.weight", Level.NOTE)


def test_the_order_in_a_fused_parameter_is_that_of_the_source(
    tmp_path: Path, models: Callable[[str], Path]
) -> None:
    changes = {"QK_NORM": "rope_theta is None"}
    found = compared(models("llama"), _source(tmp_path, **changes, GATE="1", UP="0"))
    assert len(found.differ) == 4  # gate and up of two layers
    assert all("slot 1" in each and "slot 0" in each for each in found.differ)


def test_the_command_says_what_it_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, models: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    source = _source(tmp_path, QK_NORM="rope_theta is None")
    given = ("audit", models("llama"), "--loader", "vllm", "--only", "structure", "--json")
    for folder in (source, source / "vllm"):
        made = call(capsys, *given, "--vllm-source", folder)
        assert made.document["loader"]["origin"].startswith("TinyForCausalLM of vLLM 0.0.1"), (
            made.err
        )
    monkeypatch.setattr(EngineSource, "installed", classmethod(lambda _: None))
    assert PACKING_TABLE in call(capsys, *given).document["loader"]["origin"]
    for wrong in (models("llama"), tmp_path / "nothing"):
        assert call(capsys, *given, "--vllm-source", wrong).status == 2
    refused = call(capsys, "audit", models("llama"), "--vllm-source", source)
    assert (refused.status, "--loader vllm" in refused.err) == (2, True)


@pytest.mark.parametrize(
    ("changes", "ranks", "told"),
    [
        ({}, "tp=3", "divisor"),
        (
            {"config.head_dim, config.num_attention_heads, heads": "None, num(), num()"},
            "tp=2",
            "qkv",
        ),
        ({}, "pp=2", "pp=1"),
    ],
)
def test_ranks_that_are_not_plain_are_refused(
    tmp_path: Path, models: Callable[[str], Path], changes: dict[str, str], ranks: str, told: str
) -> None:
    source = _source(tmp_path, QK_NORM="rope_theta is None", **changes)
    with pytest.raises(InvalidArgument, match=told):
        _proof(models("llama"), source, f"vllm:{ranks}")


@pytest.mark.parametrize("text", ["class (", "\0", "x = " + "(" * 2000])
def test_a_source_that_cannot_be_parsed_is_refused(
    tmp_path: Path, models: Callable[[str], Path], text: str
) -> None:
    source = _source(tmp_path)
    (source / "vllm/model_executor/models/tiny.py").write_text(text)
    with pytest.raises(UnreadableFile, match="tiny"):
        _proof(models("llama"), source)


_HOSTILE = {
    "a class of itself": "class TinyForCausalLM(TinyForCausalLM):\n  def __init__(self):\n"
    "    self.model = TinyForCausalLM()\n",
    "endless calls": "def f(x): return f(f(x))\nclass TinyForCausalLM:\n  def __init__(self):\n"
    "    self.model = f(f)\n    super().__init__()\n",
    "names in a circle": "from .tiny import TinyForCausalLM\n",
    "numbers too large": "class TinyForCausalLM:\n  def __init__(self):\n"
    "    self.model = 9**9**9 if 'a' * 10**12 else 1 % 0\n",
}


@pytest.mark.parametrize("text", _HOSTILE)
def test_a_hostile_source_ends(tmp_path: Path, text: str) -> None:
    source = _source(tmp_path)
    (source / "vllm/model_executor/models/tiny.py").write_text(_HOSTILE[text])
    loader = EngineSource.at(source).loader("LlamaForCausalLM", {})
    assert loader is None or not loader.place("model.norm.weight").target


@pytest.mark.slow
@pytest.mark.parametrize("model", ARCHITECTURES)
def test_the_installed_vllm_loads_what_transformers_saves(tmp_path: Path, model: str) -> None:
    if EngineSource.installed() is None:
        pytest.skip(
            "needs vLLM's files; suites/campaigns/servers/vllm_maps.py takes a folder of them"
        )
    found: Any = compared(write_checkpoint(tmp_path / model, model), None)
    # vLLM builds the router's bias only where the config asks for it; transformers states nothing.
    known = {"minimax_m2": ("loader.dropped",)}
    assert not found.own_class or found.alarms == known.get(model, ())
