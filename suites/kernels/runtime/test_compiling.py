"""Compiling and its cache: what makes a new kernel, what a damaged entry does, what is refused."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.base.errors import InvalidArgument, MissingDependency
from degarble.kernels.runtime import compiling
from degarble.kernels.runtime.compiling import (
    CompileSettings,
    any_stream,
    compile_kernel,
    sources_digest,
)
from degarble.kernels.runtime.targets import SM90A, SM100A

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")


@pytest.fixture
def crowded() -> ModuleType:
    return import_module("degarble.suites.kernels.runtime.crowded_kernel")


def entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_the_second_time_it_comes_from_disk(crowded: ModuleType, tmp_path: Path) -> None:
    settings = CompileSettings(cache_folder=tmp_path / "kernels")
    first = crowded.compile_crowded(128, SM90A, settings)
    second = crowded.compile_crowded(128, SM90A, settings)
    assert (first.from_cache, second.from_cache) == (False, True)
    assert (second.ptx, second.cubin) == (first.ptx, first.cubin)
    assert (second.name, second.target) == (first.name, SM90A)
    assert first.cubin.startswith(b"\x7fELF")
    assert callable(second._run)
    (entry,) = entries(tmp_path / "kernels")
    assert sorted(path.name for path in entry.iterdir()) == [
        *("kernel.cubin", "kernel.o", "kernel.ptx", "manifest.json")
    ]


def test_another_target_constant_or_pointer_is_another_kernel(
    crowded: ModuleType, tmp_path: Path
) -> None:
    settings = CompileSettings(cache_folder=tmp_path)
    from cutlass import Float32, cute  # noqa: PLC0415  needs the DSL
    from cutlass.cute.runtime import make_ptr  # noqa: PLC0415  needs the DSL

    assert not crowded.compile_crowded(128, SM90A, settings).from_cache
    assert not crowded.compile_crowded(128, SM100A, settings).from_cache
    assert not crowded.compile_crowded(64, SM90A, settings).from_cache
    less_aligned = make_ptr(Float32, 16, cute.AddressSpace.gmem, assumed_align=4)
    arguments = (less_aligned, 128, any_stream())
    assert not compile_kernel(crowded.launch_crowded, arguments, SM90A, settings).from_cache
    assert len(entries(tmp_path)) == 4
    elsewhere = make_ptr(Float32, 4096, cute.AddressSpace.gmem, assumed_align=4)
    arguments = (elsewhere, 128, any_stream())  # the address is no part of the kernel
    assert compile_kernel(crowded.launch_crowded, arguments, SM90A, settings).from_cache


def cut_short(entry: Path) -> None:
    path = entry / "kernel.o"
    path.write_bytes(path.read_bytes()[:-1])


def one_bit(entry: Path) -> None:
    path = entry / "kernel.cubin"
    code = bytearray(path.read_bytes())
    code[len(code) // 2] ^= 1
    path.write_bytes(code)


@pytest.mark.parametrize(
    "damage",
    [
        cut_short,
        one_bit,
        lambda entry: (entry / "kernel.ptx").unlink(),
        lambda entry: (entry / "manifest.json").unlink(),
        lambda entry: (entry / "manifest.json").write_text("{"),
        lambda entry: (entry / "manifest.json").write_text("[]"),
    ],
    ids=["short object", "one bit", "no ptx", "no manifest", "cut manifest", "other manifest"],
)
def test_a_damaged_entry_is_compiled_anew(
    damage: Callable[[Path], Any], crowded: ModuleType, tmp_path: Path
) -> None:
    settings = CompileSettings(cache_folder=tmp_path)
    first = crowded.compile_crowded(128, SM90A, settings)
    (entry,) = entries(tmp_path)
    damage(entry)
    again = crowded.compile_crowded(128, SM90A, settings)
    assert not again.from_cache
    assert again.cubin == first.cubin
    assert entries(tmp_path) == [entry]
    assert crowded.compile_crowded(128, SM90A, settings).from_cache


def test_a_faster_writer_is_no_failure(
    crowded: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def already_there(_self: Path, _target: Path) -> Path:
        raise FileExistsError

    monkeypatch.setattr(Path, "rename", already_there)
    kernel = crowded.compile_crowded(128, SM90A, CompileSettings(cache_folder=tmp_path))
    assert kernel.cubin
    assert entries(tmp_path) == []


def test_a_whole_entry_stays_when_another_writer_comes(
    crowded: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = CompileSettings(cache_folder=tmp_path)
    crowded.compile_crowded(128, SM90A, settings)
    (entry,) = entries(tmp_path)
    written = entry.stat().st_ino
    monkeypatch.setattr(compiling, "_load", lambda *_given: None)  # not there when it was looked up
    assert not crowded.compile_crowded(128, SM90A, settings).from_cache
    assert entries(tmp_path) == [entry]
    assert entry.stat().st_ino == written


def test_an_entry_that_goes_while_it_is_read_is_loaded_all_the_same(
    crowded: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = CompileSettings(cache_folder=tmp_path)
    crowded.compile_crowded(128, SM90A, settings)
    (entry,) = entries(tmp_path)
    whole = compiling._whole

    def then_gone(folder: Path) -> dict[str, bytes] | None:
        files = whole(folder)
        shutil.rmtree(folder)
        return files

    monkeypatch.setattr(compiling, "_whole", then_gone)
    kernel = crowded.compile_crowded(128, SM90A, settings)
    assert kernel.from_cache
    assert callable(kernel._run)
    assert not entry.exists()


def test_without_a_cache_nothing_is_written(
    crowded: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert not crowded.compile_crowded(128, SM90A, CompileSettings()).from_cache
    assert entries(tmp_path) == []


def test_machine_code_is_kept_on_request(crowded: ModuleType, tmp_path: Path) -> None:
    kernel = crowded.compile_crowded(128, SM90A, CompileSettings(keep_folder=tmp_path / "kept"))
    cubin, ptx = entries(tmp_path / "kept")
    assert cubin.name.startswith("crowded_kernel.launch_crowded.sm_90a.")
    assert cubin.read_bytes() == kernel.cubin
    assert ptx.read_text() == kernel.ptx


@pytest.mark.parametrize(
    "file", ["harness/formats/layouts.py", "kernels/gemm/problem.py", "harness/model/new.py"]
)
def test_an_edited_source_is_another_kernel(
    file: str, crowded: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = CompileSettings(cache_folder=tmp_path / "cache")
    copies = [tmp_path / "as it is", tmp_path / "edited"]
    for copy in copies:
        for folder in compiling._SOURCE_FOLDERS:
            source = compiling.package_root() / folder
            shutil.copytree(source, copy / folder, ignore=shutil.ignore_patterns("*.pyc"))
    path = copies[1] / file
    path.write_text((path.read_text() if path.exists() else "") + "\n# edited\n")
    assert sources_digest(copies[0]) == sources_digest(compiling.package_root())
    seen = []
    for root in (copies[0], copies[1], copies[0]):
        monkeypatch.setattr(compiling, "package_root", lambda root=root: root)
        monkeypatch.setattr(compiling, "_SOURCES_AT_IMPORT", sources_digest(root))
        seen.append(crowded.compile_crowded(128, SM90A, settings).from_cache)
    assert seen == [False, False, True]


def test_a_source_edited_after_its_import_switches_the_cache_off(
    crowded: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = CompileSettings(cache_folder=tmp_path / "cache")
    assert not crowded.compile_crowded(128, SM90A, settings).from_cache
    monkeypatch.setattr(compiling, "_SOURCES_AT_IMPORT", "what was imported")
    for _ in range(2):
        assert not crowded.compile_crowded(128, SM90A, settings).from_cache
    assert len(entries(tmp_path / "cache")) == 1


def test_settings_of_the_dsl_from_the_environment_make_another_kernel(
    crowded: ModuleType, tmp_path: Path
) -> None:
    plain = CompileSettings(cache_folder=tmp_path)
    told = replace(plain, dsl_environment=("CUTE_DSL_LINEINFO=1",))
    seen = [crowded.compile_crowded(128, SM90A, s).from_cache for s in (plain, told, plain, told)]
    assert seen == [False, False, True, True]


@dataclass(frozen=True)
class HoldsAFunction:
    function: Callable[..., Any]


@pytest.mark.parametrize(
    "argument",
    [[1, 2], {"a": 1}, len, HoldsAFunction(lambda: 0), object(), (1, 2)],
    ids=["list", "dict", "builtin", "record of a function", "object", "tuple"],
)
def test_arguments_without_a_stable_text_are_refused(argument: object, crowded: ModuleType) -> None:
    with pytest.raises(InvalidArgument, match="argument to compile with") as refusal:
        compile_kernel(
            crowded.launch_crowded, (argument,), SM90A, CompileSettings(cache_folder=Path("unused"))
        )
    assert "look the object up inside the kernel" in str(refusal.value)
    assert not Path("unused").exists()


def test_a_missing_dsl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> ModuleType:
        message = f"No module named {name!r}"
        raise ModuleNotFoundError(message)

    monkeypatch.setattr(compiling, "import_module", absent)
    with pytest.raises(MissingDependency, match=r"degarble\[gpu\]"):
        any_stream()
