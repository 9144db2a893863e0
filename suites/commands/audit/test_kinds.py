from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest

from degarble.harness.checkpoint.audit.findings import FindingLocation, Findings
from degarble.harness.checkpoint.audit.rules import UNEXPECTED
from degarble.harness.commands.audit.audit import KINDS, OTHER, WHOLE, kind_of, kind_of_name
from degarble.harness.commands.audit.audit import layer_of_name as layer
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.presets import small_v4, small_v32
from degarble.harness.model.tensors import tensors_of

if TYPE_CHECKING:
    from degarble.harness.model.config.config import Config

SPELLINGS = ("official", "bf16", "nvfp4-full", "compressed-tensors", "transformers", "vllm")


@pytest.mark.parametrize("config", [small_v4(), small_v32()], ids=lambda c: str(c.family))
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_tensor_of_every_spelling_has_a_kind(config: Config, spelling: str) -> None:
    names = [each.name for each in tensors_of(config, layout_named(spelling, config))]
    found = defaultdict(list)
    for name in names:
        found[kind_of_name(name)].append(re.sub(r"\d+", "#", name))
    assert OTHER not in found, set(found[OTHER])
    assert {"experts", "shared experts", "router", "indexer", "norms", "attention"} <= set(found)
    assert all("shared" not in name for name in found["experts"])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("layers.3.ffn.experts.17.w1.weight_scale_2", "experts"),
        ("model.layers.3.mlp.experts.gate_up_proj", "experts"),
        ("layers.3.ffn.shared_experts.w1.weight", "shared experts"),
        ("layers.3.ffn.gate.tid2eid", "router"),
        ("model.layers.3.mlp.gate.e_score_correction_bias", "router"),
        ("model.layers.3.mlp.gate_proj.weight", "dense MLP"),
        ("layers.3.attn.indexer.compressor.wkv.weight", "indexer"),
        ("layers.3.attn.compressor.norm.weight", "compressor"),
        ("hc_head_fn", "mixing"),
        ("layers.3.attn.q_norm.weight", "norms"),
        ("layers.3.attn.wo_a.weight", "attention"),
        ("mtp.0.e_proj.scale", "drafter input"),
        ("lm_head.weight", "embedding, head"),
        ("rotary.inv_freq", OTHER),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of_name(name) == kind
    assert kind in KINDS


def test_layers() -> None:
    assert layer("layers.3.attn.wkv.weight", 61) == 3
    assert layer("model.layers.61.eh_proj.weight", 61) == 61
    assert layer("mtp.0.e_proj.weight", 61) == 61
    assert layer("norm.weight", 61) is None


def test_a_finding_without_a_name_is_about_all() -> None:
    findings = Findings()
    findings.add(UNEXPECTED, FindingLocation(), "m", "r")
    findings.add(UNEXPECTED, FindingLocation(None, "layers.1.attn.wkv"), "m", "r")
    assert {kind_of(each) for each in findings.sorted()} == {WHOLE, "attention"}
