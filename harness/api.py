"""The stable surface of degarble: what a kernel's suite and a notebook import. Semantic versioning.

`judge` says of one kernel call whether it is right, by which budget, and if not, why. `capture`
records any torch model, `check` judges every module of the record that it has a twin for. Names
that are not listed in `__all__` may change in any version; these change with the major one.
"""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch

from degarble.harness.base.errors import DegarbleError, InvalidArgument
from degarble.harness.base.version import VERSION
from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.files.records import BIASES
from degarble.harness.capture.files.writer import CaptureWriter
from degarble.harness.capture.modules import (
    ModulePlace,
    component_of,
    places_by_name,
    recording,
    weights_hash,
    with_bias,
)
from degarble.harness.capture.options import CaptureFilter
from degarble.harness.capture.recorder import MemoryRun, Recorder
from degarble.harness.engine.adopted.files import searching
from degarble.harness.engine.conventions.registry import (
    KEY,
    conventions_in,
    read_conventions,
    stored_conventions,
)
from degarble.harness.engine.diagnose.judge.judge import Setting, judge
from degarble.harness.engine.diagnose.judge.modules import CheckedModules, Twin, check_modules
from degarble.harness.engine.diagnose.judge.report import JudgedKernel
from degarble.harness.formats.number_formats import NVFP4
from degarble.harness.formats.operands import fp8, mxfp4, mxfp8, nvfp4
from degarble.harness.formats.quantise import QuantisedTensor, dequantise, quantise
from degarble.harness.formats.weight import Weight
from degarble.harness.report.cards import render_cards_with
from degarble.harness.report.verdict import Verdict
from degarble.reports.card_html import card_html

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

__all__ = (
    "NVFP4",
    "Checked",
    "CheckedModules",
    "DegarbleError",
    "JudgedKernel",
    "ModulePlace",
    "Place",
    "QuantisedTensor",
    "Setting",
    "Twin",
    "Verdict",
    "Weight",
    "capture",
    "check",
    "dequantise",
    "fp8",
    "judge",
    "mxfp4",
    "mxfp8",
    "nvfp4",
    "quantise",
)

render_cards_with(card_html)

# Names of the first versions, which stay valid.
Checked = CheckedModules
Place = ModulePlace


@overload
def capture(
    model: torch.nn.Module,
    *arguments: Any,
    places: Iterable[ModulePlace] | None = None,
    components: str | None = None,
    folder: None = None,
    label: str | None = None,
    facts: Mapping[str, Any] | None = None,
) -> MemoryRun: ...


