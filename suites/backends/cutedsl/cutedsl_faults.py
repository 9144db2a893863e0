"""Plant faults in the code of our kernels, for `capture --backend cutedsl` and `check` to find.

A fault replaces a function of a kernel's modules while the kernel is traced, and names the
component in which a check has to find it. The kernels themselves contain none of it. A kernel with
a fault is compiled without any cache: a cached whole form cannot replace it, and the faulty one is
not kept. Faults of the GEMMs' parts come from suites/kernels/gemm/gemm_faults.py. That suite alone
plants what may stop a GPU and what shows only with poison in padding. Two faults produce values
that no model produces; then a check may also blame a whole neighbouring component.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any
from unittest import mock

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.kernel import Kernel
from degarble.kernels.runtime.modules import module_of
from degarble.suites.kernels.gemm import gemm_faults

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHORT = 6  # prompts of few tokens
_PART = 8  # of more than a part of a tile of scales, and no whole tile


@dataclass(frozen=True)
class Fault:
    """A function and what stands in its place; it is given the true one first."""

    name: str
    kernel: str
    module: str
    function: str
    instead: Callable[..., Any]
    component: str  # the end of the name of one that has to be blamed
    layout: str = "nvfp4-full"
    also: str | tuple[str, ...] = ""  # ends of names of whole ones that may be blamed, see below
    cause: str = ""  # the family of faults that a check has to name
    cache: str = "exact"  # entries of the paged cache
    prompts: int = 0  # which lengths are asked
    beside: tuple[tuple[str, str, Any], ...] = ()  # module, name and value: what is no fault


def _swapped(true: Any, first: Any, second: Any, *rest: Any) -> Any:
    return true(second, first, *rest)


def _half(true: Any, words: Any) -> Any:
    return true(words[: len(words) // 2])


def _next_code(true: Any, amax: Any, share: Any) -> Any:
    return ops.minimum(true(amax, share) + 1, 0x7E)  # 0x7F would be a NaN


def _reversed(true: Any, *given: Any) -> Any:
    return true(*given)[::-1]


def _the_other_way(true: Any, numbers: Any, registers: Any, *, back: bool) -> Any:
    return true(numbers, registers, back=not back)


def _not_turned(_true: Any, numbers: Any, _registers: Any, **_back: Any) -> Any:
    return import_module("degarble.kernels.primitives.device_words").rounded_words(numbers)


def _without_bias(_true: Any, _tensors: Any, score: Any, _expert: Any) -> Any:
    return score


def _not_normalised(_true: Any, score: Any, scale: Any, _epsilon: Any, _form: Any) -> Any:
    return ops.multiply_rn(score, scale)


def _streams_changed(true: Any, weights: Any, numbers: Any) -> Any:
    return true([weights[1], weights[0], *weights[2:]], numbers)


def _of_first_lane(_true: Any, number: Any) -> Any:
    """Leave a warp's sums apart: every lane has what the first one added."""
    return import_module("cutlass").cute.arch.shuffle_sync(number, 0)


def _rows_changed(true: Any, number: int, tactic: Any) -> int:
    """Scale rows eight apart by each other's scales; swapped operands have none in a thread."""
    changed: int = true(number if tactic.swapped else number ^ 2, tactic)
    return changed


def _large_epsilon(true: Any, registers: Any, epsilon: Any, *rest: Any) -> Any:
    return true(registers, ops.add_rn(epsilon, 1e-2), *rest)


def _next_place(true: Any, *given: Any) -> Any:
    page, within = true(*given)
    return page, within + 1


def _of_gemm(name: str, kernel: str, component: str, **more: Any) -> Fault:
    known = gemm_faults.BY_NAME[name]
    return Fault(name, kernel, known.module, known.function, known.instead, component, **more)


def _of_rows(
    name: str, kernel: str, function: str, instead: Any, component: str, cause: str = ""
) -> Fault:
    place = module_of(kernel), function
    return Fault(name, kernel, *place, instead, component, cause=cause)


