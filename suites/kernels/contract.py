"""What a kernel registers to be held to the laws of test_contract.py, and how bits are compared.

Each family of kernels has a `contract.py`, which lists `CODE`: forms with what is derived for their
machine code; `JUDGED`: cases, their comparison with a definition, and seeds; and `REPLAYS`:
launches that a graph repeats on other data. What operands are refused is derived from descriptors:
runtime/kernel_cases.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from degarble.kernels.runtime.compiling import (
    CompiledKernel,
    CompileSettings,
    cubin_facts,
    fused_instructions,
    unstated_roundings,
)
from degarble.kernels.runtime.modules import kernel_named, module_of

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

SETTINGS = CompileSettings()
POISON = 0xAA  # of every byte of an output before a launch
EVERYWHERE = (pytest.mark.h200, pytest.mark.b200)
HOPPER, BLACKWELL = (pytest.mark.h200,), (pytest.mark.b200,)


def kernels_of(name: str) -> ModuleType:
    """Import the module of a kernel; needs the DSL."""
    return import_module(module_of(name))


_WAIT = "griddepcontrol.wait"
_GUESS = "ld.relaxed.gpu.global"
_LABEL = re.compile(r"\$\w+:")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+)")
_ACCESSES = (
    *("ld.global", "st.global", "red.global", "atom.global"),
    *("cp.async.c", "cp.async.bulk.shared", "cp.async.bulk.tensor", "cp.async.bulk.global"),
)


@dataclass(frozen=True)
class MachineCode:
    """A form of a kernel, and the bounds and counts that were derived for it."""

    kernel: str
    form: Any
    registers: int = 255  # of a thread, at most
    shared_bytes: int | None = None  # at most
    launched: int = 1  # kernels
    fused: int | None = None  # fused instructions, where their number was derived
    counts: Mapping[str, int] = field(default_factory=dict)  # of texts in the PTX
    has: Mapping[str, bool] = field(default_factory=dict)  # texts that are there or are not
    more: Callable[[CompiledKernel, Any], None] = lambda _kernel, _form: None  # of its own
    reads_early: bool = False  # what the previous launch does not write
    slow: bool = False

    @property
    def name(self) -> str:
        """One line that finds the form again."""
        return "-".join([self.kernel, *_facts_of(self.form)])

    def compile(self) -> CompiledKernel:
        """Compile the form: once in a process."""
        several = "." in self.kernel  # descriptors of a module
        module: Any = kernel_named(self.kernel) if several else kernels_of(self.kernel)
        kernel: CompiledKernel = module.compile_form(self.form, SETTINGS)
        again: CompiledKernel = module.compile_form(self.form, SETTINGS)
        assert again is kernel
        return again

    def require(self, kernel: CompiledKernel) -> None:
        """Raise where a compiled kernel is not as derived."""
        assert f".target {self.form.target}\n" in kernel.ptx
        found = cubin_facts(kernel.cubin)
        assert len(found) == self.launched
        for facts in found:
            assert not facts.spills, facts
            assert facts.registers <= self.registers, facts
            if self.shared_bytes is not None:
                assert facts.shared_bytes <= self.shared_bytes, facts
        assert unstated_roundings(kernel.ptx) == ()
        if not self.reads_early:
            require_waits_before_it_reads(kernel.ptx)
        if self.fused is not None:
            assert len(fused_instructions(kernel.ptx)) == self.fused
        assert {text: kernel.ptx.count(text) for text in self.counts} == self.counts
        assert {text: text in kernel.ptx for text in self.has} == self.has
        self.more(kernel, self.form)


def require_waits_before_it_reads(ptx: str) -> None:
    """Raise where a kernel that starts early touches memory before the previous launch has ended.

    While it lives the previous launch may still write, so nothing it reads is constant.
    """
    assert "ld.global.nc" not in ptx or _WAIT not in ptx
    for kernel in ptx.split(".visible .entry")[1:]:
        for access in _ACCESSES:
            assert not 0 <= kernel.find(access) < kernel.find(_WAIT), access


def require_early_reads_alone(ptx: str, weights: int, *, guesses: bool = False) -> None:
    """Raise where a kernel does more before its wait than to read so many vectors of weights.

    With guesses it reads those too, past L1: a line there would hide the true number behind the
    wait. Other kernels of the module have to wait before they read.
    """
    assert "ld.global.nc" not in ptx
    early = 0
    for kernel in ptx.split(".visible .entry")[1:]:
        before, behind = parted_by_its_waits(kernel)
        if guesses and _GUESS not in before:
            require_waits_before_it_reads(".visible .entry" + kernel)
            continue
        early += 1
        assert before.count("ld.global") == weights
        assert guesses or _GUESS not in before
        assert _GUESS not in behind, _GUESS
        for access in _ACCESSES[1:]:
            assert access not in before, access
    assert early


def parted_by_its_waits(kernel: str) -> tuple[str, str]:
    """Return the lines of an entry that may run before any wait, and those that may run behind.

    Thread blocks of different work may wait at different places.
    """
    assert "brx." not in kernel  # branches by a table
    lines = [line.strip() for line in kernel.splitlines()]
    labels = {line[:-1]: at for at, line in enumerate(lines) if _LABEL.fullmatch(line)}
    waits = [at for at, line in enumerate(lines) if _WAIT in line]
    assert waits
    found = []
    for starts in ([0], [at + 1 for at in waits]):
        seen: set[int] = set()
        while starts:
            at = starts.pop()
            while at < len(lines) and at not in seen and at not in waits:
                seen.add(at)
                target = _BRANCH.search(lines[at])
                if target:
                    starts.append(labels[target[1]])
                # Labels of inline text are local to it: what follows such a loop is reached.
                if (target and lines[at].startswith("bra")) or lines[at].startswith("ret"):
                    break
                at += 1
        found.append("\n".join(lines[at] for at in sorted(seen)))
    return found[0], found[1]


@dataclass(frozen=True)
class Judged:
    """How numbers of a kernel are judged: cases with names, and their comparison on a GPU."""

    kernel: str
    cases: Sequence[Any]
    mismatch: Callable[[Any], str]
    fuzzed: Callable[[int, int], list[Any]]  # by seed and count
    seeds: int
    at_once: int
    launch: Callable[[Any], Any] | None = None  # where a case is one launch: it runs twice
    repeated: int = 10  # fuzzed cases that run twice
    devices: tuple[pytest.MarkDecorator, ...] = EVERYWHERE
    repeat_seed: int = 99


@dataclass(frozen=True)
class Detection:
    """A comparison that has to see one wrong bit: `launch` of `checks` is replaced."""

    name: str
    checks: ModuleType
    launch: str
    mismatch: Callable[[Any], str]
    case: Any
    definition: Callable[..., Any]  # what the launch gives, of the same arguments


class Round(NamedTuple):
    """One replay: what inputs become, and outputs have to be then, or how they are judged."""

    inputs: Sequence[Tensor]
    wanted: Callable[[], Any] = tuple
    mismatch: Callable[[], str] | None = None


@dataclass
class Replay:
    """A launch on tensors of a GPU; outputs are poisoned before each replay."""

    launch: Callable[[], object]
    inputs: Sequence[Tensor]
    outputs: Any
    rounds: Iterable[Round]
    in_place: bool = False  # outputs are inputs
    scratch: Any = None  # poisoned too, and not compared
    poison: int = POISON  # 0xFF where a budget judges: all floats are NaN then


@dataclass(frozen=True)
class ReplayCase:
    """A name and what allocates on a GPU."""

    name: str
    make: Callable[[], Replay]
    devices: tuple[pytest.MarkDecorator, ...] = EVERYWHERE


def _facts_of(form: Any) -> Iterator[str]:
    for fact in vars(form).values():
        if is_dataclass(fact):
            yield from _facts_of(fact)
        else:
            yield str(fact)


def tensors_of(made: Any) -> Iterator[Tensor]:
    """Yield the tensors of a result, whatever holds them."""
    if isinstance(made, torch.Tensor):
        yield made
    elif made is not None:
        for part in made.values() if isinstance(made, Mapping) else made:
            yield from tensors_of(part)


def words_of(made: Any) -> list[Tensor]:
    """Return the bytes of a result's tensors on the CPU: a NaN is equal to itself alone."""
    return [tensor.contiguous().view(-1).view(torch.uint8).cpu() for tensor in tensors_of(made)]


def same_bits(one: Any, other: Any) -> bool:
    """Return whether two results have the same tensors, bit for bit."""
    pairs = zip(words_of(one), words_of(other), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def poison(made: Any, byte: int = POISON) -> None:
    """Fill a result's tensors with a byte that no kernel leaves by chance."""
    for tensor in tensors_of(made):
        tensor.view(torch.uint8).fill_(byte)
