"""The instructions by which sparse attention on Blackwell moves and hands over, each with operands.

Owns reads and writes of tensor memory of 16 lanes by 256 bits, which give a thread what wgmma gives
it: of row t // 4 and that eight further on, columns 2 (t % 4) and the next, eight a repeat; and the
arrival of a matrix instruction at a barrier. A read waits in the same text, so that nothing can use
what is not there yet. No kernel and no address lives here. Refuses nothing: a kernel cannot. Kept
honest by suites/kernels/attention/test_sm100_sparse_attention.py.
"""

from typing import Any

from cutlass import Float32, Uint32, cute

from degarble.kernels.attention import tensor_memory
from degarble.kernels.gemm.w4a16_instructions import emit


def read_fragment(address: Any, repeats: int) -> list[Any]:
    """Read so many repeats from an address in tensor memory; all are there on return."""
    count = repeats * tensor_memory.REPEAT_REGISTERS
    names = ", ".join(f"{{$w{i}}}" for i in range(count))
    text = (
        f"tcgen05.ld.sync.aligned.16x256b.x{repeats}.b32 {{{names}}}, [{{$r0}}];\n"
        "tcgen05.wait::ld.sync.aligned;"
    )
    return list(emit(text, [Float32] * count, address))


def write_fragment(address: Any, numbers: list[Any]) -> None:
    """Begin to write so many numbers of each thread to an address in tensor memory."""
    names = ", ".join(f"{{$r{i + 1}}}" for i in range(len(numbers)))
    repeats = len(numbers) // tensor_memory.REPEAT_REGISTERS
    text = f"tcgen05.st.sync.aligned.16x256b.x{repeats}.b32 [{{$r0}}], {{{names}}};"
    emit(text, [], address, *numbers)


def end_of_writes() -> None:
    """Wait for this warp's writes to tensor memory."""
    emit("tcgen05.wait::st.sync.aligned;", [])


def arrive_behind_products(barrier: Any) -> None:
    """Let a barrier count one as soon as this thread's matrix instructions so far are done."""
    with cute.arch.elect_one():
        text = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{$r0}];"
        emit(text, [], Uint32(barrier))
