"""Launch our kernels by name on one device, and record kernel and tactic of each launch.

`run(kernel, problem, **tensors)` calls the torch entry point of the kernel's module with tensors on
the GPU. A launch without rows is recorded as such and skipped. Kernel modules are imported at their
first launch: they need the CuTe DSL, but naming a backend must not. Entry points check the tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.backends.cutedsl import moe as cutedsl_moe
from degarble.harness.base.errors import MissingDevice
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.layouts import LINEAR
from degarble.harness.formats.number_formats import NVFP4, NibbleOrder, ScaleDirection
from degarble.harness.formats.quantise import QuantisedTensor
from degarble.harness.report.kernel_table import Launch
from degarble.kernels.attention import problem as sparse_attention_problem
from degarble.kernels.gemm import gemv_problem, w4a16_problem
from degarble.kernels.gemm import problem as gemm_problem
from degarble.kernels.runtime.modules import module_of
from degarble.kernels.runtime.targets import TARGETS, target_of_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.kernels.runtime.compiling import CompileSettings

    Given = Mapping[str, Tensor | None]
    Made = tuple[Tensor, ...]

NOTHING = "no rows, not launched"


class Kernels(ABC):
    """Kernels by name, on one device."""

    def __init__(self, target: str, device: torch.device) -> None:
        self.target, self.device = target, device
        self._noted: list[Launch] = []
        self.chain: Any = None  # the current call of routed experts: grouped.py
        self.summed: Any = None  # what the last sum of slots was made of: experts.py

    def run(self, kernel: str, problem: Any, **tensors: Tensor | None) -> Made:
        """Launch a kernel; return its outputs in the order of its entry point."""
        made = self._run(kernel, problem, tensors)
        idle = any(each.numel() == 0 for each in made)
        tactic = NOTHING if idle else tactic_of(kernel, problem, self.target)
        self._noted.append(Launch(kernel, tactic))
        return made

    def note(self, kernel: str, tactic: str) -> None:
        """Record what was computed in place of a launch."""
        self._noted.append(Launch(kernel, tactic))

    def taken(self) -> list[Launch]:
        """Return the launches since the last call of this method."""
        noted, self._noted = self._noted, []
        return noted

    @abstractmethod
    def _run(self, kernel: str, problem: Any, tensors: Given) -> Made: ...


@dataclass(frozen=True)
class Entry:
    """How to call a kernel's entry point with module, problem, settings and tensors."""

    call: Callable[[Any, Any, CompileSettings, Given], Any]
    tactic: Callable[[Any, str], str] = lambda _problem, _target: ""


def _gemm_tactic(problem: Any, target: str) -> str:
    chosen = gemm_problem.choose_form(problem, target).tactic
    cluster = chosen.cluster_rows * chosen.cluster_columns
    tile = f"{chosen.rows}x{chosen.columns}x{chosen.inner}"
    return tile + (f", cluster of {cluster}" if cluster > 1 else "")


def _w4a16_tactic(problem: Any, target: str) -> str:
    tactic = w4a16_problem.choose_tactic(problem)
    form = w4a16_problem.choose_form(problem, tactic, target)
    return f"{form.groups} groups of {form.parts} warps, {form.ranks} ranks"


def _gemm_nvfp4(module: Any, problem: Any, settings: CompileSettings, t: Given) -> Any:
    sides = (
        module.Nvfp4Operand(*(t[f"{side}{part}"] for part in ("", "_scales", "_decode_scale")))
        for side in "ab"
    )
    return module.gemm_nvfp4(*sides, problem, settings)


def _gemm_fp8(module: Any, problem: Any, settings: CompileSettings, t: Given) -> Any:
    given = module.Fp8Operands(t["a"], t["a_scales"], t["b"], t["b_scales"])
    return module.gemm_fp8_block(given, problem, settings)