_NVFP4, _FP8, _BF16 = "sm90_gemm_nvfp4", "sm90_gemm_fp8_block", "sm90_gemm_bf16"
_QUANTISE, _WRITE = "simt_quantise_nvfp4", "simt_kv_write"
FAULTS = (
    # A full tile's last row reads a stage that may not have arrived: calls of few rows have none.
    # Where there are fewer than 33, all other scales are padding's zeros.
    _of_gemm("scale column", _NVFP4, "wq_a", prompts=_PART, cause="M12"),
    # Queries so small that epsilon is all of their norm: x times 1000 lies on ties, which a float32
    # factor breaks all to one side.
    _of_gemm("tensor scale twice", _NVFP4, "wq_b", also="q_head_norm_rope", cause="M02"),
    # Gates of -88: SwiGLU leaves float32's normal numbers.
    _of_gemm("tensor scale left out", _NVFP4, "shared.w2", also="shared.act", cause="M02"),
    _of_gemm("swizzle of codes", _NVFP4, "wkv", prompts=SHORT, cause="M12"),
    _of_gemm("scale group of the step before", _FP8, "wo_b", layout="nvfp4-experts",
             cause="M12"),
    # Not gemm_faults' own, which is planted in the form of more rows than any call has here.
    Fault("scales of rows changed", _FP8, module_of(_FP8), "factor_of", _rows_changed, "wo_b",
          layout="nvfp4-experts", cause="M11"),
    _of_gemm("unwritten tile", _BF16, "wo_a", cause="M41"),
    _of_gemm("rows of the other warpgroup", _BF16, "wo_a", cause="M41"),
    _of_gemm("scaled without a scale", _BF16, "wo_a", cause="M43"),
    _of_rows("gate and up", _QUANTISE, "swiglu_words", _swapped, "shared.act", "M14"),
    _of_rows("maximum of half a block", _QUANTISE, "block_amax", _half, "wq_a.act_quant",
             "M08"),
    _of_rows("the next scale", _QUANTISE, "scale_code_of", _next_code, "wq_b.act_quant", "M08"),
    _of_rows("norm's weights reversed", "simt_rmsnorm", "weights_of", _reversed, "attn.norm",
             "M24"),
    _of_rows("queries turned back", "simt_qnorm_rope", "turned_words", _the_other_way,
             "q_head_norm_rope", "M28"),
    _of_rows("epsilon of queries", "simt_qnorm_rope", "factor_of_row", _large_epsilon,
             "q_head_norm_rope", "M24"),
    _of_rows("output turned forth", "simt_inverse_rope", "turned_words", _the_other_way,
             "inverse_rope", "M28"),
    _of_rows("latent not turned", _WRITE, "turned_words", _not_turned, "kv_norm_rope", "M28"),
    _of_rows("norm's epsilon of the latent", _WRITE, "factor_of_row", _large_epsilon,
             "kv_norm_rope", "M24"),
    Fault("entry of the next slot", _WRITE, "degarble.kernels.primitives.kv_problem", "place_of",
          _next_place, "kv_write", cause="M13"),
    _of_rows("choice without bias", "simt_router", "biased_score", _without_bias, "topk",
             "M26"),
    _of_rows("weights not normalised", "simt_router", "weight_of", _not_normalised, "topk",
             "M26"),
    _of_rows("sums of lanes not folded", "simt_gemv_bf16", "warp_folded", _of_first_lane,
             "ffn.gate", "M41"),
    Fault("streams changed", "simt_mhc", "degarble.kernels.rows.mhc_problem", "weighted",
          _streams_changed, "hc_post", cause="M23"),
)  # fmt: skip
BY_NAME = {fault.name: fault for fault in FAULTS}


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Let a kernel be compiled with a fault as long as this lasts."""
    kernel, module = import_module(module_of(fault.kernel)), import_module(fault.module)
    true, tracing, traced = getattr(module, fault.function), [False], [False]

    def instead(*given: Any, **named: Any) -> Any:
        # Other kernels that are compiled meanwhile share the module, and are whole and kept.
        traced[0] = traced[0] or tracing[0]
        return fault.instead(true, *given, **named) if tracing[0] else true(*given, **named)

    with ExitStack() as stack:
        anew: dict[Any, Any] = {}
        for name in (each for each in vars(kernel) if each.startswith("compile_")):
            known = getattr(kernel, name)
            if hasattr(known, "__wrapped__"):
                anew[known] = _uncached(known.__wrapped__, tracing)
                stack.enter_context(mock.patch.object(kernel, name, anew[known]))
        for each in tuple(vars(kernel).values()):
            if isinstance(each, Kernel):
                cached: Any = each.compile_form
                again = anew.get(cached) or _uncached(cached.__wrapped__, tracing)
                described = {"compile_form": again}
                stack.enter_context(mock.patch.dict(vars(each), described))
        stack.enter_context(nothing_prepared())
        for place, attribute, value in fault.beside:
            stack.enter_context(mock.patch.object(import_module(place), attribute, value))
        stack.enter_context(mock.patch.object(module, fault.function, instead))
        yield
    assert traced[0], f"{fault.name}: {fault.kernel} was never compiled with it"


_PREPARED = vars(Kernel)["prepared"].func  # of the cached property


@contextmanager
def nothing_prepared() -> Iterator[None]:
    """Prepare every problem anew, of kernels that are imported only now as well.

    For code that changes what problems are prepared from: a form that is kept beyond the change no
    longer fits the grid of a launch.
    """
    with mock.patch.object(Kernel, "prepared", property(_prepared_anew)):
        yield


def _prepared_anew(kernel: Kernel[Any, Any]) -> Callable[[Any], Any]:
    """Return what prepares a kernel's problems, without the ones that are kept."""
    prepare: Callable[[Any], Any] = _PREPARED(kernel).__wrapped__
    return prepare


def _uncached(compile_form: Callable[..., Any], tracing: list[bool]) -> Callable[..., Any]:
    """Compile a form without the folder of compiled kernels, once as long as this is kept.

    `tracing` says whether it is being compiled.
    """

    @cache
    def compiled(*given: Any) -> Any:
        tracing[0] = True
        try:
            return compile_form(*given[:-1], CompileSettings())
        finally:
            tracing[0] = False

    return compiled
