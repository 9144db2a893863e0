"""Programmatic dependent launch (PDL): start a kernel's setup while earlier ones still run.

PTX ISA 9.1, griddepcontrol. A kernel that calls `follow` is launched with `use_pdl=EARLY`: its
thread blocks may start before the previous launch has ended, and wait in `follow` until it has and
its writes are visible. All reads and writes of the kernel therefore come after everything earlier
on the stream, as without PDL; only the setup time of the launch is saved. The next launch may be
set up as soon as all thread blocks of this one have begun, so a chain of short kernels stands ready
together, each at its wait.

Traps. Every thread block has to wait: a kernel whose blocks do not may end before the launch
preceding it; the next kernel waits for this one only, and would start too soon. And what runs
before the wait may run while any earlier launch does: it may ask L2 for memory, and read none but
weights that nothing writes, or, past L1, a guess of what to ask for. Who reads more has a launch
in front that calls `wait_then_let_follow`.

And thread blocks that stand at their wait have places on processors. Where launches of about as
many blocks as there are processors all stand ready, a block takes the place of whichever ended, so
they lie ever more unevenly: of 128 blocks of mHC's coefficients up to nine on one processor and
none on fifty, 8.6 us instead of 3.1 (H200). Such a launch calls `wait_then_let_follow` too.
"""

from __future__ import annotations

from typing import Any, Final

from cutlass import cute

EARLY: Final = True


def follow() -> None:
    """Let the next launch be set up, then wait for the previous one; call it first in a kernel."""
    let_follow()
    if EARLY:
        wait_for_front()


def wait_then_let_follow() -> None:
    """Wait for the previous launch, and only then let the next one be set up.

    It is for a launch behind which one reads, before its own wait, what earlier launches made.
    """
    wait_for_front()
    let_follow()


def let_follow() -> None:
    """Let the next launch be set up once all thread blocks of this one have called this."""
    cute.arch.griddepcontrol_launch_dependents()


def wait_for_front() -> None:
    """Wait for the previous launch; reads before this must not touch its outputs."""
    cute.arch.griddepcontrol_wait()


def fetch_weights(address: Any, size: Any) -> None:
    """Ask for bytes of weights in L2, before `follow`; both are multiples of 16.

    Nothing is read: L2 is also where writes of the previous launch arrive, so its lines stay true.
    """
    cute.arch.inline_ptx(
        "cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};",
        write_only_types=[], read_only_args=[address, size],
    )  # fmt: skip


def fetch_line(address: Any) -> None:
    """Ask for the line of a small constant in L2, before `follow`; nothing is read, as above."""
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])
