"""The structure audit: healthy checkpoints raise no error, every planted fault has its rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.model.config.config import V4Config
from degarble.harness.model.layouts import LAYOUTS
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

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.model.config.config import Config

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
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("healthy") / "c", V4, "nvfp4-experts")


@pytest.mark.parametrize(("config", "layout", "recipe"), HEALTHY)
def test_a_healthy_checkpoint_of_any_layout_raises_no_error(
    tmp_path: Path, config: Config, layout: str, recipe: str | None
) -> None:
    found = audited(write(tmp_path / "c", config, layout, recipe))
    assert errors(found) == set()
    assert told(found, "structure.unexpected") == []


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
        "scales.block",
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
def test_a_planted_fault_breaks_its_rule(tmp_path: Path, experts: Path, fault: str) -> None:
    change, rule = PLANTED[fault]
    found = told(audited(replant(experts, tmp_path / "c", change)), rule)
    assert found, fault
    assert all(each.level == "error" and each.remedy and each.message for each in found)


def test_the_shape_of_the_main_compressor_is_quoted(tmp_path: Path, experts: Path) -> None:
    change, rule = PLANTED["indexer from the main prefix"]
    (found,) = told(audited(replant(experts, tmp_path / "c", change)), rule)
    assert found.layer == 1
    assert found.tensor == f"{IDX}.wkv.weight"
    assert "main compressor's shape" in found.message
    assert found.evidence["shape"] == [2 * V4.head_dim, V4.hidden_size]
    assert found.evidence["expected"] == [2 * V4.index_head_dim, V4.hidden_size]


def test_equal_shapes_are_told_apart_by_their_bytes(tmp_path: Path) -> None:
    from dataclasses import replace  # noqa: PLC0415  only here

    alike = write(tmp_path / "a", replace(V4, head_dim=V4.index_head_dim), "bf16")
    assert errors(audited(alike)) == set()
    copied = put(f"{IDX}.wgate.weight", lambda t: t[f"{Q}.compressor.wgate.weight"].clone())
    (found,) = told(audited(replant(alike, tmp_path / "b", copied)), "structure.indexer_prefix")
    assert found.evidence["copied_from"] == f"{Q}.compressor.wgate.weight"


def test_constant_bytes_decide_nothing(tmp_path: Path, experts: Path) -> None:
    def change(tensors: Tensors) -> None:
        for name in (f"{IDX}.wkv.weight", f"{Q}.compressor.wkv.weight"):
            tensors[name] = torch.zeros_like(tensors[name])

    found = audited(replant(experts, tmp_path / "c", change))
    assert told(found, "structure.indexer_prefix") == []


def test_experts_are_told_together(tmp_path: Path, experts: Path) -> None:
    change = drop(*(f"layers.1.ffn.experts.{e}.w1.input_scale" for e in (0, 1, 3)))
    (found,) = told(audited(replant(experts, tmp_path / "c", change)), "scales.input_missing")
    assert (found.count, found.layer) == (3, 1)
    assert found.message.endswith("And 2 more like it, experts 0-1, 3.")


def test_what_nobody_expects_is_a_warning_and_a_buffer_is_a_note(
    tmp_path: Path, experts: Path
) -> None:
    def change(tensors: Tensors) -> None:
        tensors["layers.1.attn.wq_c.weight"] = torch.ones(4)
        tensors["layers.2.attn.wq_c.weight"] = torch.ones(4)
        tensors["layers.1.attn.rotary_emb.inv_freq"] = torch.ones(4)

    found = audited(replant(experts, tmp_path / "c", change))
    assert errors(found) == set()
    (unexpected,) = told(found, "structure.unexpected")
    assert (unexpected.level, unexpected.count) == ("warning", 2)
    (extra,) = told(found, "structure.known_extra")
    assert (extra.level, extra.tensor) == ("note", "layers.1.attn.rotary_emb.inv_freq")


def test_a_missing_drafter_is_a_note(tmp_path: Path, experts: Path) -> None:
    found = audited(replant(experts, tmp_path / "c", drop_prefix("mtp.0.")))
    assert errors(found) == set()
    (absent,) = told(found, "structure.drafter_absent")
    assert (absent.level, absent.layer) == ("note", V4.num_hidden_layers)


def test_narrowed_values_are_a_warning(tmp_path: Path, experts: Path) -> None:
    found = audited(replant(experts, tmp_path / "c", cast(f"{Q}.attn_sink", torch.bfloat16)))
    assert errors(found) == set()
    (narrowed,) = told(found, "structure.narrowed")
    assert narrowed.evidence == {"dtype": "BF16", "published": "F32"}


def test_input_scales_of_partners_may_differ_with_a_warning(tmp_path: Path, experts: Path) -> None:
    name = f"{E0}.w3.input_scale"
    found = audited(replant(experts, tmp_path / "c", put(name, lambda t: t[name] * 2)))
    assert errors(found) == set()
    (apart,) = told(found, "partners.input_scale")
    assert apart.evidence["ratio"] == pytest.approx(2)


def test_an_unknown_model_is_judged_module_by_module(tmp_path: Path, experts: Path) -> None:
    folder = replant(experts, tmp_path / "c", drop(f"{Q}.wq_b.scale"))
    reconfigure(folder, "config.json", lambda raw: raw.update(model_type="another"))
    found = audited(folder)
    assert [each.level for each in told(found, "structure.unknown_model")] == ["note"]
    (unread,) = told(found, "structure.unreadable_module")
    assert unread.module == f"{Q}.wq_b"


def test_a_folder_without_a_config_cannot_be_vouched_for(tmp_path: Path, experts: Path) -> None:
    folder = replant(experts, tmp_path / "c", lambda _: None)
    (folder / "config.json").unlink()
    found = audited(folder)
    assert errors(found) == {"structure.no_config"}
    assert told(found, "structure.unknown_model") == []
    # One file by itself promises nothing around it.
    alone = audited(next(folder.glob("*.safetensors")))
    assert errors(alone) == set()
    assert told(alone, "structure.unknown_model")
    (folder / "config.json").write_text("{")
    assert errors(audited(folder)) == {"files.unreadable_config"}


def test_names_of_no_known_spelling_are_an_error(tmp_path: Path, experts: Path) -> None:
    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[f"transformer.h.{name}"] = tensors.pop(name)

    assert "structure.unknown_spelling" in errors(audited(replant(experts, tmp_path / "c", change)))


def test_problems_of_the_files_are_findings(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", V4, "official")
    (folder / "pytorch_model.bin").write_bytes(b"never opened")
    shard = min(folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    found = audited(folder)
    (unreadable,) = told(found, "files.unreadable_shard")
    assert unreadable.evidence["file"] == shard.name
    assert [each.level for each in told(found, "files.pickled")] == ["warning"]
