"""Compiling, its cache and settings, targets, and facts of machine code."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from degarble.harness.base.errors import (
    InvalidArgument,
    MissingDependency,
    MissingDevice,
    UnknownName,
    UnreadableFile,
)
from degarble.kernels.rows.problem import ScaleProblem
from degarble.kernels.runtime import compiling, targets
from degarble.kernels.runtime.compiling import (
    CompileSettings,
    any_stream,
    compile_kernel,
    cubin_facts,
    cuobjdump_path,
    fused_instructions,
    read_settings,
    sources_digest,
    unstated_roundings,
)
from degarble.kernels.runtime.modules import kernel_named
from degarble.kernels.runtime.targets import (
    SM90A,
    SM100A,
    TARGETS,
    Target,
    target,
    target_of_device,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


# --------------------------------------------------------------------------------------------------
# Compiling and its cache: what makes a new kernel, what a damaged entry does, what is refused.


@pytest.fixture
def crowded() -> ModuleType:
    return import_module("degarble.suites.kernels.runtime.crowded_kernel")


def entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


@pytest.mark.needs("cutlass")
def test_a_suite_may_share_its_kernels_with_other_processes(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Its settings name no cache; with the fixture they mean the user's."""
    kernel = kernel_named("simt_scale")
    compile_anew = kernel.compile_form.__wrapped__  # type: ignore[attr-defined]
    form = kernel.choose_form(ScaleProblem(1, 64), "sm_90a")
    assert not compile_anew(form, CompileSettings()).from_cache
    with mock.patch.dict(os.environ, {"DEGARBLE_KERNEL_CACHE": str(tmp_path / "kernels")}):
        request.getfixturevalue("kernel_cache")
    made = [compile_anew(form, CompileSettings()).from_cache for _ in range(2)]
    assert made == [False, True]


def test_a_test_that_may_change_a_kernel_gets_no_cache(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "KEEP_VARIABLE", "of this test")
    with pytest.raises(AssertionError, match=r"change a kernel's code: \{'monkeypatch'\}"):
        request.getfixturevalue("kernel_cache")


@pytest.mark.needs("cutlass")
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
        *("kernel.cubin", "kernel.o", "kernel.ptx", "manifest.json", "request.json")
    ]


@pytest.mark.needs("cutlass")
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


@pytest.mark.needs("cutlass")
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


