"""The quantisation method `degarble` of vLLM: choose each module's method by its stored format.

vLLM's own class for V4 reads formats from config keys and builds FP8 linears whatever the file
holds. Here formats come from the checkpoint's tensors, by the loader proof.
"""

from __future__ import annotations

from typing import Any

import torch

from degarble.harness.base.errors import InvalidArgument, LayoutMismatch, UnknownName
from degarble.harness.vllm import parts
from degarble.harness.vllm.bound import linears
from degarble.harness.vllm.bound.experts import ModelOptOfDegarble
from degarble.harness.vllm.bound.start import Start
from degarble.harness.vllm.bound.upstream import (
    DeepseekV4FP8Config,
    LinearBase,
    ModelRegistry,
    QuantizationConfig,
    RoutedExperts,
    UnquantizedFusedMoEMethod,
    UnquantizedLinearMethod,
    get_current_vllm_config,
    get_current_vllm_config_or_none,
    register_quantization_config,
)
from degarble.harness.vllm.installed import NAME
from degarble.harness.vllm.proof import EXPERTS_INSIDE

MODEL_TYPE = "deepseek_v4"
_WO_A = ".attn.wo_a"
# What vLLM builds for stored experts, if its config keys agree with the file.
_THEIR_EXPERTS = {
    parts.NVFP4: "ModelOptNvFp4FusedMoE",
    "MXFP4": "Mxfp4MoEMethod",
    **dict.fromkeys(parts.FP8, "Fp8MoEMethod"),
}


class DegarbleConfig(QuantizationConfig):
    """Formats as they are stored, kernels as the options say."""

    def __init__(self, raw: dict[str, Any] | None = None) -> None:
        """Without `raw`, as vLLM makes it where config.json names no quantisation: BF16."""
        super().__init__()
        self.raw = raw or {}
        self._start: Start | None = None
        self._theirs: Any = None

    @property
    def start(self) -> Start:
        """The start of this config, made when the first layer needs it."""
        if self._start is None:
            self._start = Start.from_config(get_current_vllm_config())
        return self._start

    @property
    def weight_block_size(self) -> list[int] | None:
        """Blocks of FP8 weights; vLLM's V4 pads shared experts to them.

        Trap: vLLM asks while it still makes its config, when nothing can be proven yet.
        """
        if self._start is None and get_current_vllm_config_or_none() is None:
            return self.raw.get("weight_block_size")
        formats = set(self.start.proven.formats.values())
        return [linears.FP8_BLOCK] * 2 if formats & set(parts.FP8) else None

    def get_name(self) -> str:
        """Name the method, as --quantization does."""
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """BF16 alone."""
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Hopper."""
        return 90

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: formats are read from tensors."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> DegarbleConfig:
        """Keep the checkpoint's own quantisation config for vLLM's side."""
        return cls(dict(config))

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Take a checkpoint that the user gave to us; another model is refused."""
        del hf_quant_cfg
        if user_quant != NAME:
            return None
        found = getattr(hf_config, "model_type", None)
        if found != MODEL_TYPE:
            raise InvalidArgument(
                "model_type", found, MODEL_TYPE, "degarble's plugin serves DeepSeek-V4 alone."
            )
        return NAME

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """Return the method of a module; None for what is not quantised by design."""
        if isinstance(layer, RoutedExperts):
            return self._experts(layer, prefix)
        if not isinstance(layer, LinearBase):
            return None
        stored = self._format(prefix)
        part = "o_proj" if prefix.endswith(_WO_A) else "linear"
        form = stored if part == "o_proj" else self.start.linear_format(stored)
        if self.start.kernel(prefix, part, form, _tactic(form)) is None:
            return self._their_linear(layer, prefix, stored)
        if form == parts.BF16:
            return linears.Bf16Linear(prefix)
        if form in parts.FP8:
            self._activations(prefix, form)
            return linears.Fp8Linear(prefix, powers_of_two=form == parts.FP8_E8M0)
        quantises = form == parts.NVFP4
        if quantises:
            self._activations(prefix, form)
        return linears.Nvfp4Linear(prefix, quantises=quantises)

    def _activations(self, prefix: str, form: str) -> None:
        """Note who quantises the activations; our NVFP4 product has no other side."""
        if self.start.kernel(prefix, "act_quant", form) is None and form == parts.NVFP4:
            raise InvalidArgument(
                "parts.act_quant", "vllm", "degarble in front of NVFP4 products",
                "Leave it out: vLLM's quantiser has other padding.",
            )  # fmt: skip

    def _format(self, prefix: str) -> str:
        module = prefix.removesuffix(EXPERTS_INSIDE)
        formats = self.start.proven.formats
        if module not in formats:
            raise UnknownName.among("module of vLLM", module, formats)
        return formats[module]

    def _experts(self, layer: Any, prefix: str) -> Any:
        stored = self._format(prefix)
        if self.start.kernel(prefix, "experts", stored, _tactic("experts")) is not None:
            return ModelOptOfDegarble(prefix, layer.moe_config)
        if stored == parts.BF16:
            return UnquantizedFusedMoEMethod(layer.moe_config)
        made = self._theirs_config().get_quant_method(layer, prefix)
        if type(made).__name__ != _THEIR_EXPERTS.get(stored):
            raise LayoutMismatch(
                f"experts {prefix}", type(made).__name__,
                f"a method of vLLM for {stored}, which is stored",
                "vLLM reads expert_dtype and moe_quant_algo of config.json: say there what is so.",
            )  # fmt: skip
        return made

    def _their_linear(self, layer: Any, prefix: str, stored: str) -> Any:
        """Return vLLM's own method of a format, where its V4 has one."""
        if stored == parts.BF16:
            return UnquantizedLinearMethod()
        if stored not in parts.FP8:
            raise InvalidArgument(
                f"parts.linear for {prefix}", "vllm", f"degarble: vLLM's V4 has no {stored} linear",
                "Leave it to degarble, or convert: degarble convert --to vllm.",
            )  # fmt: skip
        return self._theirs_config().get_quant_method(layer, prefix)

    def _theirs_config(self) -> Any:
        """Return vLLM's own config of V4, from the same keys."""
        if self._theirs is None:
            self._theirs = DeepseekV4FP8Config.from_config(
                {**self.raw, "quant_method": "deepseek_v4_fp8"}
            )
            self._theirs.packed_modules_mapping = self.packed_modules_mapping
        return self._theirs


def _tactic(form: str) -> str:
    """Return the table by which a kernel chooses its tiles: that depends on rows, call by call."""
    tables = {
        parts.BF16: "gemm/problem",
        parts.NVFP4: "gemm/problem",
        parts.NVFP4_A16: "gemm/w4a16_problem",
        **dict.fromkeys(parts.FP8, "gemm/problem"),
        "experts": "moe/problem",
    }
    return f"by rows: kernels/{tables[form]}.py TACTICS" if form in tables else ""


def register(architecture: str, model: str) -> None:
    """Register method and model with vLLM; a second time changes nothing."""
    register_quantization_config(NAME)(DegarbleConfig)
    ModelRegistry.register_model(architecture, model)
