"""Compile the kernels that a night needs ahead of the steps that run them, and carry them along.

Suites of backends and the night's own captures compile each form at its first launch, one after
the other. Here processes share them beforehand. The forms are those of a list that the suites have
and those that the cache was asked for before, by these sources or by earlier ones. Kernels are
compiled for a target, so no GPU is needed.

    python -m degarble.harness.nightly.compiling compile [--target sm_90a] [--processes N]
    python -m degarble.harness.nightly.compiling import FOLDER
    python -m degarble.harness.nightly.compiling export FOLDER
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import DegarbleError, InvalidArgument
from degarble.harness.base.files import read_small_text
from degarble.harness.checkpoint.write.workers import Pool
from degarble.harness.history.ledger import Failure
from degarble.harness.inference.processes import workers_for
from degarble.harness.nightly.kernels import installed_suites
from degarble.harness.nightly.night import NightConfig, StepResult
from degarble.harness.report.progress import duration
from degarble.harness.report.verdict import Verdict
from degarble.kernels.runtime.archive import archives_in, export_cache, import_cache
from degarble.kernels.runtime.compiling import REQUEST, cached_entries, read_settings
from degarble.kernels.runtime.forms import KernelForm
from degarble.kernels.runtime.targets import TARGETS, target, target_of_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from degarble.kernels.runtime.compiling import CompileSettings

COMPILER_BYTES = 1 << 30  # of a process: 0.45 GB were seen
LARGEST_LIST = 64 << 20
_WORKS = "degarble.harness.nightly.compiling"
_LONG = 200


@dataclass(frozen=True)
class NeededForms:
    """Forms to have: those of the list, those of earlier nights; and how many nobody knows now."""

    listed: tuple[KernelForm, ...]
    recorded: tuple[KernelForm, ...]
    forgotten: int = 0


@dataclass(frozen=True)
class CompiledForm:
    """What became of one form."""

    name: str
    from_cache: bool = False
    seconds: float = 0.0
    processor: float = 0.0  # seconds of processor time
    error: str = ""


@dataclass(frozen=True)
class CompiledAhead:
    """What became of the forms, the listed ones first."""

    needed: NeededForms
    found: Mapping[KernelForm, CompiledForm]
    processes: int
    seconds: float
    target: str

    @property
    def compiled(self) -> int:
        """Return the number of forms that were compiled."""
        return sum(not (each.from_cache or each.error) for each in self.found.values())

    @property
    def cached(self) -> int:
        """Return the number of forms that came from the cache."""
        return sum(each.from_cache for each in self.found.values())

    @property
    def sentence(self) -> str:
        """Return the result in one sentence."""
        text = f"{self.compiled + self.cached} kernels for {self.target} are ready after"
        text += f" {duration(self.seconds)}: {self.compiled} compiled by {self.processes}"
        text += f" process{'es' if self.processes > 1 else ''}, {self.cached} from the cache"
        failed = len(self.found) - self.compiled - self.cached
        left = len(self.needed.listed) + len(self.needed.recorded) - len(self.found)
        text += f"; {failed} could not be compiled" if failed else ""
        return f"{text}; time was up before {left} more." if left else f"{text}."

    @property
    def facts(self) -> dict[str, str]:
        """Return the numbers by name."""
        used = sum(each.processor for each in self.found.values())
        return {
            "kernels compiled": str(self.compiled),
            "kernels from the cache": str(self.cached),
            "compiling processes": str(self.processes),
            "seconds to have them": f"{self.seconds:.1f}",
            "processor seconds for them": f"{used:.1f}",
        }


def needed_forms(
    listed: Path | None,
    cache: Path | None,
    of_target: str,
    keep: Callable[[Mapping[str, Any]], bool] = lambda _raw: True,
) -> NeededForms:
    """Return a target's forms, each once: those of a list that `keep` accepts, then a cache's."""
    first = _read(filter(keep, _listed(listed)), of_target)
    second = _read(_recorded(cache), of_target) if cache is not None else ([], 0)
    new = [form for form in dict.fromkeys(second[0]) if form not in set(first[0])]
    return NeededForms(tuple(dict.fromkeys(first[0])), tuple(new), first[1] + second[1])


def _listed(path: Path | None) -> list[Any]:
    if path is None:
        return []
    found = json.loads(read_small_text(path, LARGEST_LIST))
    forms: list[Any] = [*found["forms"], *found.get("of_contracts", ())]
    return forms


def _recorded(cache: Path) -> Iterable[Any]:
    for _, files in cached_entries(cache):
        request = json.loads(files[REQUEST]).get("request")
        if request is not None:
            yield request


def _read(raw_forms: Iterable[Any], of_target: str) -> tuple[list[KernelForm], int]:
    """Return the forms for a target, and how many are of no kernel that there is now."""
    found, forgotten = [], 0
    for raw in raw_forms:
        try:
            form = KernelForm.read(raw)
        except InvalidArgument:
            forgotten += 1
            continue
        if form.target == of_target:
            found.append(form)
    return found, forgotten


def compile_form(settings: CompileSettings, form: KernelForm) -> CompiledForm:
    """Compile one form in this process, or take it from the cache; an error is its result."""
    begun, used = time.monotonic(), time.process_time()
    try:
        from_cache = form.compile(settings).from_cache
    except Exception as error:  # noqa: BLE001  the DSL raises its own; other forms go on
        return CompiledForm(form.name, error=f"{type(error).__name__}: {error}"[:_LONG])
    seconds, processor = time.monotonic() - begun, time.process_time() - used
    return CompiledForm(form.name, from_cache, seconds, processor)


def _compile_until(
    until: float, settings: CompileSettings, form: KernelForm
) -> CompiledForm | None:
    """Compile one form; return None where time was up before (all processes have one clock)."""
    return None if time.monotonic() > until else compile_form(settings, form)


def compile_ahead(
    needed: NeededForms,
    settings: CompileSettings,
    of_target: str,
    processes: int | None = None,
    say: Callable[[str], None] = lambda _line: None,
    until: float = math.inf,
) -> CompiledAhead:
    """Compile forms in processes, as many as cores and memory allow; say a line after each.

    After the time `until`, of time.monotonic(), no form is begun.
    """
    forms = (*needed.listed, *needed.recorded)
    count = min(processes or workers_for(COMPILER_BYTES), len(forms)) or 1
    begun, found = time.monotonic(), dict[KernelForm, CompiledForm]()
    work = partial(_compile_until, until, settings)
    with Pool(work, count, imported=(_WORKS,)) as pool:
        for form, made in pool.run_each(forms, lambda form: form.name, 1):
            if made is None:
                continue
            found[form] = made
            spent = time.monotonic() - begun
            left = spent / len(found) * (len(forms) - len(found))
            how = "from the cache" if made.from_cache else f"{made.seconds:.1f} s"
            say(
                f"compiled {len(found)} of {len(forms)}, about {duration(left)} left:"
                f" {made.name}, {made.error or how}"
            )
    ordered = {form: found[form] for form in forms if form in found}
    return CompiledAhead(needed, ordered, count, time.monotonic() - begun, of_target)


def compiled(config: NightConfig, _: Mapping[str, StepResult]) -> StepResult:
    """Compile what this night's suites and captures are known to need."""
    if not config.gpu:
        return StepResult(
            Verdict.UNDECIDED, "No kernel is needed: no GPU was requested (-m b200, -m h200).",
            asked=False,
        )  # fmt: skip
    settings = read_settings(os.environ)
    if settings.cache_folder is None:
        return StepResult(
            Verdict.UNDECIDED, "DEGARBLE_KERNEL_CACHE is off: every process compiles its own.",
            asked=False,
        )  # fmt: skip
    suites, of_target = installed_suites(), target_of_device().name
    needed = needed_forms(suites.forms if suites else None, settings.cache_folder, of_target)
    return result_of(compile_ahead(needed, settings, of_target, say=config.say))