def _w4a16(module: Any, problem: Any, settings: CompileSettings, t: Given) -> Any:
    weights = QuantisedTensor(
        codes=_there(t["codes"]),
        block_scale=_there(t["scales"]),
        tensor_scale=_there(t["decode_scale"]).reshape(()),
        format=NVFP4,
        dialect=CANONICAL,
        layout=LINEAR,
        direction=ScaleDirection.DECODE,
        nibble_order=NibbleOrder.LOW_EVEN,
        shape=(problem.outputs, problem.columns),
    )
    return module.gemm_w4a16(t["x"], weights, settings)


def _there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "the pairing hands over every operand"
    return tensor


def _quantise(module: Any, problem: Any, settings: CompileSettings, t: Given) -> Any:
    made = module.quantise_nvfp4(
        t["values"], t["decode_scale"], problem, settings, offsets_E=t.get("offsets")
    )
    return made.codes, made.scales, *([] if made.values is None else [made.values])


def _quantise_fp8(module: Any, problem: Any, settings: CompileSettings, t: Given) -> Any:
    turns = (t["turns"], t["positions"]) if problem.turned else None
    return tuple(module.quantise_fp8(t["values"], problem, settings, turns=turns))


def _rmsnorm(module: Any, problem: Any, settings: CompileSettings, t: Given) -> Any:
    return module.rmsnorm(t["values"], t["weight"], problem, settings).values


def _residual_norm(module: Any, problem: Any, settings: CompileSettings, t: Given) -> Any:
    return tuple(module.residual_norm(t["values"], t["residual"], t["weight"], problem, settings))


def _latent_query(module: Any, problem: Any, settings: CompileSettings, t: Given) -> Any:
    operands = module.QueryOperands(*(t[name] for name in module.QueryOperands._fields))
    return module.latent_query(operands, problem, settings)


def _kv_write(module: Any, problem: Any, settings: CompileSettings, t: Given) -> Any:
    names = ("values", "weight", "turns", "positions", "slots")
    operands = module.WriteOperands(*(t.get(name) for name in names))
    return module.kv_write(operands, t["cache"], problem, settings)


def _mhc(module: Any, problem: Any, settings: CompileSettings, t: Given) -> Any:
    made = module.mhc(module.MixOperands(**t), problem, settings)
    names = {"all": ("out", "post", "mix"), "coefficients": ("pre", "post", "mix")}
    return tuple(getattr(made, name) for name in names.get(problem.part, ("out",)))


def _operand(module: Any, problem: Any, settings: CompileSettings, t: Given) -> Any:
    turning = module.RopeOperands(t["turns"], t["positions"]) if "turns" in t else None
    norm = module.LayerNormOperands(t["weight"], t["bias"]) if "weight" in t else None
    made = module.indexer_operand(t["rows"], problem, settings, turning=turning, norm=norm)
    return made.values


def _scores(module: Any, problem: Any, settings: CompileSettings, t: Given) -> Any:
    return module.indexer_scores(module.ScoresOperands(**t), problem, settings)


def _attention(module: Any, problem: Any, settings: CompileSettings, t: Given) -> Any:
    window = module.Keys(t["window_slots"], t["window_cache"])
    entries = None
    if problem.entries is not None:
        entries = module.Keys(t["entries_slots"], t["entries_cache"])
    operands = module.AttentionOperands(t["q"], t["sink"], window, entries)
    return tuple(module.sparse_attention(operands, problem, settings))


def _pool(module: Any, problem: Any, settings: CompileSettings, t: Given) -> Any:
    carried = module.Carried(*(t[name] for name in module.Carried._fields))
    windows = module.Windows(*(t[name] for name in module.Windows._fields))
    return tuple(module.pool(carried, windows, problem, settings))


def _slots(module: Any, problem: Any, settings: CompileSettings, t: Given) -> Any:
    told = module.SlotOperands(t["positions"], t["owners"], t["table"], t.get("numbers"))
    made = module.slots(told, problem, settings)
    return tuple(each for each in made if each is not None)


