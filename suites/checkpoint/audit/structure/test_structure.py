"""Audit the structure of whole checkpoints: names, counts, unreadable shards, content hashes."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.checkpoint.audit.structure.manifest_check import (
    bytes_hashed,
    judge_manifest,
    require_as_written,
)
from degarble.harness.checkpoint.audit.structure.structure import audit_structure
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.checkpoint.write.manifest import MANIFEST
from degarble.harness.families.deepseek_v4.tables import with_fused_compressors
from degarble.harness.model.config.config import V4Config
from degarble.harness.model.layouts import layout_named
from degarble.suites.checkpoint.audit.planted_numbers import Bytes
from degarble.suites.checkpoint.converting_cases import source
from degarble.suites.checkpoint.reading_cases import write_shards
from degarble.suites.checkpoint.structure_cases import (
    V4,
    V32,
    audited,
    errors,
    reconfigure,
    replant,
    told,
    write,
    zeros,
)
from degarble.suites.support.families import LAYOUTS
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.checkpoint.audit.findings import Finding
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.layouts import Layout


# --------------------------------------------------------------------------------------------------
# The structure audit: healthy checkpoints raise no error, every planted fault has its rule.

if TYPE_CHECKING:
    Tensors = dict[str, Tensor]

HEALTHY: list[tuple[Config, str, str | None]] = [
    *((V4 if family == V4Config.family else V32, name, None) for family, name in LAYOUTS),
    (V4, "vllm", "nvfp4-experts"),
    (V4, "vllm", "bf16"),
    (V32, "vllm", "bf16"),
]
Q, IDX = "layers.1.attn", "layers.1.attn.indexer.compressor"
E0 = "layers.1.ffn.experts.0"


@pytest.fixture(scope="module")
def structure_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("healthy") / "c", V4, "nvfp4-experts")


@pytest.mark.parametrize(("config", "layout", "recipe"), HEALTHY)
def test_a_healthy_checkpoint_of_any_layout_raises_no_error(
    tmp_path: Path, config: Config, layout: str, recipe: str | None
) -> None:
    findings = audited(write(tmp_path / "c", config, layout, recipe))
    assert errors(findings) == set()
    assert told(findings, "structure.unexpected") == []


def drop(*names: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return change


def drop_prefix(prefix: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        gone = [name for name in tensors if name.startswith(prefix)]
        assert gone, prefix
        for name in gone:
            del tensors[name]

    return change


def put(name: str, make: Callable[[Tensors], Tensor]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = make(tensors).contiguous()

    return change


def cast(name: str, dtype: torch.dtype) -> Callable[[Tensors], None]:
    return put(name, lambda tensors: tensors[name].float().to(dtype))


PLANTED = {
    "parameter": (drop(f"{Q}.q_norm.weight"), "structure.missing_parameter"),
    "expert": (drop_prefix(f"{E0}."), "structure.missing_expert"),
    "layer": (drop_prefix("layers.2."), "structure.missing_block"),
    "weight shape": (
        put(f"{Q}.q_norm.weight", lambda t: t[f"{Q}.q_norm.weight"][:-8]),
        "structure.shape",
    ),
    "table of floats": (cast("layers.0.ffn.gate.tid2eid", torch.float32), "structure.dtype"),
    "norm of codes": (cast(f"{Q}.q_norm.weight", torch.float8_e4m3fn), "structure.dtype"),
    "unknown codes": (cast(f"{Q}.wq_a.weight", torch.float8_e5m2), "structure.unreadable_module"),
    "quantised router": (
        cast("layers.1.ffn.gate.weight", torch.float8_e4m3fn),
        "structure.router_quantised",
    ),
    "lost block scales": (drop(f"{Q}.wq_b.scale"), "scales.missing"),
    "lost tensor scale": (drop(f"{E0}.w1.weight_scale_2"), "scales.missing"),
    "lost input scale": (drop(f"{E0}.w1.input_scale"), "scales.input_missing"),
    "scale beside values": (cast(f"{Q}.wq_a.weight", torch.bfloat16), "scales.left_over"),
    "1-D scale": (put(f"{Q}.wo_a.scale", lambda _: zeros((1,), torch.float32)), "scales.rank"),
    "E4M3 where UE8M0 is expected": (cast(f"{Q}.wq_b.scale", torch.float8_e4m3fn), "scales.dtype"),
    "bf16 tensor scale": (cast(f"{E0}.w2.weight_scale_2", torch.bfloat16), "scales.dtype"),
    "a scale a row": (
        put(f"{Q}.wo_b.scale", lambda t: zeros((t[f"{Q}.wo_b.weight"].shape[0], 1), torch.float32)),
        "config.contradicts",
    ),
    "scales from packed bytes": (
        put(f"{E0}.w1.weight_scale", lambda t: t[f"{E0}.w1.weight_scale"][:, ::2]),
        "scales.from_packed",
    ),
    "indexer from the main prefix": (
        put(f"{IDX}.wkv.weight", lambda t: t[f"{Q}.compressor.wkv.weight"].clone()),
        "structure.indexer_prefix",
    ),
    "first rows of the main compressor": (
        put(
            f"{IDX}.wkv.weight",
            lambda t: t[f"{Q}.compressor.wkv.weight"][: t[f"{IDX}.wkv.weight"].shape[0]].clone(),
        ),
        "structure.indexer_prefix",
    ),
    "gate and up apart": (
        put(f"{E0}.w3.weight_scale_2", lambda t: t[f"{E0}.w3.weight_scale_2"] * 1.5),
        "partners.tensor_scale",
    ),
    "input scale inside": (
        put(
            f"{E0}.w2.weight_scale_2",
            lambda t: t[f"{E0}.w2.weight_scale_2"] * t[f"{E0}.w2.input_scale"],
        ),
        "scales.input_scale_inside",
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_breaks_its_rule(
    tmp_path: Path, structure_experts: Path, fault: str
) -> None:
    change, rule = PLANTED[fault]
    findings = told(audited(replant(structure_experts, tmp_path / "c", change)), rule)
    assert findings, fault
    assert all(
        finding.level == "error" and finding.remedy and finding.message for finding in findings
    )


def test_the_shape_of_the_main_compressor_is_quoted(
    tmp_path: Path, structure_experts: Path
) -> None:
    change, rule = PLANTED["indexer from the main prefix"]
    (finding,) = told(audited(replant(structure_experts, tmp_path / "c", change)), rule)
    assert finding.layer == 1
    assert finding.tensor == f"{IDX}.wkv.weight"
    assert "main compressor's shape" in finding.message
    assert finding.evidence["shape"] == [2 * V4.head_dim, V4.hidden_size]
    assert finding.evidence["expected"] == [2 * V4.index_head_dim, V4.hidden_size]


def test_equal_shapes_are_distinguished_by_their_bytes(tmp_path: Path) -> None:
    from dataclasses import replace  # noqa: PLC0415  only here

    alike = write(tmp_path / "a", replace(V4, head_dim=V4.index_head_dim), "bf16")
    assert errors(audited(alike)) == set()
    copied = put(f"{IDX}.wgate.weight", lambda t: t[f"{Q}.compressor.wgate.weight"].clone())
    (finding,) = told(audited(replant(alike, tmp_path / "b", copied)), "structure.indexer_prefix")
    assert finding.evidence["copied_from"] == f"{Q}.compressor.wgate.weight"


def test_constant_bytes_decide_nothing(tmp_path: Path, structure_experts: Path) -> None:
    def change(tensors: Tensors) -> None:
        for name in (f"{IDX}.wkv.weight", f"{Q}.compressor.wkv.weight"):
            tensors[name] = torch.zeros_like(tensors[name])

    findings = audited(replant(structure_experts, tmp_path / "c", change))
    assert told(findings, "structure.indexer_prefix") == []


def test_experts_are_reported_together(tmp_path: Path, structure_experts: Path) -> None:
    change = drop(*(f"layers.1.ffn.experts.{e}.w1.input_scale" for e in (0, 1, 3)))
    (finding,) = told(
        audited(replant(structure_experts, tmp_path / "c", change)), "scales.input_missing"
    )
    assert (finding.count, finding.layer) == (3, 1)
    assert finding.message.endswith("And 2 more like it, experts 0-1, 3.")


def test_an_unexpected_tensor_is_a_warning_and_a_buffer_is_a_note(
    tmp_path: Path, structure_experts: Path
) -> None:
    def change(tensors: Tensors) -> None:
        tensors["layers.1.attn.wq_c.weight"] = torch.ones(4)
        tensors["layers.2.attn.wq_c.weight"] = torch.ones(4)
        tensors["layers.1.attn.rotary_emb.inv_freq"] = torch.ones(4)

    findings = audited(replant(structure_experts, tmp_path / "c", change))
    assert errors(findings) == set()
    (unexpected,) = told(findings, "structure.unexpected")
    assert (unexpected.level, unexpected.count) == ("warning", 2)
    (extra,) = told(findings, "structure.known_extra")
    assert (extra.level, extra.tensor) == ("note", "layers.1.attn.rotary_emb.inv_freq")


def test_a_missing_drafter_is_a_note(tmp_path: Path, structure_experts: Path) -> None:
    findings = audited(replant(structure_experts, tmp_path / "c", drop_prefix("mtp.0.")))
    assert errors(findings) == set()
    (absent,) = told(findings, "structure.drafter_absent")
    assert (absent.level, absent.layer) == ("note", V4.num_hidden_layers)


def test_narrowed_values_are_a_warning(tmp_path: Path, structure_experts: Path) -> None:
    findings = audited(
        replant(structure_experts, tmp_path / "c", cast(f"{Q}.attn_sink", torch.bfloat16))
    )
    assert errors(findings) == set()
    (narrowed,) = told(findings, "structure.narrowed")
    assert narrowed.evidence == {"dtype": "BF16", "published": "F32"}


def test_input_scales_of_partners_may_differ_with_a_warning(
    tmp_path: Path, structure_experts: Path
) -> None:
    name = f"{E0}.w3.input_scale"
    findings = audited(replant(structure_experts, tmp_path / "c", put(name, lambda t: t[name] * 2)))
    assert errors(findings) == set()
    (apart,) = told(findings, "partners.input_scale")
    assert apart.evidence["ratio"] == pytest.approx(2)


def test_an_unknown_model_is_judged_module_by_module(
    tmp_path: Path, structure_experts: Path
) -> None:
    folder = replant(structure_experts, tmp_path / "c", drop(f"{Q}.wq_b.scale"))
    reconfigure(folder, "config.json", lambda raw: raw.update(model_type="another"))
    findings = audited(folder)
    assert [finding.level for finding in told(findings, "structure.unknown_model")] == ["note"]
    (unread,) = told(findings, "structure.unreadable_module")
    assert unread.module == f"{Q}.wq_b"


def test_a_folder_without_a_config_cannot_be_vouched_for(
    tmp_path: Path, structure_experts: Path
) -> None:
    folder = replant(structure_experts, tmp_path / "c", lambda _: None)
    (folder / "config.json").unlink()
    findings = audited(folder)
    assert errors(findings) == {"structure.no_config"}
    assert told(findings, "structure.unknown_model") == []
    # One file by itself promises nothing around it.
    alone = audited(next(folder.glob("*.safetensors")))
    assert errors(alone) == set()
    assert told(alone, "structure.unknown_model")
    (folder / "config.json").write_text("{")
    assert errors(audited(folder)) == {"files.unreadable_config"}


def test_names_of_no_known_spelling_are_an_error(tmp_path: Path, structure_experts: Path) -> None:
    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[f"transformer.h.{name}"] = tensors.pop(name)

    assert "structure.unknown_spelling" in errors(
        audited(replant(structure_experts, tmp_path / "c", change))
    )


def test_problems_of_the_files_are_findings(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", V4, "official")
    (folder / "pytorch_model.bin").write_bytes(b"never opened")
    shard = min(folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    findings = audited(folder)
    (unreadable,) = told(findings, "files.unreadable_shard")
    assert unreadable.evidence["file"] == shard.name
    assert [finding.level for finding in told(findings, "files.pickled")] == ["warning"]


# --------------------------------------------------------------------------------------------------
# Names that no known loader reads are reported; those of every layout that one reads are not.

UNREAD = {"nvfp4-full": "names.unread_quantised", "compressed-tensors": "names.unread_quantised"}


def names_told(folder: Path) -> list[Finding]:
    with Checkpoint.survey(folder) as checkpoint:
        return [
            finding for finding in audit_structure(checkpoint) if finding.rule.startswith("names.")
        ]


@pytest.mark.parametrize(("family", "layout"), LAYOUTS)
def test_a_layout_without_a_reader_is_reported(family: str, layout: str, tmp_path: Path) -> None:
    config = V4 if family == V4Config.family else V32
    write_checkpoint(tmp_path / "c", Synthetic(config, layout, seed=5))
    wanted = UNREAD.get(layout) if config is V4 else None
    assert [finding.rule for finding in names_told(tmp_path / "c")] == ([wanted] if wanted else [])


def test_decoded_weights_under_unknown_names_are_an_error(tmp_path: Path) -> None:
    """What `convert --to bf16` wrote: transformers computes with experts at random."""
    layout = layout_named("nvfp4-full", V4).with_recipe("bf16")
    (finding,) = written_and_told(tmp_path / "c", layout)
    experts = 3 * V4.n_routed_experts * V4.num_hidden_layers
    assert (finding.rule, finding.level) == ("names.unread", "error")
    assert finding.evidence["modules"] == experts
    assert all(".mlp.experts." in name for name in finding.evidence["examples"])
    assert "transformers leaves them at random" in finding.message


def test_compressors_fused_under_unknown_names_are_reported(tmp_path: Path) -> None:
    fused = with_fused_compressors(layout_named("official", V4)).with_recipe("bf16")
    assert not written_and_told(tmp_path / "read", fused)
    other = with_fused_compressors(layout_named("transformers-saved", V4)).with_recipe("bf16")
    (finding,) = written_and_told(tmp_path / "unread", other)
    assert all(name.endswith(".fused_wkv_wgate") for name in finding.evidence["examples"])


def written_and_told(folder: Path, layout: Layout) -> list[Finding]:
    write_checkpoint(folder, Synthetic(V4, layout, seed=5))
    return names_told(folder)


# --------------------------------------------------------------------------------------------------
# Layers and experts that the config does not count are errors in any family; drafters are not.

CONFIG = {"model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": 2}


def _tensors(layers: int = 2, experts: int = 2) -> dict[str, Tensor]:
    names = [
        f"model.layers.{i}.experts.{e}.w1.weight" for i in range(layers) for e in range(experts)
    ]
    return {name: torch.ones(4, 4) for name in (*names, "lm_head.weight")}


def _rules(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any] = CONFIG) -> set[str]:
    write_shards(folder, [tensors])
    (folder / "config.json").write_text(json.dumps(config))
    with Checkpoint.survey(folder) as checkpoint:
        findings = audit_structure(checkpoint)
    return {finding.rule for finding in findings if finding.level == "error"}


@pytest.mark.parametrize(
    ("layers", "experts", "told"),
    [
        (2, 2, set()),
        (3, 2, {"structure.uncounted"}),
        (1, 2, {"structure.missing_block"}),
        (2, 3, {"structure.uncounted"}),
        (2, 1, {"structure.missing_expert"}),
    ],
)
def test_counts_of_an_unknown_family(
    tmp_path: Path, layers: int, experts: int, told: set[str]
) -> None:
    assert _rules(tmp_path, _tensors(layers, experts)) == told


def test_a_drafter_after_the_layers_is_no_uncounted_layer(tmp_path: Path) -> None:
    drafter = {f"model.layers.2.{name}.weight": torch.ones(4, 4) for name in ("eh_proj", "mlp.up")}
    assert not _rules(tmp_path, _tensors() | drafter)


def test_scales_of_one_format_have_one_name(tmp_path: Path) -> None:
    def module(layer: int, suffix: str) -> dict[str, Tensor]:
        name = f"model.layers.{layer}.up.weight"
        codes = torch.zeros(128, 128).to(torch.float8_e4m3fn)
        return {name: codes, f"{name}{suffix}": torch.ones(1, 1)}

    tensors = module(0, "_scale_inv") | module(1, "_scale_inv")
    config = {"model_type": "llama", "num_hidden_layers": 2}
    assert not _rules(tmp_path / "a", tensors, config)
    tensors |= module(2, "_scale")
    config["num_hidden_layers"] = 3
    assert _rules(tmp_path / "b", tensors, config) == {"scales.name"}


def test_an_nvfp4_scale_under_another_name_is_reported(tmp_path: Path) -> None:
    parts = {
        "weight": torch.ones(16, 16, dtype=torch.uint8),
        "weight_scale_inv": torch.ones(16, 2).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.ones(1),
    }
    tensors = {f"model.layers.0.up.{name}": tensor for name, tensor in parts.items()}
    config = {"model_type": "llama", "num_hidden_layers": 1}
    assert _rules(tmp_path, tensors, config) == {"structure.unreadable_module"}


# --------------------------------------------------------------------------------------------------
# A shard that is missing or cut off is one finding, whatever share of the model it held.

SHARDS = 6


def _removed(shard: Path) -> None:
    shard.unlink()


def _cut(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("layout", "share", "lose"),
    [
        ("official", (3,), _removed),
        ("official", (1, 2, 3, 4), _cut),
        ("official", (1, 2, 3, 4, 5), _removed),
        ("vllm", (3,), _cut),
        ("nvfp4-full", (0, 2, 3, 4), _removed),
    ],
)
def test_lost_shards_are_the_only_errors(
    tmp_path: Path, layout: str, share: tuple[int, ...], lose: Callable[[Path], None]
) -> None:
    write_checkpoint(tmp_path / "c", Synthetic(V4, layout), shards=SHARDS)
    shards = sorted((tmp_path / "c").glob("*.safetensors"))
    weight_map = json.loads((tmp_path / "c/model.safetensors.index.json").read_text())["weight_map"]
    for number in share:
        lose(shards[number])
    findings = audited(tmp_path / "c")
    assert errors(findings) == {"files.unreadable_shard"}, [
        f for f in findings if f.level == "error"
    ]
    lost = told(findings, "files.unreadable_shard")
    assert sum(finding.count for finding in lost) == len(share)
    there = sum(shard == shards[share[0]].name for shard in weight_map.values())
    assert f"The index places {there:,} tensors there" in lost[0].message


def test_without_an_index_a_missing_tensor_is_reported_by_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", Synthetic(V4, "official"), shards=SHARDS)
    (tmp_path / "c/model-00004-of-00006.safetensors").unlink()
    (tmp_path / "c/model.safetensors.index.json").unlink()
    assert "structure.missing_parameter" in errors(audited(tmp_path / "c"))


def test_another_fault_besides_a_lost_shard_is_still_reported(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", Synthetic(V4, "official"), shards=SHARDS)
    (tmp_path / "c/model-00004-of-00006.safetensors").unlink()
    config = json.loads((tmp_path / "c/config.json").read_text())
    (tmp_path / "c/config.json").write_text(json.dumps(config | {"vocab_size": 96}))
    assert errors(audited(tmp_path / "c")) == {"files.unreadable_shard", "structure.shape"}


# --------------------------------------------------------------------------------------------------
# A flipped bit under a manifest is reported with its tensor; a reference with one is refused.


def _judged(folder: Path) -> list[Finding] | None:
    done: list[int] = []
    with Checkpoint.survey(folder) as checkpoint:
        found = judge_manifest(checkpoint, 2, done.append)
        assert sum(done) == bytes_hashed(checkpoint)
    return found


def test_a_flipped_bit_is_reported_with_its_tensor(tmp_path: Path) -> None:
    shutil.copytree(source("nvfp4-experts"), tmp_path / "c")
    assert _judged(tmp_path / "c") == []
    name = "layers.1.ffn.experts.2.w1.weight"
    Bytes(tmp_path / "c")[name][3, 5] ^= 1
    found = _judged(tmp_path / "c")
    assert found is not None
    (finding,) = found
    assert (finding.rule, finding.tensor) == ("files.manifest", name)
    assert "1 tensor differs" in finding.message


def test_a_missing_and_a_changed_file_are_reported(tmp_path: Path) -> None:
    shutil.copytree(source("v32"), tmp_path / "c")
    (tmp_path / "c/config.json").write_text((tmp_path / "c/config.json").read_text() + " ")
    found = _judged(tmp_path / "c")
    assert found is not None
    assert [finding.evidence["file"] for finding in found] == ["config.json"]


def test_what_is_no_manifest_of_ours_is_left_alone(tmp_path: Path) -> None:
    shutil.copytree(source("v32"), tmp_path / "c")
    path = tmp_path / "c" / MANIFEST
    path.write_text(json.dumps({"files": ["of another tool"]}))
    assert _judged(tmp_path / "c") is None
    path.unlink()
    assert _judged(tmp_path / "c") is None
    path.write_text(json.dumps({"tool": {"name": "degarble"}}))
    found = _judged(tmp_path / "c")
    assert found is not None
    assert found[0].rule == "files.manifest"


def test_a_reference_that_is_not_what_was_written_is_refused(tmp_path: Path) -> None:
    shutil.copytree(source("nvfp4-experts"), tmp_path / "c")
    with Checkpoint.open(tmp_path / "c") as reference:
        done: list[int] = []
        assert require_as_written(reference, 2, done.append)
        assert sum(done) == bytes_hashed(reference)
    tokens = tmp_path / "c/tokenizer_config.json"
    tokens.write_text("{}")
    with Checkpoint.open(tmp_path / "c") as reference:
        assert require_as_written(reference, 2, done.append), "no comparison reads it"
    name = "layers.1.ffn.experts.2.w1.weight"
    Bytes(tmp_path / "c")[name][3, 5] ^= 1
    with Checkpoint.open(tmp_path / "c") as reference, pytest.raises(UnreadableFile) as told:
        require_as_written(reference, 2, done.append)
    error = told.value
    assert error.name.startswith("the reference's file ")
    assert ".safetensors" in error.name
    assert f"1 tensor differs, {name} first" in error.shown_value
    assert f"degarble audit {tmp_path / 'c'}" in error.remedy


@pytest.mark.parametrize("text", [None, "{}", '{"tool": {"name": "degarble"}}'])
def test_a_reference_without_hashes_that_can_be_read(tmp_path: Path, text: str | None) -> None:
    """None, or another tool's, has nothing to verify; a damaged one of ours is refused."""
    shutil.copytree(source("v32"), tmp_path / "c")
    manifest = tmp_path / "c" / MANIFEST
    manifest.unlink() if text is None else manifest.write_text(text)
    with Checkpoint.open(tmp_path / "c") as reference:
        if text and "degarble" in text:
            with pytest.raises(UnreadableFile, match="of the reference"):
                require_as_written(reference, 1, lambda _: None)
        else:
            assert not require_as_written(reference, 1, lambda _: None)
