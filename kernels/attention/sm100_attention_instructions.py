"""PTX of sparse attention on Blackwell: tensor-memory fragments and MMA arrivals at barriers.

A read or write of 16 lanes by 256 bits gives thread t what wgmma gives it: of row t // 4 and of the
row eight further on, columns 2 (t % 4) and the next, eight columns a repeat. The wait is in the
same asm text as the read, so that nothing can use a register before it is loaded.
"""

from typing import Any

from cutlass import Float32, Uint32, cute

from degarble.kernels.attention import tensor_memory
from degarble.kernels.gemm.w4a16_instructions import emit


def read_fragment(address: Any, repeats: int) -> list[Any]:
    """Read `repeats` repeats from an address in tensor memory; complete on return."""
    count = repeats * tensor_memory.REPEAT_REGISTERS
    names = ", ".join(f"{{$w{i}}}" for i in range(count))
    text = (
        f"tcgen05.ld.sync.aligned.16x256b.x{repeats}.b32 {{{names}}}, [{{$r0}}];\n"
        "tcgen05.wait::ld.sync.aligned;"
    )
    return list(emit(text, [Float32] * count, address))


def write_fragment(address: Any, numbers: list[Any]) -> None:
    """Issue the write of each thread's numbers to an address in tensor memory."""
    names = ", ".join(f"{{$r{i + 1}}}" for i in range(len(numbers)))
    repeats = len(numbers) // tensor_memory.REPEAT_REGISTERS
    text = f"tcgen05.st.sync.aligned.16x256b.x{repeats}.b32 [{{$r0}}], {{{names}}};"
    emit(text, [], address, *numbers)


def end_of_writes() -> None:
    """Wait for this warp's writes to tensor memory."""
    emit("tcgen05.wait::st.sync.aligned;", [])


def arrive_behind_products(barrier: Any) -> None:
    """Arrive once at a barrier when this thread's matrix instructions so far are done."""
    with cute.arch.elect_one():
        text = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{$r0}];"
        emit(text, [], Uint32(barrier))
