"""Record every object of vLLM that the plugin relies on, and compare the record with what is there.

RELIED lists each object that the plugin derives from, calls or is called through. It is observed as
abstract methods of a class, parameters of a function, members of an enum, or a plain value. There
is one record for each vLLM series. Two comparisons: the installed vLLM with its record
(make vllm-test), and our overrides with the records (everywhere, from syntax, without vLLM).

`python -m degarble.harness.vllm.contract` rewrites the record from the installed vLLM.
"""

from __future__ import annotations

import ast
import enum
import inspect
import json
import sys
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.base.errors import DegarbleError, UnknownName
from degarble.harness.vllm.installed import require_vllm, series_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

RECORD = Path(__file__).with_name("contract_0_33.json")
RECORD_026 = Path(__file__).with_name("contract_0_26.json")
BOUND = Path(__file__).with_name("bound")

_V4 = "vllm.models.deepseek_v4"
_LAYERS = "vllm.model_executor.layers"
_BACKEND = "vllm.v1.attention.backend"

# Classes whose abstract methods and hooks count, with the methods that we override or call.
CLASSES: Mapping[str, tuple[str, ...]] = {
    f"{_BACKEND}:AttentionBackend": ("get_name", "get_impl_cls", "get_builder_cls"),
    f"{_BACKEND}:AttentionMetadataBuilder": ("__init__", "build", "get_cudagraph_support"),
    f"{_V4}.attention:DeepseekV4Attention": (
        "__init__",
        "forward",
        "forward_mqa",
        "get_padded_num_q_heads",
        "get_kv_cache_spec",
        "_o_proj",
        "_split_qkv_and_norm",
        "_fused_qnorm_rope_kv_insert",
    ),
    f"{_V4}.attention:DeepseekV4Indexer": ("forward",),
    f"{_V4}.attention:DeepseekV4IndexerCache": ("get_attn_backend",),
    f"{_V4}.compressor:DeepseekCompressor": ("forward",),
    "vllm.v1.attention.backends.mla.indexer:DeepseekV32IndexerMetadataBuilder": (
        "build",
        "get_cudagraph_support",
    ),
    f"{_V4}.nvidia.model:DeepseekV4DecoderLayer": ("forward",),
    f"{_V4}.nvidia.flashmla:DeepseekV4FlashMLAAttention": ("__init__", "forward_mqa", "_o_proj"),
    f"{_V4}.sparse_mla:DeepseekV4FlashMLABackend": (
        "get_name",
        "get_builder_cls",
        "get_supported_kernel_block_sizes",
        "supports_compute_capability",
    ),
    f"{_V4}.sparse_mla:DeepseekV4FlashMLAMetadataBuilder": ("__init__", "build"),
    f"{_V4}.nvidia.flashmla:DeepseekSparseSWAFlashMLABackend": ("get_name", "get_builder_cls"),
    f"{_V4}.nvidia.flashmla:DeepseekSparseSWAFlashMLAMetadataBuilder": ("__init__", "build"),
    "vllm.v1.attention.backends.mla.sparse_swa:DeepseekV4SWACache": (
        "get_kv_cache_spec",
        "get_attn_backend",
    ),
    f"{_V4}.nvidia.model:DeepseekV4ForCausalLM": ("__init__", "load_weights"),
    f"{_V4}.nvidia.model:DeepseekV4Model": (
        "__init__",
        "forward",
        "load_weights",
        "get_expert_mapping",
    ),
    f"{_LAYERS}.fused_moe.router.fused_topk_bias_router:FusedTopKBiasRouter": ("_compute_routing",),
    f"{_LAYERS}.activation:SiluAndMulWithClamp": ("forward_cuda",),
    f"{_LAYERS}.fused_moe.router.gate_linear:GateLinear": ("forward",),
    f"{_LAYERS}.logits_processor:LogitsProcessor": ("_apply_head",),
    f"{_LAYERS}.layernorm:RMSNorm": ("__init__",),
    f"{_V4}.quant_config:DeepseekV4FP8Config": ("get_quant_method", "from_config"),
    f"{_LAYERS}.quantization.base_config:QuantizationConfig": (
        "get_name",
        "get_supported_act_dtypes",
        "get_min_capability",
        "get_config_filenames",
        "from_config",
        "get_quant_method",
        "override_quantization_method",
        "apply_vllm_mapper",
        "maybe_update_config",
    ),
    f"{_LAYERS}.linear:LinearMethodBase": ("create_weights", "apply"),
    f"{_LAYERS}.quantization.base_config:QuantizeMethodBase": ("process_weights_after_loading",),
    f"{_LAYERS}.linear:UnquantizedLinearMethod": ("__init__", "create_weights", "apply"),
    f"{_LAYERS}.fused_moe.fused_moe_method_base:FusedMoEMethodBase": (
        "__init__",
        "create_weights",
        "get_fused_moe_quant_config",
        "apply",
        "uses_weight_scale_2_pattern",
    ),
    f"{_LAYERS}.fused_moe.routed_experts:RoutedExperts": ("weight_loader", "forward_modular"),
    "vllm.model_executor.parameter:ModelWeightParameter": ("__init__", "load_merged_column_weight"),
    "vllm.model_executor.parameter:PerTensorScaleParameter": ("load_merged_column_weight",),
    "vllm.model_executor.parameter:BlockQuantScaleParameter": ("load_merged_column_weight",),
    "vllm.v1.metrics.loggers:StatLoggerBase": ("__init__", "record", "log_engine_initialized"),
}
FUNCTIONS: tuple[str, ...] = (
    f"{_LAYERS}.quantization:register_quantization_config",
    f"{_LAYERS}.quantization:get_quantization_config",
    f"{_LAYERS}.quantization.utils.fp8_utils:create_fp8_weight_parameter",
    f"{_LAYERS}.quantization.utils.fp8_utils:create_fp8_scale_parameter",
    f"{_LAYERS}.quantization.utils.fp8_utils:validate_fp8_block_shape",
    f"{_LAYERS}.quantization.utils.fp8_utils:per_token_group_quant_fp8",
    f"{_V4}.nvidia.model:_select_dsv4_attn_cls",
    f"{_V4}.nvidia.model:_make_deepseek_v4_weights_mapper",
    f"{_V4}.attention:_resolve_dsv4_kv_cache_dtype",
    "vllm.forward_context:get_forward_context",
    "vllm.config:get_current_vllm_config",
    "vllm.distributed:get_tensor_model_parallel_rank",
    "vllm.plugins:load_general_plugins",
    "vllm.plugins:load_plugins_by_group",
    "vllm.model_executor.models.registry:_ModelRegistry.register_model",
)
# Plain values, enums, records: what a key is called, which levels there are, what a batch tells.
VALUES: tuple[str, ...] = (
    f"{_BACKEND}:AttentionCGSupport",
    "vllm.v1.attention.backends.mla.sparse_swa:DeepseekSparseSWAMetadata",
    f"{_V4}.sparse_mla:DeepseekV4FlashMLAMetadata",
    f"{_V4}.compressor:CompressorMetadata",
    "vllm.v1.attention.backends.mla.indexer:DeepseekV32IndexerMetadata",
    "vllm.plugins:DEFAULT_PLUGINS_GROUP",
    "vllm.plugins:STAT_LOGGER_PLUGINS_GROUP",
    f"{_V4}.nvidia.model:DeepseekV4ForCausalLM.packed_modules_mapping",
    f"{_V4}.sparse_mla:DeepseekV4FlashMLABackend.supported_kv_cache_dtypes",
    f"{_V4}.nvidia.flashmla:DeepseekSparseSWAFlashMLAMetadataBuilder._cudagraph_support",
    f"{_V4}.sparse_mla:DeepseekV4FlashMLAMetadataBuilder._cudagraph_support",
    f"{_V4}.nvidia.flashmla:DeepseekV4FlashMLAAttention.use_fp8_ds_mla_layout",
)
# What the adapters of one series alone use.
OF_SERIES: Mapping[str, tuple[str, ...]] = {
    "0.26": (
        f"{_V4}.attention:DeepseekV4Attention.attn_gemm_parallel_execute",
        f"{_V4}.attention:DeepseekV4Attention.attention_impl",
    ),
    "0.33": (
        f"{_V4}.attention:DeepseekV4Attention._run_parallel_input_projections",
        f"{_V4}.attention:DeepseekV4Attention._fused_wqa_wkv_gemm",
    ),
}