def _grouped(module: Any, problem: Any, settings: CompileSettings, t: Given) -> Any:
    turns = (t["turns"], t["positions"]) if problem.turned else None
    return module.gemm_grouped(t["a"], t["b"], problem, settings, turns=turns)


def _grouped_fp8(module: Any, problem: Any, settings: CompileSettings, t: Given) -> Any:
    given = module.GroupedFp8Operands(
        **{name: t.get(name) for name in module.GroupedFp8Operands._fields}
    )
    return module.gemm_grouped_fp8(given, problem, settings)


def _expert_operands(module: Any, t: Given) -> Any:
    parts = ("codes", "scales", "decode_scale", "input_scale")
    both = ([t[f"{name}_{part}"] for part in parts] for name in ("w13", "w2"))
    return module.MoeWeights(*(module.ExpertWeights(*each) for each in both))


def _moe(module: Any, problem: Any, settings: CompileSettings, t: Given) -> Any:
    if isinstance(problem, cutedsl_moe.Step):
        return cutedsl_moe.launched(module, problem, settings, t)
    routing, weights = module.Routing(t["experts"], t["weights"]), _expert_operands(module, t)
    shared = t.get("shared")
    return module.moe_nvfp4(t["x"], routing, weights, problem, settings, shared_TD=shared)


def _moe_tactic(problem: Any, target: str) -> str:
    if isinstance(problem, cutedsl_moe.Step):
        return cutedsl_moe.tactic(problem, target)
    return f"{problem.experts} experts, weights {problem.weighting}"


def _shared_expert(_module: Any, problem: Any, settings: CompileSettings, t: Given) -> Any:
    """Call the shared expert's products, with routing tensors that are made once and cached."""
    moe = import_module("degarble.kernels.moe.sm90_moe_nvfp4")
    routing = moe.Routing(t["experts"], t["weights"])
    given = moe.MoeInputs(t["x"], routing, _expert_operands(moe, t))
    moe.require_given(problem, given)
    job = moe.job_of(problem, settings)
    workspace = moe.empty_workspace(job, _there(t["x"]).device)
    if problem.tokens:
        moe.products(job, given, workspace)
    return workspace.out[: problem.tokens]


