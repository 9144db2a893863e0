"""Device code for rows of whole lines: a thread block has a row, 1,024 columns a warp.

A warp has the columns of 32 of the norm's lanes (rows/problem.py), a thread four chunks of eight
values: half of a block of each of four lanes. So every load and store of a warp is 512 bytes side
by side, and sums keep the order of the norm. Addresses are the row's, and constants.

What a thread needs later it may keep in shared memory: its float32 weights, and its chunks of the
next row. No other thread reads them, so no barrier is needed, and they take no registers.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.primitives.device_words import brief_factor, numbers_of, square_root
from degarble.kernels.rows.problem import LANES, OF_WHOLE_WARP, SLOTS_OF_LANE, factor_of

CHUNKS = 2 * SLOTS_OF_LANE  # of a thread
WORDS = 4  # of a chunk
CHUNK_BYTES = 16
AT_ONCE = LANES * CHUNK_BYTES  # bytes that a warp reads at once
OF_WARP = CHUNKS // SLOTS_OF_LANE * LANES  # chunks of a slot


def places_of(warps: int) -> list[int]:
    """Return where a thread's chunks lie behind its first one, in bytes."""
    slot = warps * OF_WARP * CHUNK_BYTES
    return [of_slot * slot + turn * AT_ONCE for of_slot in range(SLOTS_OF_LANE) for turn in (0, 1)]


def row_bytes(warps: int) -> int:
    """Return the bytes of a row of BF16 values."""
    return warps * CHUNKS * AT_ONCE


def first_chunk(thread: Any) -> Any:
    """Return the number of a thread's first chunk in its row."""
    return thread // LANES * OF_WARP + thread % LANES


def address_of(tensor: Any, offset: Any) -> Any:
    """Return an address behind a tensor's first one, both in bytes."""
    return tensor.iterator.toint() + Int64(offset)


def read_words(address: Any, offset: int) -> list[Any]:
    """Read four words that lie `offset` bytes behind an address."""
    text = f"ld.global.v4.b32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}+{offset}];"
    return list(
        cute.arch.inline_ptx(text, write_only_types=[Uint32] * WORDS, read_only_args=[address])
    )


def write_words(address: Any, offset: int, words: list[Any]) -> None:
    """Write four words, or one, `offset` bytes behind an address."""
    listed = ", ".join(f"{{$r{place}}}" for place in range(1, len(words) + 1))
    kind, listed = ("v4.b32", f"{{{listed}}}") if len(words) > 1 else ("b32", listed)
    text = f"st.global.{kind} [{{$r0}}+{offset}], {listed};"
    cute.arch.inline_ptx(text, read_only_args=[address, *words])


def write_byte(address: Any, offset: int, word: Any) -> None:
    """Write the low byte of a word `offset` bytes behind an address."""
    text = f"st.global.b8 [{{$r0}}+{offset}], {{$r1}};"
    cute.arch.inline_ptx(text, read_only_args=[address, word])


def row_registers(words: int = WORDS) -> Any:
    """Make registers for a thread's chunks of a row."""
    return cute.make_rmem_tensor(cute.make_layout((words, CHUNKS)), Uint32)


def read_row(registers: Any, address: Any, warps: int) -> None:
    """Read a thread's chunks of a row of BF16 values."""
    for chunk, place in enumerate(places_of(warps)):
        for word, read in enumerate(read_words(address, place)):
            registers[word, chunk] = read


def read_weights(registers: Any, address: Any, warps: int) -> None:
    """Read a thread's weights: BF16, or float32 where registers hold eight words of a chunk."""
    times = registers.shape[0] // WORDS
    for chunk, place in enumerate(places_of(warps)):
        for part in range(times):
            words = read_words(address, times * place + part * CHUNK_BYTES)
            for word, read in enumerate(words):
                registers[part * WORDS + word, chunk] = read


def place_of(part: Any, thread: Any, warps: int) -> Any:
    """Return which 16 bytes of shared memory a thread has for a part: a warp's are side by side."""
    return part * (warps * LANES) + thread


def weights_apart(allocator: Any, warps: int) -> Any:
    """Allocate a row's weights, two vectors of four float32 a chunk."""
    vectors = 2 * CHUNKS * warps * LANES
    layout = cute.make_layout((WORDS, vectors), stride=(1, WORDS))
    return allocator.allocate_tensor(Float32, layout, CHUNK_BYTES)


def keep_weights(shared: Any, registers: Any, place: tuple[Any, int]) -> None:
    """Write a thread's weights as float32; `place` is thread and warps of the thread block."""
    thread, warps = place
    for chunk, words in enumerate(chunks_of(registers)):
        numbers = weight_numbers(words)
        for half in (0, 1):
            made = cute.make_rmem_tensor(WORDS, Float32)
            for word in range(WORDS):
                made[word] = numbers[half * WORDS + word]
            cute.autovec_copy(made, shared[None, place_of(2 * chunk + half, thread, warps)])