@pytest.mark.needs("cutlass")
def test_a_faster_writer_is_no_failure(
    crowded: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def already_there(_self: Path, _target: Path) -> Path:
        raise FileExistsError

    monkeypatch.setattr(Path, "rename", already_there)
    kernel = crowded.compile_crowded(128, SM90A, CompileSettings(cache_folder=tmp_path))
    assert kernel.cubin
    assert entries(tmp_path) == []


@pytest.mark.needs("cutlass")
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


@pytest.mark.needs("cutlass")
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


@pytest.mark.needs("cutlass")
def test_without_a_cache_nothing_is_written(
    crowded: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert not crowded.compile_crowded(128, SM90A, CompileSettings()).from_cache
    assert entries(tmp_path) == []


@pytest.mark.needs("cutlass")
def test_machine_code_is_kept_on_request(crowded: ModuleType, tmp_path: Path) -> None:
    kernel = crowded.compile_crowded(128, SM90A, CompileSettings(keep_folder=tmp_path / "kept"))
    cubin, ptx = entries(tmp_path / "kept")
    assert cubin.name.startswith("crowded_kernel.launch_crowded.sm_90a.")
    assert cubin.read_bytes() == kernel.cubin
    assert ptx.read_text() == kernel.ptx


@pytest.mark.needs("cutlass")
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


@pytest.mark.needs("cutlass")
def test_a_source_edited_after_its_import_switches_the_cache_off(
    crowded: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = CompileSettings(cache_folder=tmp_path / "cache")
    assert not crowded.compile_crowded(128, SM90A, settings).from_cache
    monkeypatch.setattr(compiling, "_SOURCES_AT_IMPORT", "what was imported")
    for _ in range(2):
        assert not crowded.compile_crowded(128, SM90A, settings).from_cache
    assert len(entries(tmp_path / "cache")) == 1


@pytest.mark.needs("cutlass")
def test_settings_of_the_dsl_from_the_environment_make_another_kernel(
    crowded: ModuleType, tmp_path: Path
) -> None:
    plain = CompileSettings(cache_folder=tmp_path)
    compile_settings = replace(plain, dsl_environment=("CUTE_DSL_LINEINFO=1",))
    seen = [
        crowded.compile_crowded(128, SM90A, s).from_cache
        for s in (plain, compile_settings, plain, compile_settings)
    ]
    assert seen == [False, False, True, True]


@dataclass(frozen=True)
class HoldsAFunction:
    function: Callable[..., Any]


@pytest.mark.needs("cutlass")
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


@pytest.mark.needs("cutlass")
def test_a_missing_dsl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> ModuleType:
        message = f"No module named {name!r}"
        raise ModuleNotFoundError(message)

    monkeypatch.setattr(compiling, "import_module", absent)
    with pytest.raises(MissingDependency, match=r"degarble\[gpu\]"):
        any_stream()


# --------------------------------------------------------------------------------------------------
# Facts of machine code: spills and arithmetic that may be contracted are detected.

needs_dsl = pytest.mark.needs("cutlass")


@needs_dsl
@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
@pytest.mark.parametrize(("threads", "spills"), [(128, False), (1024, True)])
def test_a_kernel_short_of_registers_spills(target: Target, threads: int, spills: bool) -> None:
    crowded = import_module("degarble.suites.kernels.runtime.crowded_kernel")
    kernel = crowded.compile_crowded(threads, target, CompileSettings())
    (facts,) = cubin_facts(kernel.cubin)
    assert facts.spills is spills, facts
    assert (facts.stack_bytes > 0) is spills
    assert facts.registers <= 65_536 // threads
    assert facts.registers > 60


def test_what_is_no_cubin_is_refused() -> None:
    with pytest.raises(UnreadableFile, match="cubin = "):
        cubin_facts(b"\x7fELF, and then nothing that cuobjdump knows")


def test_silence_of_the_tool_is_not_taken_for_a_kernel_without_spills(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent = subprocess.CompletedProcess(
        args=[], returncode=0, stdout="Resource usage:\n", stderr=""
    )
    monkeypatch.setattr(subprocess, "run", lambda *_args, **_kwargs: silent)
    with pytest.raises(UnreadableFile, match="resource usage of at least one kernel"):
        cubin_facts(b"")


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_name: str) -> None:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "files", nothing)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingDependency, match="pip install nvidia-cuda-cuobjdump"):
        cuobjdump_path()


PTX = """
	mul.rn.f32 	%r1, %r2, %r3;
	add.rn.f32 	%r1, %r2, %r3;
	div.rn.f32 	%r1, %r2, %r3;
	mul.lo.s32 	%r1, %r2, %r3;
	mul.wide.u32 	%rd1, %r2, 8;
	add.s64 	%rd1, %rd2, %rd3;
	sub.f32 	%r10, %r8, %r9;
	@%p1 mul.ftz.f32 	%r10, %r8, %r9;
	@!%p1 add.f16x2 	%r10, %r8, %r9;
	mul.bf16x2 	%r10, %r8, %r9;
	fma.rn.f32 	%r1, %r2, %r3, %r4;
	mad.f32 	%r1, %r2, %r3, %r4;
"""


def test_instructions_that_may_be_contracted() -> None:
    assert [line.split()[0] for line in unstated_roundings(PTX)] == [
        "sub.f32",
        "mul.ftz.f32",
        "add.f16x2",
        "mul.bf16x2",
        "mad.f32",
    ]
    assert [line.split()[0] for line in fused_instructions(PTX)] == ["fma.rn.f32"]


# --------------------------------------------------------------------------------------------------
# Settings are read from the environment that is passed, and from nowhere else.


@pytest.mark.parametrize(
    ("environment", "cache", "keep"),
    [
        ({}, Path.home() / ".cache/degarble/kernels", None),
        ({"XDG_CACHE_HOME": "/x"}, Path("/x/degarble/kernels"), None),
        ({"DEGARBLE_KERNEL_CACHE": "off", "XDG_CACHE_HOME": "/x"}, None, None),
        ({"DEGARBLE_KERNEL_CACHE": "/c", "XDG_CACHE_HOME": "/x"}, Path("/c"), None),
        ({"DEGARBLE_KERNEL_CACHE": "off", "DEGARBLE_KEEP_KERNELS": "/k"}, None, Path("/k")),
        ({"DEGARBLE_KERNEL_CACHE": "off", "DEGARBLE_KEEP_KERNELS": ""}, None, None),
    ],
)
def test_reads_two_variables(
    environment: dict[str, str], cache: Path | None, keep: Path | None
) -> None:
    assert read_settings(environment) == CompileSettings(cache, keep)


def test_settings_of_the_dsl_are_recorded() -> None:
    environment = {"CUTE_DSL_LINEINFO": "1", "CUTE_DSL_ARCH": "sm_90a", "HOME": "/h"}
    told = read_settings(environment).dsl_environment
    assert told == ("CUTE_DSL_ARCH=sm_90a", "CUTE_DSL_LINEINFO=1")


def test_the_process_environment_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEGARBLE_KERNEL_CACHE", "/planted")
    assert read_settings({"DEGARBLE_KERNEL_CACHE": "off"}) == CompileSettings()


# --------------------------------------------------------------------------------------------------
# Targets: what they claim to convert compiles, what they deny is refused by the compiler.


def test_lookup() -> None:
    assert [target(name) for name in TARGETS] == list(TARGETS.values())
    with pytest.raises(UnknownName, match="Did you mean sm_90a"):
        target("sm_90")


@pytest.mark.parametrize("name", TARGETS)
def test_names_are_those_of_the_capability(name: str) -> None:
    major, minor = TARGETS[name].capability
    assert name == f"sm_{major}{minor}a"


def test_devices_are_matched_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "a GPU")
    for known in TARGETS.values():
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda _device, known=known: known.capability
        )
        assert target_of_device() is known
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 9))
    with pytest.raises(MissingDevice, match=r"a GPU = \(8, 9\)"):
        target_of_device()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingDevice, match="Compiling needs no GPU"):
        target_of_device()


@pytest.mark.needs("cutlass")
def test_a_target_that_denies_a_conversion_cannot_compile_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = import_module("degarble.suites.support.probes.simt_probe_formats")
    kernels.compile_native(SM90A, CompileSettings())  # as it is, it compiles
    claims = targets.Target(**{**vars(SM90A), "converts_e2m1": True})
    monkeypatch.setattr(kernels, "TARGETS", {"sm_90a": claims})
    with pytest.raises(Exception, match=re.compile("e2m1x2", re.DOTALL)) as refusal:
        kernels.compile_native(claims, CompileSettings())
    assert "ptxas" in str(refusal.value)
