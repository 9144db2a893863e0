"""Load our kernels by name, launch them, and hold what one call of a component needs.

Nothing is compiled before the first launch; a component without a kernel raises NoKernelError.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from degarble.harness.base.errors import InvalidArgument, MissingDevice
from degarble.harness.inference.weights import HeldWeight
from degarble.harness.report.kernel_table import Launch
from degarble.kernels.attention import problem as sparse_attention_problem
from degarble.kernels.gemm import gemv_problem, w4a16_problem, w4a16_wgmma_problem
from degarble.kernels.gemm import problem as gemm_problem
from degarble.kernels.moe.problem import AFTER_W2, BEFORE_W2
from degarble.kernels.runtime.modules import kernel_named
from degarble.kernels.runtime.targets import TARGETS, target_of_device

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from degarble.harness.formats.weight import Weight
    from degarble.harness.model.components import Component
    from degarble.kernels.runtime.compiling import CompileSettings
    from degarble.references.facts import ModelFacts


# --------------------------------------------------------------------------------------------------
# What a kernel's adaptor gets: the component before a run, its tensors during one, its weights.
#
# The kernel is chosen by a ComponentPart alone, before anything runs. NoKernelError gives the
# reason why the reference computes a part.

T = TypeVar("T")
ALIGNMENT = 32  # bytes, the most that a kernel demands of an address


class NoKernelError(Exception):
    """No kernel computes this component as configured; the text is the reason."""


@dataclass(frozen=True)
class ComponentPart:
    """A component as kernel choice needs it; weights by their names within the block."""

    component: Component
    facts: ModelFacts
    formats: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]  # in which a plain weight is stored
    target: str

    @property
    def config(self) -> Any:
        """Return the model's config."""
        return self.facts.config

    @property
    def name(self) -> str:
        """Return the name of the only weight."""
        (name,) = self.shapes
        return name

    def format_of(self, name: str) -> str:
        """Return the format of a weight, BF16 if the recipe does not quantise it."""
        return self.formats.get(name, "BF16")


@dataclass(frozen=True)
class ComponentCallWork:
    """One call: inputs and weights on the device of the kernels."""

    inputs: Mapping[str, Tensor]
    weights: PreparedWeights
    kernels: Kernels

    def bf16(self, name: str = "x") -> Tensor:
        """Return an input as BF16; references keep some BF16 values in a wider dtype."""
        return own(self.inputs[name].to(torch.bfloat16))

    def fp32(self, name: str) -> Tensor:
        """Return an input in float32."""
        return own(self.inputs[name].to(torch.float32))

    def run(self, kernel: str, problem: Any, **tensors: Tensor | None) -> tuple[Tensor, ...]:
        """Launch a kernel."""
        return self.kernels.run(kernel, problem, **tensors)


Outputs = dict[str, "Tensor"]
Compute = Callable[[ComponentCallWork], Outputs]


class CachedWeight(NamedTuple):
    """A weight and what was made of it."""

    weight: Weight
    value: Any