def kept_weights(shared: Any, chunk: int, place: tuple[Any, int]) -> list[Any]:
    """Return the weights of a chunk that keep_weights wrote."""
    thread, warps = place
    numbers: list[Any] = []
    for half in (0, 1):
        read = cute.make_rmem_tensor(WORDS, Float32)
        cute.autovec_copy(shared[None, place_of(2 * chunk + half, thread, warps)], read)
        numbers += [Float32(read[word]) for word in range(WORDS)]
    return numbers


def row_apart(allocator: Any, thread: Any, warps: int, count: int) -> Any:
    """Allocate rows of BF16 values; return the shared address of a thread's first chunk."""
    layout = cute.make_layout(count * row_bytes(warps) // 4)
    row = allocator.allocate_tensor(Uint32, layout, CHUNK_BYTES)
    return Int32(row.iterator.toint()) + place_of(0, thread, warps) * CHUNK_BYTES


def ask_for_row(shared: Any, address: Any, warps: int) -> None:
    """Start to copy a thread's chunks of a row, over what it has already read."""
    for chunk, place in enumerate(places_of(warps)):
        at = place_of(chunk, 0, warps) * CHUNK_BYTES
        text = f"cp.async.cg.shared.global [{{$r0}}+{at}], [{{$r1}}+{place}], {CHUNK_BYTES};"
        cute.arch.inline_ptx(text, read_only_args=[shared, address])
    cute.arch.cp_async_commit_group()


def asked_row(shared: Any, warps: int) -> list[list[Any]]:
    """Wait for the copy of the next row, and return the words of a thread's chunks."""
    cute.arch.cp_async_wait_group(0)
    made = []
    for chunk in range(CHUNKS):
        at = place_of(chunk, 0, warps) * CHUNK_BYTES
        text = f"ld.shared.v4.b32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}+{at}];"
        words = cute.arch.inline_ptx(
            text, write_only_types=[Uint32] * WORDS, read_only_args=[shared]
        )
        made.append(list(words))
    return made


def chunks_of(registers: Any) -> list[list[Any]]:
    """Return the words of each chunk."""
    # Trap: an element of a Uint32 tensor arrives as a signed Int32.
    return [
        [Uint32(registers[word, chunk]) for word in range(registers.shape[0])]
        for chunk in range(CHUNKS)
    ]


def weight_numbers(words: list[Any]) -> list[Any]:
    """Return the float32 weights of a chunk, from BF16 or from float32."""
    return numbers_of(words) if len(words) == WORDS else [ops.number_of(word) for word in words]


def warp_sum(halves: list[Any]) -> Any:
    """Sum the halves of blocks that a warp's threads have, as the norm's lanes are folded.

    A pair of threads has a block; blocks of a lane are in one thread, lanes 16 apart as well.
    """
    blocks = [ops.add_rn(half, cute.arch.shuffle_sync_bfly(half, offset=1)) for half in halves]
    lanes = [ops.add_rn(blocks[turn], blocks[turn + 2]) for turn in (0, 1)]
    total = ops.add_rn(*lanes)
    for distance in (16, 8, 4, 2):
        total = ops.add_rn(total, cute.arch.shuffle_sync_bfly(total, offset=distance))
    return total


def folded(numbers: list[Any]) -> Any:
    """Return the sum of warps: sixteen, folded by 8, 4, 2, 1, of which absent ones are zero."""
    for distance in (8, 4, 2, 1):
        pairs = [numbers[at::distance][:2] for at in range(min(distance, len(numbers)))]
        numbers = [ops.add_rn(*pair) if len(pair) > 1 else pair[0] for pair in pairs]
    return numbers[0]


@cute.jit
def row_total(
    sSums: Any,
    number: Any,
    place: tuple[Any, Any, Any],
    rows: tuple[Any, int],
    warps: cutlass.Constexpr,
) -> Any:
    """Sum up the warps of a row; `place` is lane, warp, and one of two turns of shared memory.

    `rows` are which row of the thread block's it is, and how many those are.
    """
    row, together = rows
    lane, warp, turn = place
    if lane == 0:
        sSums[warp, turn] = number
    if cutlass.const_expr(together > 1):
        cute.arch.barrier(barrier_id=row + 1, number_of_threads=warps * LANES)
    else:
        cute.arch.sync_threads()
    return folded([Float32(sSums[each, turn]) for each in range(warps)])


def brief_factor_of(total: Any, epsilon: Any, warps: int) -> Any:
    """Return a row's norm factor, which is factor_of, from its total."""
    columns = warps * OF_WHOLE_WARP
    return brief_factor(
        total, epsilon, columns, lambda total: factor_of(total, columns, epsilon, square_root)
    )
