"""Kernels are compiled ahead of a night: which, by how many processes, and what is said of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import pytest

from degarble.harness.nightly import compiling
from degarble.harness.nightly.compiling import (
    CompiledAhead,
    CompiledForm,
    NeededForms,
    compile_ahead,
    needed_forms,
    result_of,
)
from degarble.harness.nightly.night import NightConfig
from degarble.harness.report.verdict import Verdict
from degarble.kernels.rows.problem import ScaleProblem, choose_scale_form
from degarble.kernels.runtime.compiling import CompileSettings, store_entry
from degarble.kernels.runtime.forms import KernelForm
from degarble.kernels.runtime.targets import SM90A

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

ROOM = "degarble.kernels.rows"
PLACE = f"{ROOM}.simt_scale:KERNEL"


def scale(source: str, out: str, target: str = "sm_90a") -> KernelForm:
    return KernelForm(PLACE, choose_scale_form(ScaleProblem(8, 0.5, source, out), target))


LISTED, RECORDED = scale("bf16", "bf16"), scale("bf16", "fp32")


def cached(folder: Path, number: int, request: Any) -> None:
    """Put an entry into a cache that was asked for by these words."""
    told = json.dumps({"request": request, "sources": "earlier"}).encode()
    files = {"kernel.o": b"", "kernel.ptx": b"", "kernel.cubin": b"", "request.json": told}
    store_entry(folder / f"k.launch.sm_90a.{number:024x}", files)


@pytest.mark.needs("cutlass")
def test_the_list_and_earlier_nights_say_what_is_needed(tmp_path: Path) -> None:
    listed, cache = tmp_path / "forms.json", tmp_path / "cache"
    of_blackwell = scale("bf16", "bf16", "sm_100a")
    gone = {"kernel": f"{ROOM}.gone:KERNEL", "form": None}
    raw = [form.plain() for form in (LISTED, LISTED, of_blackwell)]
    listed.write_text(json.dumps({"forms": raw}))
    for number, request in enumerate([LISTED.plain(), RECORDED.plain(), gone, None]):
        cached(cache, number, request)
    found = needed_forms(listed, cache, "sm_90a")
    assert found == NeededForms((LISTED,), (RECORDED,), 1)
    assert needed_forms(None, None, "sm_90a") == NeededForms((), ())
    assert needed_forms(listed, None, "sm_100a").listed == (of_blackwell,)
    assert needed_forms(listed, None, "sm_90a", lambda raw: raw != LISTED.plain()).listed == ()


def test_the_list_of_the_suites_is_there_and_of_this_version() -> None:
    from degarble.suites.support.kernel_suites import HERE  # noqa: PLC0415  read where it is used

    assert HERE.forms is not None
    raw = json.loads(HERE.forms.read_text())["forms"]
    assert len(raw) > 100
    assert len({json.dumps(form) for form in raw}) == len(raw)


class HerePool:
    """A pool that compiles nothing, in this process."""

    count = 0

    def __init__(self, work: Any, count: int, **_more: Any) -> None:
        HerePool.count, self.work = count, work

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def run_each(self, forms: Sequence[Any], _name: Any, _again: int) -> Iterator[Any]:
        for form in reversed(forms):
            yield form, self.work(form)


def _compiled(_settings: Any, form: Any) -> CompiledForm:
    return CompiledForm(form.name, form == RECORDED, 2.0)


def test_a_line_is_said_after_each_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "Pool", HerePool)
    monkeypatch.setattr(compiling, "compile_form", _compiled)
    said: list[str] = []
    needed = NeededForms((LISTED,), (RECORDED,))
    ahead = compile_ahead(needed, CompileSettings(), "sm_90a", 5, said.append)
    assert HerePool.count == 2, "no more processes than forms"
    assert list(ahead.found) == [LISTED, RECORDED]
    assert [line.partition(",")[0] for line in said] == ["compiled 1 of 2", "compiled 2 of 2"]
    assert all(" left: simt_scale, " in line for line in said)
    assert (ahead.compiled, ahead.cached) == (1, 1)
    assert "1 compiled by 2 processes, 1 from the cache." in ahead.sentence


def test_no_form_is_begun_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()

    def slow(_settings: Any, form: Any) -> CompiledForm:
        monkeypatch.setattr(time, "monotonic", lambda: now + 20)
        return _compiled(_settings, form)

    monkeypatch.setattr(compiling, "Pool", HerePool)
    monkeypatch.setattr(compiling, "compile_form", slow)
    needed, said = NeededForms((LISTED,), (RECORDED,)), list[str]()
    ahead = compile_ahead(needed, CompileSettings(), "sm_90a", None, said.append, now + 10)
    assert list(ahead.found) == [RECORDED]
    assert len(said) == 1
    assert ahead.sentence.endswith("1 from the cache; time was up before 1 more.")


def ahead_of(*errors: str) -> CompiledAhead:
    made = [CompiledForm("simt_scale", error=error) for error in errors]
    needed = NeededForms((LISTED,), (RECORDED,), 3)
    pairs = zip((LISTED, RECORDED), made, strict=True)
    return CompiledAhead(needed, dict(pairs), 2, 61.0, "sm_90a")


def test_a_listed_kernel_that_is_not_compiled_is_a_failure_and_an_old_one_is_told() -> None:
    green = result_of(ahead_of("", "ValueError: gone"))
    assert (green.verdict, green.failures) == (Verdict.AGREES, ())
    assert green.lines[0] == "simt_scale: ValueError: gone"
    assert "3 forms of earlier versions" in green.lines[1]
    assert green.facts["kernels compiled"] == "1"
    assert green.facts["kernels from the cache"] == "0"
    assert green.facts["seconds to have them"] == "61.0"
    assert green.rows == (
        ("simt_scale", "compiled", "1 compiled, 0 from the cache, 1 not compiled, 0.0 s"),
    )
    red = result_of(ahead_of("ValueError: no", ""))
    assert red.verdict is Verdict.DIFFERS
    assert [failure.component for failure in red.failures] == ["kernels.simt_scale"]


def test_a_form_that_raises_is_a_result() -> None:
    broken: Any = SimpleNamespace(name="x", compile=lambda _settings: 1 / 0)
    made = compiling.compile_form(CompileSettings(), broken)
    assert made.error.startswith("ZeroDivisionError")


def test_without_a_gpu_or_a_cache_nothing_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*, gpu: bool) -> NightConfig:
        return NightConfig(tmp_path, tmp_path, tmp_path, "2026-11-24", gpu=gpu)

    here = compiling.compiled(asked(gpu=False), {})
    monkeypatch.setenv("DEGARBLE_KERNEL_CACHE", "off")
    off = compiling.compiled(asked(gpu=True), {})
    for result in (here, off):
        assert (result.verdict, result.asked, result.red) == (Verdict.UNDECIDED, False, False)
    assert "DEGARBLE_KERNEL_CACHE is off" in off.sentence


def test_the_script_refuses_with_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEGARBLE_KERNEL_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "archives"
    folder.mkdir(mode=0o700)
    assert compiling.main(["import", str(folder)]) == 0
    (folder / f"kernels-{'0' * 32}.zip").write_bytes(b"no archive")
    assert compiling.main(["import", str(folder)]) == 2
    assert "REFUSED: kernel archive kernels-0000" in capsys.readouterr().err
    monkeypatch.setenv("DEGARBLE_KERNEL_CACHE", "off")
    assert compiling.main(["import", str(folder)]) == 2
    assert "unset DEGARBLE_KERNEL_CACHE" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.needs("cutlass")
def test_two_processes_compile_and_an_archive_carries_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = NeededForms((LISTED,), (RECORDED,))
    listed = tmp_path / "forms.json"
    listed.write_text(json.dumps({"forms": [LISTED.plain(), RECORDED.plain()]}))
    line = [sys.executable, "-m", "degarble.harness.nightly.compiling", "compile"]
    line += ["--target", "sm_90a", "--processes", "2", "--forms", str(listed)]
    environment = {**os.environ, "DEGARBLE_KERNEL_CACHE": str(tmp_path / "one")}
    ran = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "2 compiled by 2 processes, 0 from the cache." in ran.stderr
    found = needed_forms(None, tmp_path / "one", SM90A.name)
    assert set(found.recorded) == {LISTED, RECORDED}, "the cache knows what it was asked for"
    archives = tmp_path / "archives"
    for cache, command in (("one", "export"), ("two", "import")):
        monkeypatch.setenv("DEGARBLE_KERNEL_CACHE", str(tmp_path / cache))
        assert compiling.main([command, str(archives)]) == 0
    second = compile_ahead(needed, CompileSettings(cache_folder=tmp_path / "two"), SM90A.name, 2)
    assert (second.compiled, second.cached) == (0, 2)
