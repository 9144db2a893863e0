"""Our classes against the record of vLLM's, where vLLM is not: every override still fits."""

from __future__ import annotations

import ast
import enum

import pytest

from degarble.harness.vllm import contract
from degarble.harness.vllm.contract import BOUND, Override

RECORD = contract.read_record()
LAYERS = "vllm.model_executor.layers"
V4 = "vllm.models.deepseek_v4"
CONFIG = f"{LAYERS}.quantization.base_config:QuantizationConfig"
LINEAR = f"{LAYERS}.linear:LinearMethodBase"
ATTENTION = f"{V4}.attention:DeepseekV4Attention"
BUILDER = "vllm.v1.attention.backend:AttentionMetadataBuilder"
# Our methods that vLLM calls, and the method that it believes to call.
OVERRIDES = [
    *(
        Override(f"config.py:DegarbleConfig.{name}", f"{CONFIG}.{name}")
        for name in (
            "get_name", "get_supported_act_dtypes", "get_min_capability", "get_config_filenames",
            "from_config", "get_quant_method", "override_quantization_method",
        )
    ),
    Override("linears.py:DegarbleLinear.create_weights", f"{LINEAR}.create_weights"),
    Override("linears.py:DegarbleLinear.apply", f"{LINEAR}.apply"),
    *(
        Override(
            f"linears.py:{name}.process_weights_after_loading",
            f"{LAYERS}.quantization.base_config:QuantizeMethodBase.process_weights_after_loading",
        )
        for name in ("Fp8Linear", "Nvfp4Linear")
    ),
    *(
        Override(f"attention.py:DegarbleAttention.{name}", f"{ATTENTION}.{name}")
        for name in ("_split_qkv_and_norm", "_fused_qnorm_rope_kv_insert", "_o_proj")
    ),
    *(
        Override(f"attention.py:{name}.get_cudagraph_support", f"{BUILDER}.get_cudagraph_support")
        for name in ("MetadataBuilder", "WindowMetadataBuilder")
    ),
    *(
        Override(
            f"attention.py:{name}.get_builder_cls",
            "vllm.v1.attention.backend:AttentionBackend.get_builder_cls",
        )
        for name in ("DegarbleBackend", "WindowBackend")
    ),
    *(
        Override(
            f"model.py:DegarbleDeepseekV4.{name}", f"{V4}.nvidia.model:DeepseekV4ForCausalLM.{name}"
        )
        for name in ("__init__", "load_weights")
    ),
    Override(
        "attention.py:DegarbleCompressor.forward",
        f"{V4}.compressor:DeepseekCompressor.forward",
    ),
    Override("attention.py:DegarbleIndexer.forward", f"{V4}.attention:DeepseekV4Indexer.forward"),
    *(
        Override(
            f"attention.py:IndexerBuilder.{name}",
            "vllm.v1.attention.backends.mla.indexer:DeepseekV32IndexerMetadataBuilder." + name,
        )
        for name in ("build", "get_cudagraph_support")
    ),
    Override(
        "model.py:DegarbleDecoderLayer.forward",
        f"{V4}.nvidia.model:DeepseekV4DecoderLayer.forward",
    ),
    Override(
        "model.py:DegarbleLogits._apply_head",
        f"{LAYERS}.logits_processor:LogitsProcessor._apply_head",
    ),
    Override(
        "linears.py:DegarbleGate.forward",
        f"{LAYERS}.fused_moe.router.gate_linear:GateLinear.forward",
    ),
    Override(
        "attention.py:DegarbleAttention._run_parallel_input_projections",
        f"{ATTENTION}._run_parallel_input_projections",
    ),
    Override("model.py:DegarbleModel.forward", f"{V4}.nvidia.model:DeepseekV4Model.forward"),
    Override(
        "experts.py:DegarbleRouter._compute_routing",
        f"{LAYERS}.fused_moe.router.fused_topk_bias_router:FusedTopKBiasRouter._compute_routing",
    ),
    *(
        Override(f"metrics.py:PartInfo.{name}", f"vllm.v1.metrics.loggers:StatLoggerBase.{name}")
        for name in ("__init__", "record", "log_engine_initialized")
    ),
]  # fmt: skip


def source_of(override: Override) -> str:
    return (BOUND / override.ours.partition(":")[0]).read_text(encoding="utf-8")


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda each: each.ours)
def test_vllm_can_call_ours_as_it_calls_its_own(override: Override) -> None:
    assert contract.misfits(override, source_of(override), RECORD) == []
    older = contract.read_record(contract.record_of("0.26"))
    if override.theirs in older:
        assert contract.misfits(override, source_of(override), older) == []


