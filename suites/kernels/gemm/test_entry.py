"""What every plain GEMM's launch is handed, form by form: pointers, extents, clusters, stream."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, MissingDevice, ShapeMismatch
from degarble.kernels.gemm import problem as facts
from degarble.kernels.runtime import kernel as descriptor
from degarble.kernels.runtime import targets
from degarble.kernels.runtime.modules import module_of
from degarble.suites.kernels import gemm_checks as checks
from degarble.suites.kernels import sm100_checks as blackwell

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.needs("cutlass")

PROCESSORS = 148
EXTENTS = (7, 264, 128)
KINDS = [(operands, target) for operands in facts.OPERANDS for target in ("sm_90a", "sm_100a")]
# Places among the tensors of an entry point, in the order in which a kernel takes them.
ORDER = {"bf16": (0, 1, 2), "fp8_block": (0, 2, 1, 3, 4), "nvfp4": (0, 1, 3, 4, 2, 5, 6)}

each_kind = pytest.mark.parametrize(("operands", "target"), KINDS)


class Launched(NamedTuple):
    """What a kernel was called with, in numbers: places of tensors, extents, stream."""

    tensors: list[int]
    extents: list[int]
    stream: str


class Recorder:
    """A stand-in for compiled kernels."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.places = {tensor.data_ptr(): i for i, tensor in enumerate(tensors)}
        self.launched: list[Launched] = []

    def __call__(self, pointers: Any, extents: Any, stream: str) -> None:
        """Note a launch."""
        found = [self.places[pointer] for pointer in pointers]
        self.launched.append(Launched(found, [int(extent.value) for extent in extents], stream))


def kernels_of(operands: str, target: str) -> Any:
    return import_module(module_of(f"{target.replace('_', '')[:-1]}_gemm_{operands}"))


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptor, "processors_of", lambda _device: PROCESSORS)
    monkeypatch.setattr(descriptor, "pointer", lambda _e, tensor, _a: tensor.data_ptr())
    monkeypatch.setattr(descriptor, "current_stream", lambda device: f"stream of {device}")


def given(form: facts.GemmForm, rows: int = EXTENTS[0]) -> tuple[checks.Case, tuple[Tensor, ...]]:
    case = checks.with_form(form, (rows, *EXTENTS[1:]), "ordinary", 3)
    flat = checks.flat(checks.SIDES[form.operands](case, "cpu").given)
    return case, (*flat, torch.zeros(rows, EXTENTS[1], dtype=torch.bfloat16))


@pytest.mark.parametrize("processors", [4, PROCESSORS])
@each_kind
def test_every_form_is_handed_its_tensors_and_extents(
    operands: str, target: str, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The few processors have more tiles than thread blocks at once."""
    monkeypatch.setattr(descriptor, "processors_of", lambda _device: processors)
    for form in checks.forms(operands, target):
        case, tensors = given(form)
        recorder = Recorder(tensors)
        named = checks.named(operands, tensors[:-1]) | {"out": tensors[-1]}
        kernels_of(operands, target).KERNEL.launch(recorder, form, case.problem, named)
        m, n, k = EXTENTS
        clusters = facts.grid(case.problem, form.tactic, processors * form.tactic.blocks)[2]
        extents = [n, m, k, clusters] if form.tactic.swapped else [m, n, k, clusters]
        assert recorder.launched == [Launched(list(ORDER[operands]), extents, "stream of 0")], form


@each_kind
def test_the_table_chooses_unless_a_form_is_named(
    operands: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, forms = kernels_of(operands, target), checks.forms(operands, target)
    blackwell.pretend_gpu(monkeypatch, targets.TARGETS[target])
    seen: list[facts.GemmForm] = []

    def compiled(form: facts.GemmForm, _settings: Any) -> Any:
        seen.append(form)
        return lambda *_launched: None

    monkeypatch.setitem(vars(kernels.KERNEL), "compile_form", compiled)
    case, _ = given(forms[0])
    sides = checks.SIDES[operands](case, "cpu").given
    for named in (None, forms[-1]):
        out = checks.multiply(kernels, sides, case.problem, named)
        assert out.shape == (EXTENTS[0], EXTENTS[1])
        chosen = facts.choose_form(case.problem, target)
        assert seen.pop() == (named or chosen)


@each_kind
def test_no_rows_launch_nothing_and_what_does_not_fit_is_refused(
    operands: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = kernels_of(operands, target)
    case, _ = given(checks.forms(operands, target)[0])
    sides = checks.SIDES[operands](case, "cpu").given
    narrow = torch.zeros(7, 8, dtype=torch.bfloat16)
    with pytest.raises(ShapeMismatch, match="D = "):
        checks.multiply(kernels, sides, case.problem, out=narrow)
    blackwell.pretend_gpu(monkeypatch, targets.SM90A if target == "sm_100a" else targets.SM100A)
    with pytest.raises(MissingDevice, match=target):
        checks.multiply(kernels, sides, case.problem)
    blackwell.pretend_gpu(monkeypatch, targets.TARGETS[target])
    empty, _ = given(checks.forms(operands, target)[0], rows=0)
    none = checks.SIDES[operands](empty, "cpu").given
    assert checks.multiply(kernels, none, empty.problem).shape == (0, EXTENTS[1])


def test_a_tactic_of_several_thread_blocks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    blackwell.pretend_gpu(monkeypatch, targets.SM90A)
    for form in checks.forms("nvfp4"):
        case, _ = given(form)
        wide = replace(form, tactic=replace(form.tactic, blocks=2))
        with pytest.raises(InvalidArgument, match="thread blocks of a processor"):
            checks.multiply(
                kernels_of("nvfp4", "sm_90a"),
                checks.SIDES["nvfp4"](case, "cpu").given,
                case.problem,
                wide,
            )
