"""Options of the plugin, and the kernel that they choose for each part of a layer.

Options are the mapping `degarble` in vLLM's --additional-config. Decided before anything runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.base.errors import InvalidArgument, UnknownName

if TYPE_CHECKING:
    from collections.abc import Sequence


# --------------------------------------------------------------------------------------------------
# Options. `parts` chooses vLLM or degarble for a part of a layer where both have a kernel, or where
# degarble has none: nothing falls back by itself. Unknown keys, parts and values are errors.

KEY = "degarble"
OURS, THEIRS = "degarble", "vllm"
SIDES = (OURS, THEIRS)
# Parts of a layer that the plugin has a hook for; the table below says what runs each.
# `rows`: norms of query and latent rows, heads normed and turned, latent rows written to the cache;
# `o_proj`: heads turned back, and wo_a; `mhc`: four streams mixed, and the norm before a block;
# `act`: the shared expert's SwiGLU; `gate`: the router's logits; `projections`: the compressors'
# scores and the indexer's weights; `head`: logits, and the norm in front of them. vLLM fuses what
# is inside of each, so nobody shares one.
PARTS = (
    "linear", "act_quant", "experts", "gate", "router", "act", "rows", "attend", "o_proj", "mhc",
    "projections", "compressor", "indexer", "head",
)  # fmt: skip
ACTIVATIONS = ("quantised", "bf16")
_KEYS = ("parts", "nvfp4_activations", "ledger", "told")


@dataclass(frozen=True)
class PluginOptions:
    """Choice of who runs each part, and where records are written."""

    parts: Mapping[str, str] = field(default_factory=dict)
    nvfp4_activations: str = ACTIVATIONS[0]
    ledger: str | None = None
    told: str | None = None

    def side(self, part: str) -> str:
        """Return who runs a part; degarble by default."""
        return self.parts.get(part, OURS)


def read_options(additional_config: object) -> PluginOptions:
    """Read the plugin's part of vLLM's additional config."""
    if not isinstance(additional_config, Mapping):
        raise _refused_option("additional_config", additional_config, "a mapping")
    raw = additional_config.get(KEY, {})
    if not isinstance(raw, Mapping):
        raise _refused_option(KEY, raw, "a mapping")
    for key in raw:
        if key not in _KEYS:
            raise UnknownName.among(f"additional_config: {KEY}: key", key, _KEYS)
    activations = raw.get("nvfp4_activations", ACTIVATIONS[0])
    if activations not in ACTIVATIONS:
        raise UnknownName.among(f"{KEY}.nvfp4_activations", activations, ACTIVATIONS)
    return PluginOptions(
        _parts(raw.get("parts", {})), str(activations), _text(raw, "ledger"), _text(raw, "told")
    )


def _parts(raw: object) -> Mapping[str, str]:
    if not isinstance(raw, Mapping):
        raise _refused_option("parts", raw, 'a mapping of parts, as {"attend": "vllm"}')
    for part, side in raw.items():
        if part not in PARTS:
            raise UnknownName.among(f"{KEY}.parts", part, PARTS)
        if side not in SIDES:
            raise UnknownName.among(f"{KEY}.parts.{part}", side, SIDES)
    return dict(raw)


def _text(raw: Mapping[str, object], key: str) -> str | None:
    value = raw.get(key)
    if value is not None and not isinstance(value, str):
        raise _refused_option(key, value, "a path")
    return value


def _refused_option(name: str, value: object, expectation: str) -> InvalidArgument:
    return InvalidArgument(f"{KEY}: {name}", value, expectation, "See docs/vllm.md.")


# --------------------------------------------------------------------------------------------------
# The table lists kernels by part, format and GPU, with what was shown of each. The choice is
# degarble's kernel where there is one, vLLM's where the options name it, and otherwise an error:
# nothing falls back by itself. Parts without a hook are reported as vLLM's. The level of CUDA
# graphs is the lowest of all parts that run inside of attention. Needs neither vLLM nor a GPU.

SM90A, SM100A = "sm_90a", "sm_100a"  # as kernels/runtime/targets.py names them
TARGETS: Mapping[tuple[int, int], str] = {(9, 0): SM90A, (10, 0): SM100A}
# As harness/model/recipes.py names them.
NVFP4, BF16, FP8_E8M0, FP8_F32 = "NVFP4", "BF16", "FP8_128X128_UE8M0", "FP8_128X128_F32"
FP8 = (FP8_E8M0, FP8_F32)
NVFP4_A16 = "NVFP4 with BF16 activations"
FP8_CACHE = (
    "fp8_ds_mla"  # vLLM's name of kernels/primitives/kv_problem.py's fp8: 584 bytes an entry
)
# vLLM's AttentionCGSupport by name, the lowest first.
GRAPHS = ("NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS")
NO_HOOK = ("embed", "metadata")


class PartKernel(NamedTuple):
    """Kernels for a part: modules under kernels/, GPUs, where they were shown, graphs allowed."""

    module: str
    targets: tuple[str, ...]
    shown_on: tuple[str, ...]
    graphs: str = "ALWAYS"


BOTH = (SM90A, SM100A)
DECODING = "UNIFORM_SINGLE_TOKEN_DECODE"
# By part and format. `shown_on`: its suites ran on such a GPU; a form that only compiles is no
# entry. All were captured in CUDA graphs, by their suites or benches on an H200. Attention splits a
# batch by numbers of the host, so a recording serves decoding alone; the indexer's grid follows
# from the longest sequence that vLLM names, which is the whole context where it records.
KERNELS: Mapping[tuple[str, str], PartKernel] = {
    ("linear", BF16): PartKernel("sm90_gemm_bf16", (SM90A,), (SM90A,)),
    ("linear", FP8_E8M0): PartKernel("sm90_gemm_fp8_block", (SM90A,), (SM90A,)),
    ("linear", FP8_F32): PartKernel("sm90_gemm_fp8_block", (SM90A,), (SM90A,)),
    ("linear", NVFP4): PartKernel("sm90_gemm_nvfp4", (SM90A,), (SM90A,)),
    ("linear", NVFP4_A16): PartKernel("sm90_gemm_w4a16", BOTH, (SM90A,)),
    ("act_quant", NVFP4): PartKernel("simt_quantise_nvfp4", BOTH, (SM90A,)),
    ("experts", NVFP4): PartKernel("simt_moe_rows, sm90_moe_nvfp4", (SM90A,), (SM90A,)),
    ("attend", FP8_CACHE): PartKernel("sm90_sparse_attention", (SM90A,), (SM90A,), DECODING),
    ("rows", FP8_CACHE): PartKernel("simt_rmsnorm, simt_qnorm_rope, simt_kv_write", BOTH, (SM90A,)),
    ("router", "sqrtsoftplus"): PartKernel("simt_router", BOTH, (SM90A,)),
    ("act", BF16): PartKernel("simt_quantise_nvfp4", BOTH, (SM90A,)),
    ("gate", BF16): PartKernel("sm90_gemm_grouped", (SM90A,), (SM90A,)),
    ("head", BF16): PartKernel("simt_rmsnorm, sm90_gemm_grouped", (SM90A,), (SM90A,)),
    ("projections", BF16): PartKernel("sm90_gemm_grouped, sm90_gemm_bf16", (SM90A,), (SM90A,)),
    ("mhc", BF16): PartKernel("simt_mhc_project, simt_mhc, simt_rmsnorm", BOTH, (SM90A,)),
    ("indexer", FP8_CACHE): PartKernel(
        "simt_indexer_operand, sm90_indexer_scores, simt_indexer_topk", (SM90A,), (SM90A,), DECODING
    ),
    ("compressor", FP8_CACHE): PartKernel("simt_paged_pool, simt_kv_write", (SM90A,), (SM90A,)),
    ("o_proj", BF16): PartKernel("simt_inverse_rope, sm90_gemm_bf16", (SM90A,), (SM90A,)),
}

# On Blackwell instead: they compile, and none was run. The log says so for each.
BLACKWELL: Mapping[tuple[str, str], PartKernel] = {
    ("linear", BF16): PartKernel("sm100_gemm_bf16", (SM100A,), ()),
    ("linear", FP8_E8M0): PartKernel("sm100_gemm_fp8_block", (SM100A,), ()),
    ("linear", FP8_F32): PartKernel("sm100_gemm_fp8_block", (SM100A,), ()),
    ("linear", NVFP4): PartKernel("sm100_gemm_nvfp4", (SM100A,), ()),
    ("o_proj", BF16): PartKernel("simt_inverse_rope, sm100_gemm_bf16", (SM100A,), ()),
}


class RunningPart(NamedTuple):
    """Code that runs a part of a module: `by` degarble or vllm."""

    module: str
    part: str
    format: str
    by: str
    kernel: str
    tactic: str = ""

    def line(self) -> str:
        """Return the choice as one line of a log."""
        tactic = f" ({self.tactic})" if self.tactic else ""
        form = f" [{self.format}]" if self.format else ""
        return f"{self.module} {self.part}{form}: {self.by} {self.kernel}{tactic}"


def target_of(capability: tuple[int, int]) -> str:
    """Name the target of a GPU; others are refused."""
    if capability not in TARGETS:
        raise UnknownName(
            "compute capability",
            ".".join(map(str, capability)),
            "9.0 (H100, H200) or 10.0 (B200)",
            "degarble has no kernel for this GPU; start vLLM without the plugin.",
        )
    return TARGETS[capability]


def kernel_of(part: str, form: str, target: str, options: PluginOptions) -> PartKernel | None:
    """Return our kernel of a part; None: vLLM's own, as the options ask. Refuse what has none."""
    if part not in PARTS:
        raise UnknownName.among("part", part, PARTS)
    if options.side(part) == THEIRS:
        return None
    own = BLACKWELL if target == SM100A else {}
    kernel = own.get((part, form)) or KERNELS.get((part, form))
    if kernel is None:
        has = sorted(known for name, known in KERNELS if name == part)
        raise _refused_part(
            part, form or "any format", f"one for {' or '.join(has)}" if has else "none"
        )
    if target not in kernel.targets:
        runs_on = " and ".join(kernel.targets)
        raise _refused_part(
            part, f"{form or kernel.module} on {target}", f"{kernel.module} on {runs_on}"
        )
    return kernel