@dataclass
class PreparedWeights:
    """The weights of one call; results made from a held weight are cached for later calls."""

    source: Mapping[str, Weight]
    device: torch.device
    kept: dict[tuple[str, str], CachedWeight] = field(default_factory=dict)

    def derived(self, name: str, how: str, make: Callable[[Weight], T]) -> T:
        """Return `make(weight)`, cached for the same weight record."""
        weight = self.source[name]
        known = self.kept.get((name, how))
        if known is not None and known.weight is weight:
            found: T = known.value
            return found
        made = make(weight)
        if isinstance(weight, HeldWeight):  # nobody writes into it
            self.kept[name, how] = CachedWeight(weight, made)
        return made

    def plain(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a weight's values on the device."""
        return self.derived(name, str(dtype), lambda weight: self.on_device(weight.values(dtype)))

    def bf16(self, name: str) -> Tensor:
        """Return a weight as BF16 on the device; raise if that is not exact."""
        return self.derived(
            name, "exact bf16", lambda weight: self.on_device(exact_bf16(name, weight))
        )

    def on_device(self, tensor: Tensor) -> Tensor:
        """Return a contiguous, aligned tensor on the device."""
        return own(tensor.to(self.device))


def exact_bf16(name: str, weight: Weight) -> Tensor:
    """Return values as BF16; raise unless BF16 represents all of them exactly."""
    wide = weight.values(torch.float32)
    narrow = wide.to(torch.bfloat16)
    if not torch.equal(narrow.float(), wide):
        raise InvalidArgument(
            f"values of {name}", f"{int((narrow.float() != wide).sum())} of {wide.numel()}",
            "values that BF16 holds exactly", "This format needs a kernel of its own.",
        )  # fmt: skip
    return narrow


def own(tensor: Tensor) -> Tensor:
    """Return the tensor contiguous and aligned to what every kernel requires."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


# --------------------------------------------------------------------------------------------------
# Kernels by name on one device; kernel and tactic of each launch are recorded.
#
# A launch without rows is recorded as such and skipped. Kernel modules are imported at their first
# launch: they need the CuTe DSL, but naming a backend must not. Descriptors check the tensors.
# Kernels of routed experts are launched one by one, so that each has a component; a launch is
# recorded under the name of its module.

if TYPE_CHECKING:
    Given = Mapping[str, Tensor | None]
    Made = tuple[Tensor, ...]

NOTHING = "no rows, not launched"
ORDER, GATHER, SUM = (f"simt_moe_rows.{name}" for name in ("PLAN", "GATHER", "COMBINE"))
FC1, FC2 = (f"sm90_moe_nvfp4.{name}" for name in ("FC1", "FC2"))


class Kernels(ABC):
    """Kernels by name, on one device."""

    def __init__(self, target: str, device: torch.device) -> None:
        self.target, self.device = target, device
        self._noted: list[Launch] = []
        self.chain: Any = None  # the current call of routed experts: experts.py
        self.summed: Any = None  # what the last sum of slots was made of: experts.py

    def run(self, kernel: str, problem: Any, **tensors: Tensor | None) -> Made:
        """Launch a kernel; return the outputs that the problem has."""
        made = self._run(kernel, problem, tensors)
        idle = any(tensor.numel() == 0 for tensor in made)
        tactic = NOTHING if idle else tactic_of(kernel, problem, self.target)
        self._noted.append(Launch(kernel.partition(".")[0], tactic))
        return made

    def note(self, kernel: str, tactic: str) -> None:
        """Record what was computed in place of a launch."""
        self._noted.append(Launch(kernel, tactic))

    def take_launches(self) -> list[Launch]:
        """Return the launches since the last call of this method."""
        noted, self._noted = self._noted, []
        return noted

    @abstractmethod
    def _run(self, kernel: str, problem: Any, tensors: Given) -> Made: ...


def _gemm_tactic(problem: Any, target: str) -> str:
    chosen = gemm_problem.choose_form(problem, target).tactic
    cluster = chosen.cluster_rows * chosen.cluster_columns
    tile = f"{chosen.rows}x{chosen.columns}x{chosen.inner}"
    return tile + (f", cluster of {cluster}" if cluster > 1 else "")


def _w4a16_tactic(problem: Any, target: str) -> str:
    tactic = w4a16_problem.choose_tactic(problem)
    form = w4a16_problem.choose_form(problem, tactic, target)
    return f"{form.groups} groups of {form.parts} warps, {form.ranks} ranks"


def _w4a16_wgmma_tactic(problem: Any, target: str) -> str:
    form = w4a16_wgmma_problem.choose_form(problem, target)
    return f"{form.groups} warpgroups, {form.ranks} ranks"


def _product_tactic(name: str, problem: Any) -> str:
    p, cut = problem.moe, problem.tactic
    shown = ", gate and up shown" if problem.shown else ""
    tile = f"{cut.rows}x{cut.columns}x{cut.inner}"
    return f"{name}{shown}, {tile}, {p.experts} of {p.routed} experts"


def _sum_tactic(problem: Any, _target: str) -> str:
    shared = " and shared expert" if problem.shared else ""
    return f"sum of slots{shared}, weights {AFTER_W2 if problem.weighted else BEFORE_W2}"


def _plain(_problem: Any, _target: str) -> str:
    return ""


TACTICS: Mapping[str, Callable[[Any, str], str]] = {
    "simt_embed": _plain,
    "simt_rmsnorm": lambda p, _: "decoded as well" if p.decoded else "",
    "simt_residual_norm": lambda p, _: "of the stored sum" if p.rounded else "of the float32 sum",
    "simt_scale": lambda p, _: f"{p.source} to {p.out}",
    "simt_latent_query": _plain,
    "simt_gemv_bf16": lambda p, _: (
        f"up to {gemv_problem.rows_of_form(p.rows)} rows, {p.out}"
        f"{', turned back' if p.turned else ''}{', decoded as well' if p.decoded else ''}"
    ),
    "sm90_gemm_bf16": _gemm_tactic,
    "sm90_gemm_nvfp4": _gemm_tactic,
    "sm90_gemm_fp8_block": _gemm_tactic,
    "sm90_gemm_w4a16": _w4a16_tactic,
    "sm90_gemm_w4a16_wgmma": _w4a16_wgmma_tactic,
    "simt_quantise_nvfp4": lambda p, _: (
        f"{p.source}, {p.layout}{', by expert' if p.experts else ''}"
        f"{', decoded' if p.decoded else ''}"
    ),
    "simt_quantise_fp8": lambda p, _: (
        f"{p.source}{', turned back' if p.turned else ''}, {p.scales}"
    ),
    "simt_qnorm_rope": _plain,
    "simt_inverse_rope": _plain,
    "simt_kv_write": lambda p, _: f"{p.source} to {p.pages.entry}",
    "simt_kv_read": lambda p, _: p.pages.entry,
    "simt_router": lambda p, _: "by table" if p.vocabulary else p.scoring,
    "simt_mhc": lambda p, _: str(p.part),
    "simt_mhc_project": lambda p, _: str(p.kind),
    "simt_mhc_onward": lambda p, _: "of experts rows" if p.source == "rows" else "of a row",
    "simt_mhc_norm": lambda p, _: f"decoded {p.decoded} times",
    "simt_compressor": lambda p, _: f"windows of {p.ratio}{', one token each' if p.alone else ''}",
    "simt_indexer_operand": lambda p, _: f"turned {p.pairing}, {p.format}",
    "sm90_indexer_scores": lambda p, _: f"{p.arithmetic}, {p.pages.operands}",
    "simt_indexer_topk": _plain,
    "sm90_sparse_attention": lambda p, _: (
        f"{p.mode}, {sparse_attention_problem.choose_splits(p)} splits"
    ),
    "sm90_sparse_attention.SPLITS": lambda p, _: (
        f"{p.mode}, {sparse_attention_problem.choose_splits(p)} splits, not merged"
    ),
    "simt_slots": lambda p, _: str(p.kind),
    "sm90_gemm_grouped": lambda p, _: (
        f"{p.groups} groups{', turned back' if p.turned else ''}, {p.out}"
    ),
    "sm90_gemm_grouped_fp8": lambda p, _: (
        f"{p.groups} groups{', turned back' if p.turned else ''}, {p.scales}"
    ),
    "sm90_latent_heads": lambda p, _: (
        f"{p.heads} heads{', turned' if p.positions else ''}"
        f"{f', {p.splits} splits merged' if p.splits else ''}{', decoded' if p.decoded else ''}"
    ),
    ORDER: lambda p, _: f"order of rows, tiles of {p.tactic.rows}",
    GATHER: lambda p, _: f"rows quantised, tiles of {p.tactic.rows}",
    FC1: lambda p, _: _product_tactic("FC1", p),
    FC2: lambda p, _: _product_tactic("FC2", p),
    SUM: _sum_tactic,
    "sm90_moe_nvfp4": lambda p, _: f"{p.experts} experts, weights {p.weighting}",
    "sm90_moe_by_row": lambda p, _: (
        f"{p.moe.experts} experts{' and the shared one' if p.shared else ''}, each row alone"
    ),
    "sm90_moe_by_row.PRODUCTS": lambda p, _: (
        f"{p.moe.experts} experts{' and the shared one' if p.shared else ''}, not added up"
    ),
    "sm90_moe_by_row.SUM": lambda p, _: f"sum of {p.chosen} rows",
    "sm90_moe_by_row.ALONE": lambda _p, _: "one row of a matrix",
    "sm90_shared_expert": lambda _p, _: "nvfp4",
}


def tactic_of(kernel: str, problem: Any, target: str) -> str:
    """Return which tactic or form a problem gets."""
    return TACTICS[kernel](problem, target)


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
        with self._memory():
            made = kernel_named(kernel).run(problem, self._settings, **tensors)
        return tuple(tensor for tensor in made.values() if tensor is not None)


def require_gpu() -> None:
    """Raise unless the machine has a GPU that kernels were written for."""
    if not torch.cuda.is_available():
        raise MissingDevice(
            "--backend", "cutedsl",
            f"an NVIDIA GPU of {' or '.join(TARGETS)} that torch can use",
            "Run it on a machine with one, or leave --backend out: references run on the CPU.",
        )  # fmt: skip
    target_of_device()
