"""Load our kernels by name, launch them, and hold what one call of a component needs.

Nothing is compiled before the first launch; a component without a kernel raises NoKernelError.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from degarble.harness.base.errors import InvalidArgument, MissingDevice
from degarble.harness.inference.weights import HeldWeight
from degarble.harness.model.config.config import V4Config
from degarble.harness.report.kernel_table import Launch
from degarble.kernels.attention import problem as sparse_attention_problem
from degarble.kernels.gemm import gemv_problem, w4a16_problem
from degarble.kernels.gemm import problem as gemm_problem
from degarble.kernels.moe import problem as facts
from degarble.kernels.runtime.modules import module_of
from degarble.kernels.runtime.targets import SM90A, TARGETS, target_of_device

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from degarble.harness.formats.weight import Weight
    from degarble.harness.model.components import Component
    from degarble.kernels.moe.problem import MoeProblem
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
    def v4(self) -> bool:
        """Return whether this is DeepSeek-V4."""
        return isinstance(self.config, V4Config)

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


class DerivedWeight(NamedTuple):
    """A weight and what was made of it."""

    weight: Weight
    value: Any


@dataclass
class PreparedWeights:
    """The weights of one call; results made from a held weight are cached for later calls."""

    source: Mapping[str, Weight]
    device: torch.device
    kept: dict[tuple[str, str], DerivedWeight] = field(default_factory=dict)

    def derived(self, name: str, how: str, make: Callable[[Weight], T]) -> T:
        """Return `make(weight)`, cached for the same weight record."""
        weight = self.source[name]
        known = self.kept.get((name, how))
        if known is not None and known.weight is weight:
            found: T = known.value
            return found
        made = make(weight)
        if isinstance(weight, HeldWeight):  # nobody writes into it
            self.kept[name, how] = DerivedWeight(weight, made)
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
# Steps of kernels/moe/sm90_moe_nvfp4.py, launched one by one, so that each has a component: the
# order of rows, the quantised rows, FC1 as shipped, FC1 that also stores gate and up, FC2, the sum.
# Each is the same launch as in the whole call, on one workspace, in the same order.
#
# Shape letters: T tokens, K chosen, S slots, R rows at most, E experts visited, D hidden, F width.

if TYPE_CHECKING:
    Given = Mapping[str, Tensor | None]

KERNELS = "sm90_moe_nvfp4"  # owns the products
ROWS = "simt_moe_rows"  # owns what is around them
ORDER, GATHER, SHOWN, FIRST, SECOND, SUM, TOTAL = (
    "order of rows", "rows quantised", "FC1, gate and up shown", "FC1", "FC2", "sum of slots",
    "sum of slots and shared expert",
)  # fmt: skip
AROUND = frozenset({ORDER, GATHER, SUM, TOTAL})  # what is not a product
PLAN = ("rows", "counts", "tiles", "slots", "places")
CODES = ("x_codes", "x_scales", "hidden_codes", "hidden_scales")


class MoeStep(NamedTuple):
    """One step of a call."""

    name: str
    problem: MoeProblem


def tactic(step: MoeStep, target: str) -> str:
    """Return the tile configuration of a step."""
    p = step.problem
    if step.name in {SUM, TOTAL}:
        return f"{step.name}, weights {p.weighting}"
    cut = facts.choose_tactic(p, target)
    if step.name in {ORDER, GATHER}:
        return f"{step.name}, tiles of {cut.rows}"
    return f"{step.name}, {cut.rows}x{cut.columns}x{cut.inner}, {p.experts} of {p.routed} experts"


def empty_space(problem: MoeProblem, device: torch.device) -> dict[str, Tensor]:
    """Allocate the workspace between the steps."""
    cut = facts.choose_tactic(problem, SM90A.name)
    most, d, f = facts.most_rows(problem, cut), problem.hidden, problem.width
    counts = facts.plan_sizes(problem, cut)
    made = {
        name: torch.empty(count, dtype=torch.int32, device=device)
        for name, count in zip(PLAN, counts, strict=True)
    }
    for name, width in (("x", d), ("hidden", f)):
        size = facts.scale_bytes(most, width)
        made[f"{name}_codes"] = torch.empty(most, width // 2, dtype=torch.uint8, device=device)
        made[f"{name}_scales"] = torch.empty(size, dtype=torch.uint8, device=device)
    return made | {"out": torch.empty(most, d, dtype=torch.bfloat16, device=device)}


def launched(module: Any, step: MoeStep, settings: CompileSettings, t: Given) -> Any:
    """Launch a step; return its outputs."""
    del module
    rows, kernels = (import_module(module_of(name)) for name in (ROWS, KERNELS))
    if step.name in {SUM, TOTAL}:
        return _sum(rows, step.problem, settings, t)
    job = kernels.job_of(step.problem, settings)
    plan = rows.RowPlan(*(t[name] for name in PLAN)) if "places" in t else None
    if step.name == ORDER:
        if step.problem.tokens:
            rows.plan(job, t["experts"], t["local"], plan)
        return tuple(t[name] for name in PLAN)
    if step.name == GATHER:
        x = rows.Nvfp4Rows(t["x_codes"], t["x_scales"])
        if step.problem.tokens:
            rows.gather(job, t["x"], t["input_scale"], plan, x)
        return tuple(x)
    return _product(kernels, rows, job, (step, plan), t)


def _sum(rows: Any, p: MoeProblem, settings: CompileSettings, t: Given) -> Any:
    """Launch the sum of every token's slots, and of the shared expert if given."""
    given, target = t["rows"], target_of_device().name
    job = rows.MoeJob(p, facts.choose_tactic(p, target), target, settings)
    assert given is not None, "the pairing hands over rows"
    shared = t.get("shared")
    dtype = torch.float32 if shared is None else torch.bfloat16
    out = torch.empty(p.tokens, p.hidden, dtype=dtype, device=given.device)
    if p.tokens:
        rows.combine(job, rows.Sum(given, t["places"], t["weights"], shared, out))
    return out