ENTRIES: Mapping[str, Entry] = {
    "simt_embed": Entry(lambda m, p, s, t: m.embed(t["ids"], t["table"], p, s)),
    "simt_rmsnorm": Entry(_rmsnorm),
    "simt_residual_norm": Entry(
        _residual_norm, lambda p, _: "of the stored sum" if p.rounded else "of the float32 sum"
    ),
    "simt_scale": Entry(
        lambda m, p, s, t: m.scale(t["values"], p, s), lambda p, _: f"{p.source} to {p.out}"
    ),
    "simt_latent_query": Entry(_latent_query),
    "simt_gemv_bf16": Entry(
        lambda m, p, s, t: m.gemv_bf16(t["x"], t["weight"], p, s),
        lambda p, _: f"up to {gemv_problem.rows_of_form(p.rows)} rows, {p.out}",
    ),
    "sm90_gemm_bf16": Entry(lambda m, p, s, t: m.gemm_bf16(t["a"], t["b"], p, s), _gemm_tactic),
    "sm90_gemm_nvfp4": Entry(_gemm_nvfp4, _gemm_tactic),
    "sm90_gemm_fp8_block": Entry(_gemm_fp8, _gemm_tactic),
    "sm90_gemm_w4a16": Entry(_w4a16, _w4a16_tactic),
    "simt_quantise_nvfp4": Entry(
        _quantise, lambda p, _: f"{p.source}, {p.layout}{', by expert' if p.experts else ''}"
    ),
    "simt_quantise_fp8": Entry(
        _quantise_fp8, lambda p, _: f"{p.source}{', turned back' if p.turned else ''}, {p.scales}"
    ),
    "simt_qnorm_rope": Entry(
        lambda m, p, s, t: m.qnorm_rope(t["heads"], t["turns"], t["positions"], p, s)
    ),
    "simt_inverse_rope": Entry(
        lambda m, p, s, t: m.inverse_rope(t["heads"], t["turns"], t["positions"], p, s)
    ),
    "simt_kv_write": Entry(_kv_write, lambda p, _: f"{p.source} to {p.pages.entry}"),
    "simt_kv_read": Entry(
        lambda m, p, s, t: m.kv_read(t["indices"], t["cache"], p, s), lambda p, _: p.pages.entry
    ),
    "simt_router": Entry(
        lambda m, p, s, t: m.route(t["logits"], t["source"], p, s, id_T=t.get("ids")),
        lambda p, _: "by table" if p.vocabulary else p.scoring,
    ),
    "simt_mhc": Entry(_mhc, lambda p, _: str(p.part)),
    "simt_mhc_project": Entry(
        lambda m, p, s, t: m.mhc_project(t["streams"], t["split"], p, s), lambda p, _: str(p.kind)
    ),
    "simt_compressor": Entry(
        _pool, lambda p, _: f"windows of {p.ratio}{', one token each' if p.alone else ''}"
    ),
    "simt_indexer_operand": Entry(_operand, lambda p, _: f"turned {p.pairing}, {p.format}"),
    "sm90_indexer_scores": Entry(_scores, lambda p, _: f"{p.arithmetic}, {p.pages.operands}"),
    "simt_indexer_topk": Entry(lambda m, p, s, t: m.indexer_topk(t["scores"], p, s)),
    "sm90_sparse_attention": Entry(
        _attention, lambda p, _: f"{p.mode}, {sparse_attention_problem.choose_splits(p)} splits"
    ),
    "simt_slots": Entry(_slots, lambda p, _: str(p.kind)),
    "sm90_gemm_grouped": Entry(
        _grouped, lambda p, _: f"{p.groups} groups{', turned back' if p.turned else ''}, {p.out}"
    ),
    "sm90_gemm_grouped_fp8": Entry(
        _grouped_fp8,
        lambda p, _: f"{p.groups} groups{', turned back' if p.turned else ''}, {p.scales}",
    ),
    "sm90_moe_nvfp4": Entry(_moe, _moe_tactic),
    "sm90_shared_expert": Entry(_shared_expert, lambda _p, _: "nvfp4"),
    "simt_moe_rows": Entry(cutedsl_moe.launched, cutedsl_moe.tactic),
}


def tactic_of(kernel: str, problem: Any, target: str) -> str:
    """Return which tactic or form a problem gets."""
    return ENTRIES[kernel].tactic(problem, target)


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill memory allocated in this context with NaN, or the largest integer.

    An element that a kernel leaves unwritten then shows; otherwise it could be an earlier run's
    correct output.
    """
    before = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    # Trap: nothing but this mode fills memory, and its warnings are about operations of torch.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warned)


class KernelsOnGpu(Kernels):
    """The real kernels; `poison` fills what their entry points allocate."""

    def __init__(self, settings: CompileSettings, *, poison: bool = False) -> None:
        require_gpu()
        super().__init__(target_of_device().name, torch.device("cuda", 0))
        self._settings, self._memory = settings, poisoned if poison else nullcontext

    def _run(self, kernel: str, problem: Any, tensors: Given) -> Made:
        module = import_module(module_of(kernel))
        with self._memory():
            made = ENTRIES[kernel].call(module, problem, self._settings, tensors)
        return made if isinstance(made, tuple) else (made,)


def require_gpu() -> None:
    """Raise unless the machine has a GPU that kernels were written for."""
    if not torch.cuda.is_available():
        raise MissingDevice(
            "--backend", "cutedsl",
            f"an NVIDIA GPU of {' or '.join(TARGETS)} that torch can use",
            "Run it on a machine with one, or leave --backend out: references run on the CPU.",
        )  # fmt: skip
    target_of_device()