def result_of(ahead: CompiledAhead) -> StepResult:
    """Report what was compiled; a listed kernel that cannot be compiled is a failure."""
    wrong = {form: made for form, made in ahead.found.items() if made.error}
    failures = tuple(
        Failure(f"kernels.{made.name}", Verdict.DIFFERS, None, f"is not compiled: {made.error}")
        for form, made in wrong.items()
        if form in ahead.needed.listed
    )
    lines = [f"{made.name}: {made.error}" for made in wrong.values()]
    if ahead.needed.forgotten:
        lines.append(f"{ahead.needed.forgotten} forms of earlier versions have no kernel now.")
    return StepResult(
        Verdict.DIFFERS if failures else Verdict.AGREES,
        ahead.sentence,
        failures=failures,
        facts=ahead.facts,
        lines=tuple(lines),
        rows=tuple(_rows(ahead)),
    )


def _rows(ahead: CompiledAhead) -> Iterable[tuple[str, str, str]]:
    """Yield each kernel with its forms: compiled, from the cache, seconds."""
    by_name = dict[str, list[CompiledForm]]()
    for made in ahead.found.values():
        by_name.setdefault(made.name, []).append(made)
    for name, forms in sorted(by_name.items()):
        cached = sum(each.from_cache for each in forms)
        failed = sum(bool(each.error) for each in forms)
        text = f"{len(forms) - cached - failed} compiled, {cached} from the cache"
        text += f", {failed} not compiled" if failed else ""
        yield name, "compiled", f"{text}, {sum(each.seconds for each in forms):.1f} s"


