"""Write the list of forms that suites take from the kernel cache on a Hopper GPU.

    python -m degarble.suites.backends.needed_forms

Stand-ins run the small models on the CPU. Each launch also goes through the kernel's descriptor, on
a pretended GPU, up to the form that would be compiled. Attention's contract, which several
processes share, adds the forms that are chosen for its cases. A night compiles them all in parallel
first (degarble.harness.nightly.compiling). A form that is missing costs time, and nothing else.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.backends.cutedsl import backend as cutedsl
from degarble.harness.backends.graph.decoder import Decoder
from degarble.harness.backends.graph.matrices import PRODUCTS
from degarble.harness.base.errors import DegarbleError
from degarble.harness.inference.model import open_model
from degarble.kernels.primitives.kv_problem import WIDTH, WITH_KEY, Pages
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.forms import KernelForm
from degarble.kernels.runtime.kernel import place_of
from degarble.kernels.runtime.modules import kernel_named
from degarble.kernels.runtime.targets import SM90A
from degarble.suites.backends import cutedsl_cases as cases
from degarble.suites.backends.cutedsl_standin import StandIn
from degarble.suites.kernels.attention import contract
from degarble.suites.support.pretended_gpu import noted_in, pretended_gpu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

KEPT = Path(__file__).with_name("needed_forms.json")
SEED = 3
LENGTHS = (0, 7)  # of cases.LENGTHS: few, some and many rows
STEPS = 3
CODED = ("fp8", "nvfp4", "fp8-v32-ue8m0", "fp8-v32")  # entries that suites give caches of latents
TARGET = SM90A.name
SHARED = "sm90_sparse_attention"  # a kernel whose contract several processes share


class Launching(StandIn):
    """Stand-ins whose launches go through the descriptors too, up to the form.

    Stand-ins have caches of BF16 alone, so forms of coded ones are chosen from the same problems.
    """

    def __init__(self, heard: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self._heard = heard

    def _run(self, kernel: str, problem: Any, tensors: Any) -> Any:
        made = super()._run(kernel, problem, tensors)
        described = kernel_named(kernel)
        described.run(problem, CompileSettings(), **tensors)
        for entry in CODED:
            with suppress(DegarbleError):  # V3.2's entries hold no V4 row
                other = with_entry(problem, entry)
                if other != problem:
                    self._heard(described, described.choose_form(other, TARGET))
        return made


def with_entry(problem: Any, entry: str) -> Any:
    """Return a problem whose caches of latents have another entry format."""
    if isinstance(problem, Pages):
        latents = problem.entry == "bf16" and problem.width in (WIDTH, WITH_KEY)
        return replace(problem, entry=entry) if latents else problem
    if not is_dataclass(problem) or isinstance(problem, type):
        return problem
    parts = {field.name: getattr(problem, field.name) for field in fields(problem) if field.init}
    changed = {name: with_entry(part, entry) for name, part in parts.items()}
    return replace(problem, **changed) if changed != parts else problem


@contextmanager
def forms_heard(found: dict[KernelForm, None]) -> Iterator[Launching]:
    """Yield kernels; `found` gets the forms that they would compile."""

    heard = noted_in(found)
    with pretended_gpu(TARGET, "cpu", heard):
        yield Launching(heard)


def forms_of_captures(folder: Path, family: str, layout: str) -> list[KernelForm]:
    """Return the forms of captures with prompts of several lengths."""
    found = dict[KernelForm, None]()
    model = cases.write_model(folder, family, layout, SEED)
    for seed in LENGTHS:
        with forms_heard(found) as kernels:
            out = folder / f"run-{family}-{layout}-{seed}"
            cases.capture_by(kernels, model.checkpoint, out, cases.drawn_prompts(seed))
    return list(found)


def forms_of_layers(folder: Path, family: str, layout: str, products: str) -> list[KernelForm]:
    """Return the forms of whole layers: steps of three lanes, and of a piece of a prompt."""
    found = dict[KernelForm, None]()
    model = cases.write_model(folder, family, layout, SEED)
    with (
        open_model(model.checkpoint, switches=cutedsl.CONVENTIONS) as opened,
        torch.inference_mode(),
        forms_heard(found) as kernels,
    ):
        bound = opened.logits_model.bound
        decoder = Decoder.from_model(kernels, bound, opened.recipe, 3, 192, products=products)
        for position in range(STEPS):
            decoder.feed([7, 9, None], [position, position, 0])
            _, logits = decoder.run()
            decoder.greedy(logits)
        if decoder.prompts is not None:
            rows = decoder.prompts.stepping.rows
            decoder.prompts.feed([7] * rows, list(range(rows)), [0] * rows)
            decoder.prompts.run()
    return list(found)


def forms_of_cases(kernel: str) -> list[KernelForm]:
    """Return the forms of all cases of a kernel's contract, drawn ones too."""
    found = dict[KernelForm, None]()
    described = kernel_named(kernel)
    for judged in (each for each in contract.JUDGED if each.kernel.partition("-")[0] == kernel):
        drawn = (judged.fuzzed(seed, judged.at_once) for seed in range(judged.seeds))
        for case in chain(judged.cases, *drawn):
            form = described.choose_form(case.problem, TARGET)
            found[KernelForm(place_of(described), form)] = None
    return list(found)


def every_form(folder: Path) -> list[KernelForm]:
    """Return all forms, in the order in which runs ask for them."""
    found = dict[KernelForm, None]()
    for family, layout in cases.CASES:
        found |= dict.fromkeys(forms_of_captures(folder, family, layout))
        if layout != "bf16":
            for products in PRODUCTS:
                found |= dict.fromkeys(forms_of_layers(folder, family, layout, products))
        print(f"{family} {layout}: {len(found)} forms", flush=True)  # noqa: T201  a script
    return list(found)


def text_of(forms: list[KernelForm]) -> str:
    """Return the document: forms of backends, then those that a contract has beyond them."""
    more = set(forms_of_cases(SHARED)) - set(forms)
    return f'{{"forms": [\n{_lines(forms)}\n], "of_contracts": [\n{_lines(more)}\n]}}\n'


def _lines(forms: Iterable[KernelForm]) -> str:
    """Return a form a line, in the order of their text."""
    return ",\n".join(sorted(f"  {json.dumps(form.plain(), sort_keys=True)}" for form in forms))


def main() -> int:
    """Write the list."""
    with TemporaryDirectory() as folder:
        forms = every_form(Path(folder))
    KEPT.write_text(text_of(forms), encoding="utf-8")
    print(f"{KEPT}: {len(forms)} forms")  # noqa: T201  a script
    return 0


if __name__ == "__main__":
    sys.exit(main())