def test_what_026_lacks_its_adapter_replaces() -> None:
    older = contract.read_record(contract.record_of("0.26"))
    lacking = {name.rpartition(":")[2].partition(".")[0] for name in set(RECORD) - set(older)}
    assert lacking == {
        "DeepseekSparseSWAFlashMLABackend", "DeepseekSparseSWAFlashMLAMetadataBuilder",
        "DeepseekV4Attention", "DeepseekV4ForCausalLM",
    }  # fmt: skip
    assert set(contract.OF_SERIES["0.26"]) <= set(older)
    adapter = Override(
        "attention.py:DegarbleAttention026.forward",
        f"{V4}.attention:DeepseekV4Attention.forward",
    )
    assert contract.misfits(adapter, source_of(adapter), older) == []


def test_a_changed_record_is_detected() -> None:
    override = next(each for each in OVERRIDES if each.ours.endswith("get_quant_method"))
    theirs = RECORD[override.theirs]
    renamed = [[name.replace("prefix", "name"), *rest] for name, *rest in theirs["parameters"]]
    changed = RECORD | {override.theirs: theirs | {"parameters": renamed}}
    (first, second) = contract.misfits(override, source_of(override), changed)
    assert first == (
        f"config.py:DegarbleConfig.get_quant_method: does not take name as {override.theirs} does"
    )
    assert "needs prefix" in second
    longer = [*theirs["parameters"], ["device", "POSITIONAL_OR_KEYWORD", False]]
    changed = RECORD | {override.theirs: theirs | {"parameters": longer}}
    assert contract.misfits(override, source_of(override), changed)


def test_a_method_that_is_gone_is_detected() -> None:
    override = Override("config.py:DegarbleConfig.no_such", f"{CONFIG}.get_name")
    assert contract.misfits(override, source_of(override), RECORD) == [
        "config.py:DegarbleConfig.no_such: is not there"
    ]


def test_all_that_is_taken_from_vllm_is_on_record() -> None:
    taken = {
        name
        for path in BOUND.glob("*.py")
        for name in contract.taken_from_vllm(path.read_text(encoding="utf-8"))
    }
    assert len(taken) > 20
    assert sorted(taken - set(RECORD)) == []
    assert sorted(set(contract.relied()) - set(RECORD)) == []


def test_abstract_methods_are_all_ours_or_inherited() -> None:
    """What vLLM leaves to a quantisation config and to a logger, we have."""
    for base, file, name in (
        (CONFIG, "config.py", "DegarbleConfig"),
        ("vllm.v1.metrics.loggers:StatLoggerBase", "metrics.py", "PartInfo"),
        (LINEAR, "linears.py", "DegarbleLinear"),
    ):
        tree = ast.parse((BOUND / file).read_text(encoding="utf-8"))
        (ours,) = (each for each in tree.body if getattr(each, "name", "") == name)
        has = {each.name for each in ast.walk(ours) if isinstance(each, ast.FunctionDef)}
        assert set(RECORD[base]["abstract"]) <= has, name


def test_only_bound_modules_know_vllm() -> None:
    for path in (*BOUND.parent.glob("*.py"), *BOUND.glob("*.py")):
        taken = contract.taken_from_vllm(path.read_text(encoding="utf-8"))
        allowed = path.parent == BOUND and path.stem in ("upstream", "metrics")
        assert bool(taken) <= allowed, path.name


class Levels(enum.Enum):
    LOW = 0
    HIGH = 1


class Base:
    def build(self, rows: int, *, fast: bool = False) -> None: ...


def test_differences_name_the_object_and_what_changed() -> None:
    was = contract.described(Base.build)
    assert was == {
        "kind": "function",
        "parameters": [
            ["self", "POSITIONAL_OR_KEYWORD", False],
            ["rows", "POSITIONAL_OR_KEYWORD", False],
            ["fast", "KEYWORD_ONLY", True],
        ],
    }
    now = {"kind": "function", "parameters": was["parameters"][:2]}
    assert contract.differences("vllm.x:B.build", was, was) == []
    assert contract.differences("vllm.x:B.build", was, now) == [
        "vllm.x:B.build: parameters gone or changed: ['fast'], new: []"
    ]
    levels = contract.described(Levels)
    assert levels == {"kind": "enum", "members": {"LOW": 0, "HIGH": 1}}
    assert contract.described(Levels.LOW)["value"] == "Levels.LOW"
    assert contract.differences("vllm.x:L", levels, {"kind": "enum", "members": {"LOW": 0}})
