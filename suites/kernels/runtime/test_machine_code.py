"""Facts of machine code: a kernel that spills is seen, and arithmetic that may be contracted."""

from __future__ import annotations

import subprocess
from importlib import import_module, metadata

import pytest

from degarble.harness.base.errors import MissingDependency, UnreadableFile
from degarble.kernels.runtime.compiling import (
    CompileSettings,
    cubin_facts,
    cuobjdump_path,
    fused_instructions,
    unstated_roundings,
)
from degarble.kernels.runtime.targets import TARGETS, Target

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
