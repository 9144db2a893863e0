"""Programmatic dependent launch (PDL): start a kernel's setup while the one before still runs.

PTX ISA 9.1, griddepcontrol. A kernel that calls `follow` first is launched with `use_pdl=EARLY`:
its thread blocks may start before the previous launch has ended, and wait in `follow` until it has
and its writes are visible. All reads and writes of the kernel therefore come after everything
earlier on the stream, as without PDL; only the setup time of the launch is saved.

Trap: every thread block has to wait. A kernel whose blocks do not may end before the launch
preceding it; the next kernel waits for this one only, and would start too soon.
"""

from __future__ import annotations

from typing import Any, Final

from cutlass import cute

EARLY: Final = True


def follow() -> None:
    """Wait for the previous launch, then let the next one be set up; call it first in a kernel.

    In the opposite order a chain of short kernels would be set up all at once.
    """
    if EARLY:
        cute.arch.griddepcontrol_wait()
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