class Override(NamedTuple):
    """A method of ours in bound/ and what calls it knows of it."""

    ours: str  # file:Class.method
    theirs: str


def relied(series: str = "0.33") -> Iterator[str]:
    """Yield every object that the record of a series speaks of."""
    yield from OF_SERIES.get(series, ())
    for name, methods in CLASSES.items():
        yield name
        yield from (f"{name}.{method}" for method in methods)
    yield from FUNCTIONS
    yield from VALUES
    for path in sorted(BOUND.glob("*.py")):
        yield from taken_from_vllm(path.read_text(encoding="utf-8"))


def observe(name: str) -> dict[str, Any]:
    """Describe an object of the installed vLLM."""
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = (
                inspect.getattr_static(found, part)
                if inspect.isclass(found)
                else getattr(found, part)
            )
    except (ImportError, AttributeError) as error:
        raise UnknownName(
            "object of vLLM", name, "one that vLLM has", f"It has none: {error}."
        ) from error
    return described(found)


def described(found: Any) -> dict[str, Any]:
    """Describe an object: what of it would break us if it changed."""
    if inspect.isclass(found) and issubclass(found, enum.Enum):
        return {"kind": "enum", "members": {each.name: each.value for each in found}}
    if is_dataclass(found) and inspect.isclass(found):
        return {"kind": "dataclass", "fields": [field.name for field in fields(found)]}
    if inspect.isclass(found):
        return {"kind": "class", "abstract": sorted(getattr(found, "__abstractmethods__", ()))}
    if isinstance(found, (staticmethod, classmethod)):
        return {"kind": type(found).__name__, "parameters": _parameters(found.__func__)}
    if inspect.isfunction(found):
        return {"kind": "function", "parameters": _parameters(found)}
    if isinstance(found, enum.Enum):
        return {"kind": "value", "value": f"{type(found).__name__}.{found.name}"}
    if isinstance(found, (str, int, list, dict)):
        return {"kind": "value", "value": found}
    return {"kind": "object"}


