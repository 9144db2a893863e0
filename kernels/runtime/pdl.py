"""How a launch follows the one before it on a stream: set up while that one still runs.

Owns the two instructions of programmatic dependent launch (PTX ISA 9.1, griddepcontrol). A kernel
that calls `follow` first is launched with `use_pdl=EARLY`: its thread blocks may be there before
the launch in front has ended, and wait in `follow` until that has ended and what it wrote is seen.
So all of a kernel's own reads and writes come behind everything that was in front on the stream,
as without it; what is saved is the time that a launch takes to be set up.

Trap: whoever does not wait in all of its thread blocks may end before what is in front of it, and
the next one, which waits for it alone, would begin too soon. Refuses nothing: a kernel cannot.
Kept honest by the suites of the kernels that use it: graphs in which launches follow each other.
"""

from __future__ import annotations

from typing import Final

from cutlass import cute

EARLY: Final = True


def follow() -> None:
    """Wait for the launch in front, then let the next one be set up; the first thing in a kernel.

    In this order, or a chain of short kernels would be set up all at once.
    """
    if EARLY:
        cute.arch.griddepcontrol_wait()
    let_follow()


def let_follow() -> None:
    """Let the next launch be set up as soon as all thread blocks of this one have come here."""
    cute.arch.griddepcontrol_launch_dependents()


def wait_for_front() -> None:
    """Wait for the launch in front; what was read before this may be no output of that launch."""
    cute.arch.griddepcontrol_wait()
