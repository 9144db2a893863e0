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

from cutlass import Int32, Int64, cute

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
    """Ask for bytes of weights or of rows in L2, before `follow`; both are multiples of 16.

    Nothing is read: L2 is also where writes of the previous launch arrive, so its lines stay true.
    """
    cute.arch.inline_ptx(
        "cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};",
        write_only_types=[], read_only_args=[address, size],
    )  # fmt: skip


def fetch_line(address: Any) -> None:
    """Ask for the line of a small constant in L2, before `follow`; nothing is read, as above."""
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])


# ---- guesses -------------------------------------------------------------------------------------
#
# Where a number says which rows a kernel reads, their loads wait for its load. Such a number seldom
# changes while the launch in front runs: it is a position, or a page of a table. So a kernel may
# read it before the wait, as a guess, and compute addresses. Behind the wait it loads the number
# and the rows at once, and reads the rows again where the guess was wrong. No result depends on a
# guess; its addresses have to be inside of their tensors whatever it is.


def guessed(tensor: Any, at: Any) -> Any:
    """Return an element that an earlier launch may be writing, as an Int32; see above.

    It is read from L2, and no line stays in L1, where the true element is read behind the wait.
    """
    element = tensor.element_type
    assert element in (Int32, Int64), "positions, pages and the like are guessed"
    address = (tensor.iterator + at).toint()
    text = f"ld.relaxed.gpu.global.b{element.width} {{$w0}}, [{{$r0}}];"
    return Int32(cute.arch.inline_ptx(text, write_only_types=[element], read_only_args=[address]))


def wrong_guess(number: Any, guess: Any) -> Any:
    """Return whether an element is not what was guessed."""
    return number != guess


def fetch_row(tensor: Any, at: Any) -> None:
    """Ask L2 for a vector of a row whose place was guessed; nothing is read."""
    fetch_line((tensor[None, at].iterator).toint())