def _parameters(function: Any) -> list[list[Any]]:
    signature = inspect.signature(function)
    return [
        [parameter.name, parameter.kind.name, parameter.default is not inspect.Parameter.empty]
        for parameter in signature.parameters.values()
    ]


def read_record(path: Path = RECORD) -> dict[str, dict[str, Any]]:
    """Read what is on record, by name of the object."""
    made: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["objects"]
    return made


def differences(name: str, recorded: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """List how an object of vLLM differs from its record."""
    told = []
    for key in sorted({*recorded, *found}):
        was, now = recorded.get(key), found.get(key)
        if was == now:
            continue
        if key == "parameters" and was is not None and now is not None:
            gone = [each[0] for each in was if each not in now]
            new = [each[0] for each in now if each not in was]
            told.append(f"{name}: parameters gone or changed: {gone}, new: {new}")
        else:
            told.append(f"{name}: {key} was {was}, is {now}")
    return told


def misfits(override: Override, source: str, record: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """List why vLLM could not call an override of ours, by syntax and record."""
    method = _method(ast.parse(source), override.ours.rpartition(":")[2])
    if method is None:
        return [f"{override.ours}: is not there"]
    if override.theirs not in record:
        return [f"{override.ours}: {override.theirs} is not on record"]
    theirs = record[override.theirs]["parameters"]
    given = method.args
    positional = [each.arg for each in (*given.posonlyargs, *given.args)]
    keywords = {
        kwonlyarg.arg: default
        for kwonlyarg, default in zip(given.kwonlyargs, given.kw_defaults)  # noqa: B905
    }
    told = []
    for place, (name, kind, _) in enumerate(theirs):
        if kind == "VAR_POSITIONAL":
            fits = given.vararg is not None
        elif kind == "VAR_KEYWORD":
            fits = given.kwarg is not None
        elif kind == "KEYWORD_ONLY":
            fits = name in keywords or name in positional or given.kwarg is not None
        else:
            fits = positional[place : place + 1] == [name] or given.vararg is not None
        if not fits:
            told.append(f"{override.ours}: does not take {name} as {override.theirs} does")
    known = {name for name, _, _ in theirs}
    plain = positional[: len(positional) - len(given.defaults)]
    needed = [*plain, *(name for name, default in keywords.items() if default is None)]
    told += [
        f"{override.ours}: needs {name}, which {override.theirs} is not given"
        for name in needed
        if name not in known and given.vararg is None
    ]
    return told


def _method(tree: ast.Module, path: str) -> ast.FunctionDef | None:
    name, _, method = path.partition(".")
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and each.name == method:
                    return each
    return None


def taken_from_vllm(source: str) -> set[str]:
    """Name what a module imports from vLLM, as module:name."""
    return {
        f"{node.module}:{alias.name}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    }


def record_of(series: str) -> Path:
    """Name the record of a series; 0.26's lacks what that vLLM has not, behind its own adapter."""
    return RECORD_026 if series == "0.26" else RECORD


def write_record(version: str, path: Path = RECORD) -> None:
    """Write the record from the installed vLLM."""
    objects = {}
    for name in sorted(set(relied("0.33" if path == RECORD else "0.26"))):
        try:
            objects[name] = observe(name)
        except UnknownName:
            if path == RECORD:
                raise
    lines = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in objects.items()
    )
    path.write_text(
        f'{{"vllm": {json.dumps(version)}, "objects": {{\n{lines}\n}}}}\n', encoding="utf-8"
    )


def main() -> int:
    """Write the record of the vLLM that is installed; status 2 where that is refused."""
    try:
        found = require_vllm()
        write_record(found, record_of(series_of(found)))
    except DegarbleError as error:
        print(f"REFUSED: {error}", file=sys.stderr)  # noqa: T201  a command's own line
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
