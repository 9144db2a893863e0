"""Export small random models with other tools, and audit each beside its source: no alarm is right.

Models come from transformers' configs, exports from transformers, ModelOpt, compressed-tensors,
torchao's formulas, and from our own recipes and scale rules. An error or a warning is an alarm.

    python -m degarble.suites.campaigns.healthy_exports --count 0 --jobs 8 --out out/campaigns

A count of 0 runs every case. It needs transformers, nvidia-modelopt, compressed-tensors, torchao;
ModelOpt's searches need a GPU with triton, and are `not made` without.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import warnings
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from degarble.harness.base.errors import Refused
from degarble.harness.checkpoint.audit.rules import Level
from degarble.harness.checkpoint.transform.nvfp4_scales import ScaleRule
from degarble.harness.checkpoint.transform.quantise.calibration import Amax, Calibration
from degarble.harness.checkpoint.transform.quantise.job import QuantiseJob, target_layout
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.commands.audit.audit import AuditRequest, audit
from degarble.harness.model.parameters import parameters
from degarble.harness.model.recipes import recipe_named
from degarble.suites.campaigns.runner import CaseResult, arguments, run_campaign
from degarble.suites.campaigns.tampers import TINY

if TYPE_CHECKING:
    from collections.abc import Callable

_SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_LATENT: dict[str, Any] = {
    **_SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_SIZES, "rope_theta": 500000.0}),
    "llama-tied": ("LlamaConfig", {**_SIZES, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", _SIZES),
    "qwen3": ("Qwen3Config", {**_SIZES, "head_dim": 32}),
    "qwen3-moe": ("Qwen3MoeConfig", {**_SIZES, **_EXPERTS, "num_experts": 4, "head_dim": 32}),
    "mixtral": ("MixtralConfig", {**_SIZES, "num_local_experts": 4}),
    "v3": ("DeepseekV3Config", _LATENT),
    "gpt-oss": ("GptOssConfig", {**_SIZES, "num_local_experts": 4, "head_dim": 32}),
    "llama4": ("Llama4TextConfig", {**_SIZES, "num_local_experts": 4, "head_dim": 32}),
}
MODELOPT = (
    "NVFP4_DEFAULT_CFG",
    "NVFP4_MLP_ONLY_CFG",
    "NVFP4_FOUR_OVER_SIX_CFG",
    "NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG",
    "NVFP4_AWQ_LITE_CFG",
    "NVFP4_AWQ_CLIP_CFG",
    "W4A16_NVFP4_CFG",
    "FP8_DEFAULT_CFG",
    "FP8_PER_CHANNEL_PER_TOKEN_CFG",
)
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}


def _model(name: str) -> Any:
    transformers = import_module("transformers")
    kind, sizes = MODELS[name]
    torch.manual_seed(7)
    config = getattr(transformers, kind)(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim == 1:  # norms of ones, and biases of zeros, are no trained ones
                value.add_(0.1 * torch.randn_like(value))
    return model.eval()


def saved_model(name: str, dtype: str, folder: Path) -> tuple[Path, Path]:
    """Save a model as transformers does, and its source."""
    model = _model(name)
    model.save_pretrained(folder / "source")
    model.to(_DTYPES[dtype]).save_pretrained(folder / "made", max_shard_size="300KB")
    return folder / "made", folder / "source"


def modelopt_export(name: str, config: str, folder: Path) -> tuple[Path, Path]:
    """Quantise and export a model as ModelOpt does."""
    quantiser = import_module("modelopt.torch.quantization")
    export = import_module("modelopt.torch.export")
    model = _model(name)
    model.save_pretrained(folder / "source")
    tokens = torch.randint(0, 256, (8, 64), generator=torch.Generator().manual_seed(3))
    quantiser.quantize(model, getattr(quantiser, config), lambda made: made(tokens))
    export.export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=str(folder / "made"))
    return folder / "made", folder / "source"


def compressed_export(name: str, preset: str, folder: Path) -> tuple[Path, Path]:
    """Write what llm-compressor's recipes leave: each linear by the package's own compressor."""
    model = _model(name)
    model.save_pretrained(folder / "source")
    model.save_pretrained(folder / "made")
    compress_folder(folder / "made", preset)
    return folder / "made", folder / "source"


def compress_folder(folder: Path, preset: str, group_size: int | None = None) -> None:
    """Replace the linears of a checkpoint of one file by a preset of compressed-tensors."""
    schemes = import_module("compressed_tensors.quantization.quant_scheme")
    formats = import_module("compressed_tensors.compressors.format")
    scheme = schemes.preset_name_to_scheme(preset, ["Linear"])
    if group_size is not None:
        scheme.weights.group_size = group_size
    stored = formats.infer_module_format(torch.nn.Linear, scheme).value
    (file,) = folder.glob("*.safetensors")
    state = load_file(file)
    linears = {
        key
        for key, value in state.items()
        if value.ndim == 2
        and not any(word in key for word in ("embed", "lm_head", ".gate.", "norm", "bias"))
        and not value.shape[1] % (scheme.weights.group_size or 16)
    }
    made = {key: value for key, value in state.items() if key not in linears}
    for key in linears:
        module = key.removesuffix(".weight")
        partners = [state[other] for other in _fused_with(key) if other in state]
        packed = _packed(state[key], partners, scheme, stored)
        made |= {f"{module}.{part}": tensor for part, tensor in packed.items()}
    save_file(made, file, {"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    gates = sorted({key.removesuffix(".weight") for key in state if ".gate.weight" in key})
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": stored,
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        "ignore": ["lm_head", *gates],
        "quantization_status": "compressed",
    }
    path.write_text(json.dumps(config))


def _fused_with(key: str) -> list[str]:
    """Return the linears that engines fuse with one, itself among them: they share a scale."""
    for parts in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        for part in parts:
            if f".{part}." in key:
                return [key.replace(part, other) for other in parts]
    return [key]


def _packed(
    value: torch.Tensor, partners: list[torch.Tensor], scheme: Any, stored: str
) -> dict[str, torch.Tensor]:
    formulas = import_module("compressed_tensors.quantization.utils")
    registry = import_module("compressed_tensors.compressors.base").BaseCompressor
    weights = scheme.weights
    state = {"weight": value.clone()}
    if stored == "nvfp4-pack-quantized":
        extremes = torch.stack([torch.stack(torch.aminmax(each)) for each in partners])
        state["weight_global_scale"] = formulas.generate_gparam(extremes.min(), extremes.max())
        if scheme.input_activations is not None:
            state["input_global_scale"] = torch.tensor([400.0])
    rows, columns = weights.block_structure or (1, weights.group_size or value.shape[1])
    padding = (0, -value.shape[1] % columns, 0, -len(value) % rows)
    padded = torch.nn.functional.pad(value, padding)
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    state["weight_scale"], state["weight_zero_point"] = formulas.calculate_qparams(
        blocks.amin((1, 3)), blocks.amax((1, 3)), weights,
        global_scale=state.get("weight_global_scale"),
    )  # fmt: skip
    made: dict[str, torch.Tensor] = registry.get_value_from_registry(stored).compress(state, scheme)
    return {key: tensor.contiguous() for key, tensor in made.items()}


def _torchao(name: str, folder: Path) -> tuple[Path, Path]:
    """Write ModelOpt's names with codes and scales by torchao's formula."""
    quantise = import_module("torchao.prototype.mx_formats.nvfp4_tensor").nvfp4_quantize
    model = _model(name)
    model.save_pretrained(folder / "source")
    model.save_pretrained(folder / "made")
    (file,) = (folder / "made").glob("*.safetensors")
    made: dict[str, torch.Tensor] = {}
    for key, value in load_file(file).items():
        if "_proj.weight" not in key:
            made[key] = value
            continue
        scale = value.float().abs().amax() / (6 * 448)
        scales, codes = quantise(value, 16, scale)
        module = key.removesuffix(".weight")
        made[key] = codes.view(torch.uint8).reshape(len(value), -1)
        made[f"{module}.weight_scale"] = scales.reshape(len(value), -1)
        made[f"{module}.weight_scale_2"] = scale
    save_file(made, file, {"format": "pt"})
    stated = {"quant_algo": "W4A16_NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    (folder / "made/hf_quant_config.json").write_text(json.dumps({"quantization": stated}))
    return folder / "made", folder / "source"


def _own(family: str, recipe: str, rule: str, folder: Path) -> tuple[Path, Path]:
    source = TINY / family
    with Checkpoint.open(source) as checkpoint:
        config = checkpoint.model
    assert config is not None, "the small models have configs"
    linears = [parameter.name for parameter in parameters(config) if parameter.kind == "linear"]
    amax = {name: Amax(1.0 + 3.0 * (i * 0.61803398875 % 1.0), 9) for i, name in enumerate(linears)}
    layout = target_layout(config, recipe_named(recipe, config))
    job = QuantiseJob(source, layout, ScaleRule(rule), calibration=Calibration.from_records(amax))
    job.run(folder / "made")
    return folder / "made", source


CASES: dict[str, Callable[[Path], tuple[Path, Path]]] = {
    **{f"transformers {n} {d}": partial(saved_model, n, d) for n in MODELS for d in _DTYPES},
    **{
        f"modelopt {n} {c}": partial(modelopt_export, n, c)
        for n in ("llama", "qwen3")
        for c in MODELOPT
    },
    **{
        f"modelopt {n} NVFP4": partial(modelopt_export, n, MODELOPT[0])
        for n in MODELS
        if n != "llama"
    },
    **{
        f"compressed-tensors {n} {p}": partial(compressed_export, n, p)
        for n in MODELS
        for p in ("NVFP4", "NVFP4A16")
    },
    **{f"torchao {n}": partial(_torchao, n) for n in ("llama", "qwen2", "qwen3")},
    **{
        f"own {family} {recipe} {rule}": partial(_own, family, recipe, rule)
        for family in ("v4", "v32")
        for recipe in ("nvfp4-full", "nvfp4-experts", "official")
        for rule in ("amax", "mse", "four-over-six")
    },
}


def run_case(seed: int) -> CaseResult:
    """Export one model in one way, and audit it alone and beside its source."""
    name, make = list(CASES.items())[seed % len(CASES)]
    kind = name.split(" ", maxsplit=1)[0]
    folder = Path(tempfile.mkdtemp(prefix="degarble-export-"))
    try:
        warnings.simplefilter("ignore")
        try:
            made, source = make(folder)
        except Exception as error:  # noqa: BLE001  another tool's; it is no alarm of ours
            return CaseResult(seed, kind, "not made", f"{name}: {type(error).__name__}: {error}")
        try:
            findings = audit(AuditRequest(made, against=source)).findings
        except Refused as error:
            return CaseResult(seed, kind, "refused", f"{name}: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    alarms = [finding for finding in findings if finding.level is not Level.NOTE]
    detail = "; ".join(
        f"{finding.level} {finding.rule}: {finding.message[:200]}" for finding in alarms[:5]
    )
    return CaseResult(
        seed, kind, "alarm" if alarms else "ok", f"{name}: {detail}" if alarms else name
    )


def main() -> int:
    """Run the campaign."""
    parser = arguments(__doc__ or "", count=0)
    parser.add_argument("--only", default="", help="run exports whose name contains this")
    asked = parser.parse_args()
    names = list(CASES)
    chosen = [i for i in range(asked.count or len(names)) if asked.only in names[i]]
    return run_campaign("healthy_exports", run_case, asked, seeds=chosen, wanted=("ok", "not made"))


if __name__ == "__main__":
    sys.exit(main())