def _product(kernels: Any, rows: Any, job: Any, told: tuple[MoeStep, Any], t: Given) -> Any:
    """Launch FC1, with or without storing its sums, or FC2."""
    step, plan = told
    first, second = facts.forms_of(job.problem, job.target, job.tactic)
    weights = kernels.ExpertWeights(*(t[n] for n in ("codes", "scales", "decode", "input_scale")))
    is_first = step.name != SECOND
    leading = (job.problem.experts, facts.GATE_AND_UP)[: 1 + is_first]
    kernels.require_weights("w13" if is_first else "w2", weights, job.problem, leading)
    x, hidden = (
        rows.Nvfp4Rows(t[f"{name}_codes"], t[f"{name}_scales"]) for name in ("x", "hidden")
    )
    if not is_first:
        if job.problem.tokens:
            kernels.multiply_rows(job, second, (hidden, weights, plan), (t["out"],))
        return t["out"]
    leaving: tuple[Any, ...] = (*hidden, t["hidden_scale"], plan.slots, t["weights"])
    made = tuple(hidden)
    if step.name == SHOWN:
        first = replace(first, shown=True)
        shape = (plan.slots.numel(), facts.GATE_AND_UP * job.problem.width)
        both = torch.empty(shape, dtype=torch.bfloat16, device=plan.slots.device)
        leaving, made = (*leaving, both), (both,)
    if job.problem.tokens:
        kernels.multiply_rows(job, first, (x, weights, plan), leaving)
    return made


# --------------------------------------------------------------------------------------------------
# Kernels by name on one device; kernel and tactic of each launch are recorded.
#
# A launch without rows is recorded as such and skipped. Kernel modules are imported at their first
# launch: they need the CuTe DSL, but naming a backend must not. Entry points check the tensors.

if TYPE_CHECKING:
    Made = tuple[Tensor, ...]

NOTHING = "no rows, not launched"


class Kernels(ABC):
    """Kernels by name, on one device."""

    def __init__(self, target: str, device: torch.device) -> None:
        self.target, self.device = target, device
        self._noted: list[Launch] = []
        self.chain: Any = None  # the current call of routed experts: experts.py
        self.summed: Any = None  # what the last sum of slots was made of: experts.py

    def run(self, kernel: str, problem: Any, **tensors: Tensor | None) -> Made:
        """Launch a kernel; return its outputs in the order of its entry point."""
        made = self._run(kernel, problem, tensors)
        idle = any(tensor.numel() == 0 for tensor in made)
        tactic = NOTHING if idle else tactic_of(kernel, problem, self.target)
        self._noted.append(Launch(kernel, tactic))
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


def by_name(module: Any, problem: Any, settings: CompileSettings, t: Given) -> Any:
    """Run a described kernel; return the outputs that the problem has."""
    made = module.KERNEL.run(problem, settings, **t)
    return tuple(tensor for tensor in made.values() if tensor is not None)


@dataclass(frozen=True)
class KernelEntry:
    """What a kernel says of its tactic, and how it is called, if not by operand name."""

    tactic: Callable[[Any, str], str] = lambda _problem, _target: ""
    call: Callable[[Any, Any, CompileSettings, Given], Any] = by_name