def graph_level(kernels: Sequence[PartKernel | None], theirs: str) -> str:
    """Return the lowest level of CUDA graphs; `theirs`: what vLLM declares for its own builder."""
    levels = [theirs, *(kernel.graphs for kernel in kernels if kernel is not None)]
    return min(levels, key=GRAPHS.index)


def unhooked(module: str) -> list[RunningPart]:
    """Report the parts without a hook as vLLM's own."""
    return [RunningPart(module, part, "", THEIRS, "its own", "no hook") for part in NO_HOOK]


def ours(module: str, part: str, form: str, kernel: PartKernel, tactic: str = "") -> RunningPart:
    """Report a part as run by our kernel, and whether that kernel ever ran before."""
    if not kernel.shown_on:
        tactic = f"{tactic}; never run" if tactic else "never run"
    return RunningPart(module, part, form, OURS, f"kernels: {kernel.module}", tactic)


def theirs(module: str, part: str, form: str = "") -> RunningPart:
    """Report a part as run by vLLM's own code, because the options choose it."""
    return RunningPart(module, part, form, THEIRS, "its own", "asked for")


def _refused_part(part: str, value: str, expectation: str) -> InvalidArgument:
    remedy = (
        f"To have vLLM's own code run it, say so:"
        f' --additional-config \'{{"degarble": {{"parts": {{"{part}": "{THEIRS}"}}}}}}\'.'
    )
    return InvalidArgument(f"kernel of part {part}", value, f"degarble has {expectation}", remedy)