@overload
def capture(
    model: torch.nn.Module,
    *arguments: Any,
    places: Iterable[ModulePlace] | None = None,
    components: str | None = None,
    folder: Path | str,
    label: str | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Capture: ...


def capture(
    model: torch.nn.Module,
    *arguments: Any,
    places: Iterable[ModulePlace] | None = None,
    components: str | None = None,
    folder: Path | str | None = None,
    label: str | None = None,
    facts: Mapping[str, Any] | None = None,
) -> MemoryRun | Capture:
    """Run a model once and record its components: in memory, or in a folder for `degarble compare`.

    `places` maps modules to components; without it every leaf module is one, by its name.
    `components` keeps those that fit a pattern, such as "mlp.*"; the others are not recorded.
    A folder also keeps a hash of the weights that ran, `label`, which comparisons show, and `facts`
    of your own (values that JSON has). `facts["conventions"]` says what the model's arithmetic
    follows (docs/checking.md), if check is not to learn it.

    >>> import torch
    >>> from degarble import capture
    >>> run = capture(torch.nn.Sequential(torch.nn.Linear(8, 4)), torch.ones(3, 8))
    >>> [call.component for call in run.calls]
    ['m0']
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgument(
            "model", type(model).__name__, "a torch module", "Judge a bare function with judge()."
        )
    chosen = list(places_by_name(model) if places is None else places)
    with _options_as_parameters():
        wanted = CaptureFilter.from_options(components=components)
        wanted.require_choosing([place.component for place in chosen])
    stated = _facts_of_module(model, label, facts) | {BIASES: with_bias(model, chosen)}
    if folder is None:
        run = MemoryRun({key: stated[key] for key in (KEY, BIASES) if key in stated})
        _record(model, arguments, chosen, Recorder(run, wanted))
        return run
    stated["weights"] = weights_hash(model)  # before the run, which may write into buffers
    with CaptureWriter(Path(folder), stated, name="folder") as writer:
        _record(model, arguments, chosen, Recorder(writer, wanted))
        writer.finish()
    return Capture.open(Path(folder))


def _facts_of_module(
    model: torch.nn.Module, label: str | None, facts: Mapping[str, Any] | None
) -> dict[str, Any]:
    if label is not None and (not isinstance(label, str) or not label.isprintable()):
        raise InvalidArgument("label", label, "a printable text", 'Pass label="before the fix".')
    stated: dict[str, Any] = {
        "model": type(model).__name__,
        "versions": {"degarble": VERSION, "torch": torch.__version__},
    }
    if label is not None:
        stated["label"] = label
    if facts is not None and KEY in facts:
        facts = dict(facts)
        stated[KEY] = stored_conventions(read_conventions(facts.pop(KEY), "of capture()"))
    if facts:
        try:
            stated["facts"] = json.loads(json.dumps(dict(facts), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise InvalidArgument(
                "facts", repr(facts)[:200], "names with values that JSON has",
                'Pass plain values: facts={"commit": "1f0c9a2e"}.',
            ) from error  # fmt: skip
    return stated


def _record(
    model: torch.nn.Module,
    arguments: tuple[Any, ...],
    places: list[ModulePlace],
    recorder: Recorder,
) -> None:
    with torch.inference_mode(), recording(model, places, recorder):
        model(*arguments)


def check(
    run: MemoryRun | Capture | Path | str,
    twin: Twin | Mapping[str, Any],
    definitions: Mapping[str, Any] | None = None,
    *,
    conventions: Mapping[str, Any] | None = None,
    partial: bool = False,
    faults: Path | str | None = None,
) -> CheckedModules:
    """Judge every captured call whose component the twin knows, on the inputs that it was given.

    `twin`: weights by component (tensor, QuantisedTensor, Weight, or a dict of `w` and `bias`), or
    weights and biases by the names that a checkpoint gives them, as they are stored, never as the
    model holds them; `definitions`: callables by component; `conventions` of the run go before
    those that it states itself; `partial`: judge also what there is of a capture whose run was
    killed; `faults`: a folder of adopted faults, which are searched as well.

    >>> import torch
    >>> from degarble import capture, check
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4, bias=False))
    >>> str(check(capture(model, torch.ones(3, 8)), {"m0": model[0].weight.detach()}).verdict)
    'AGREES'
    """
    if isinstance(run, (str, Path)):
        run = Capture.open(Path(run))
    if not isinstance(run, (MemoryRun, Capture)):
        raise InvalidArgument(
            "run", type(run).__name__, "what capture() gave, or its folder", "Capture a run."
        )
    declared = conventions_in(run.facts) | read_conventions(conventions or {}, "of check()")
    if isinstance(run, Capture) and not partial:
        with _options_as_parameters():
            run.require_complete()
    if isinstance(twin, Twin) and definitions is not None:
        raise InvalidArgument(
            "definitions",
            sorted(definitions),
            "none together with a Twin",
            "Pass them to Twin().",
        )
    known = twin if isinstance(twin, Twin) else Twin(dict(twin), definitions)
    _name_as_captured(known, {call.component for call in run.calls})
    with _options_as_parameters(), searching(None if faults is None else Path(faults)):
        return check_modules(run, known, declared)


def _name_as_captured(twin: Twin, seen: Collection[str]) -> None:
    """Take names as checkpoints write them: with `model.` or without, with `.weight`."""
    names = {}
    for name in twin.names:
        plain = name.removesuffix(".weight")
        spelled = (plain, component_of(plain), f"model.{plain}", plain.removeprefix("model."))
        known = [each for each in spelled if each in seen]
        if name not in seen and known:
            names[name] = known[0]
    if names:
        twin.rename(names)


@contextmanager
def _options_as_parameters() -> Iterator[None]:
    """Name parameters in a refusal where the command line would name options."""
    try:
        yield
    except DegarbleError as error:
        for part in ("name", "expectation", "remedy"):
            text = getattr(error, part)
            setattr(error, part, _OPTION.sub(lambda found: _PARAMETERS[found[0]], text))
        raise


_PARAMETERS = {
    "--out": "folder", "--partial": "partial=True", "--components": "components",
    "--faults": "faults", "--convention": "conventions",
}  # fmt: skip
_OPTION = re.compile("|".join(_PARAMETERS))