def _gemm_tactic(problem: Any, target: str) -> str:
    chosen = gemm_problem.choose_form(problem, target).tactic
    cluster = chosen.cluster_rows * chosen.cluster_columns
    tile = f"{chosen.rows}x{chosen.columns}x{chosen.inner}"
    return tile + (f", cluster of {cluster}" if cluster > 1 else "")


def _w4a16_tactic(problem: Any, target: str) -> str:
    tactic = w4a16_problem.choose_tactic(problem)
    form = w4a16_problem.choose_form(problem, tactic, target)
    return f"{form.groups} groups of {form.parts} warps, {form.ranks} ranks"


def _there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "the pairing hands over every operand"
    return tensor


def _expert_operands(module: Any, t: Given) -> Any:
    parts = ("codes", "scales", "decode_scale", "input_scale")
    both = ([t[f"{name}_{part}"] for part in parts] for name in ("w13", "w2"))
    return module.MoeWeights(*(module.ExpertWeights(*each) for each in both))


def _moe(module: Any, problem: Any, settings: CompileSettings, t: Given) -> Any:
    if isinstance(problem, MoeStep):
        return launched(module, problem, settings, t)
    routing, weights = module.Routing(t["experts"], t["weights"]), _expert_operands(module, t)
    shared = t.get("shared")
    return module.moe_nvfp4(t["x"], routing, weights, problem, settings, shared_TD=shared)


def _moe_tactic(problem: Any, target: str) -> str:
    if isinstance(problem, MoeStep):
        return tactic(problem, target)
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


ENTRIES: Mapping[str, KernelEntry] = {
    "simt_embed": KernelEntry(),
    "simt_rmsnorm": KernelEntry(),
    "simt_residual_norm": KernelEntry(
        lambda p, _: "of the stored sum" if p.rounded else "of the float32 sum"
    ),
    "simt_scale": KernelEntry(lambda p, _: f"{p.source} to {p.out}"),
    "simt_latent_query": KernelEntry(),
    "simt_gemv_bf16": KernelEntry(
        lambda p, _: f"up to {gemv_problem.rows_of_form(p.rows)} rows, {p.out}"
    ),
    "sm90_gemm_bf16": KernelEntry(_gemm_tactic),
    "sm90_gemm_nvfp4": KernelEntry(_gemm_tactic),
    "sm90_gemm_fp8_block": KernelEntry(_gemm_tactic),
    "sm90_gemm_w4a16": KernelEntry(_w4a16_tactic),
    "simt_quantise_nvfp4": KernelEntry(
        lambda p, _: f"{p.source}, {p.layout}{', by expert' if p.experts else ''}"
    ),
    "simt_quantise_fp8": KernelEntry(
        lambda p, _: f"{p.source}{', turned back' if p.turned else ''}, {p.scales}"
    ),
    "simt_qnorm_rope": KernelEntry(),
    "simt_inverse_rope": KernelEntry(),
    "simt_kv_write": KernelEntry(lambda p, _: f"{p.source} to {p.pages.entry}"),
    "simt_kv_read": KernelEntry(lambda p, _: p.pages.entry),
    "simt_router": KernelEntry(lambda p, _: "by table" if p.vocabulary else p.scoring),
    "simt_mhc": KernelEntry(lambda p, _: str(p.part)),
    "simt_mhc_project": KernelEntry(lambda p, _: str(p.kind)),
    "simt_compressor": KernelEntry(
        lambda p, _: f"windows of {p.ratio}{', one token each' if p.alone else ''}"
    ),
    "simt_indexer_operand": KernelEntry(lambda p, _: f"turned {p.pairing}, {p.format}"),
    "sm90_indexer_scores": KernelEntry(lambda p, _: f"{p.arithmetic}, {p.pages.operands}"),
    "simt_indexer_topk": KernelEntry(),
    "sm90_sparse_attention": KernelEntry(
        lambda p, _: f"{p.mode}, {sparse_attention_problem.choose_splits(p)} splits"
    ),
    "simt_slots": KernelEntry(lambda p, _: str(p.kind)),
    "sm90_gemm_grouped": KernelEntry(
        lambda p, _: f"{p.groups} groups{', turned back' if p.turned else ''}, {p.out}"
    ),
    "sm90_gemm_grouped_fp8": KernelEntry(
        lambda p, _: f"{p.groups} groups{', turned back' if p.turned else ''}, {p.scales}",
    ),
    "sm90_moe_nvfp4": KernelEntry(_moe_tactic, _moe),
    "sm90_shared_expert": KernelEntry(lambda _p, _: "nvfp4", _shared_expert),
    "simt_moe_rows": KernelEntry(tactic, launched),
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