# --------------------------------------------------------------------------------------------------
# The script of a night.


@dataclass
class _Script:
    settings: CompileSettings

    @property
    def cache(self) -> Path:
        if self.settings.cache_folder is None:
            raise InvalidArgument(
                "DEGARBLE_KERNEL_CACHE", "off", "a folder of compiled kernels",
                "Run: unset DEGARBLE_KERNEL_CACHE",
            )  # fmt: skip
        return self.settings.cache_folder

    def compile(self, given: argparse.Namespace) -> int:
        of_target = target(given.target).name if given.target else target_of_device().name
        suites = installed_suites()
        listed = given.forms or (suites.forms if suites else None)
        needed = needed_forms(listed, self.cache, of_target)
        ahead = compile_ahead(needed, self.settings, of_target, given.processes, _say)
        result = result_of(ahead)
        _say("\n".join([result.sentence, *result.lines]))
        _say(", ".join(f"{name}: {number}" for name, number in result.facts.items()))
        return result.verdict.exit_status

    def bring(self, given: argparse.Namespace) -> int:
        for path in archives_in(given.folder):
            found = import_cache(path, self.cache)
            _say(f"{path.name}: {found.kernels} kernels taken, {found.known} known before")
        return 0

    def export(self, given: argparse.Namespace) -> int:
        made = export_cache(self.cache, given.folder)
        for path in archives_in(given.folder):
            if path != made.path:
                path.unlink()
        _say(f"{made.path}: {made.kernels} kernels, {made.path.stat().st_size:,} bytes")
        return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the three commands; status 2 where it is refused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    compiling = commands.add_parser("compile", help="compile what a night needs")
    compiling.add_argument("--target", choices=tuple(TARGETS), help="default: this GPU's")
    compiling.add_argument("--processes", type=_positive, help="default: by cores and memory")
    compiling.add_argument("--forms", type=Path, help="a list of forms; default: the suites'")
    for name, text in (
        ("import", "take the archives of a folder into the cache"),
        ("export", "write the cache as the one archive of a folder"),
    ):
        commands.add_parser(name, help=text).add_argument("folder", type=Path)
    given = parser.parse_args(arguments)
    script = _Script(read_settings(os.environ))
    run = {"compile": script.compile, "import": script.bring, "export": script.export}
    try:
        return run[given.command](given)
    except DegarbleError as error:
        print(f"REFUSED: {error}", file=sys.stderr)  # noqa: T201  a script
        return error.exit_status


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: at least 1")
    return number


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201  a script


if __name__ == "__main__":
    # Trap: workers find functions by their module, and a script's has no name that they import.
    sys.exit(import_module(_WORKS).main())
