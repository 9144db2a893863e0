"""PTX that the DSL lacks, as used by sparse attention on Hopper.

Zero-filling and predicated 16-byte copies, predicated loads, mbarrier arrivals, float32 access to
shared memory of this and of other thread blocks of the cluster, approximate exp2 and log2.
"""

from typing import Any

from cutlass import Float32, Uint32

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.gemm.w4a16_instructions import emit


def copy_16(target: Any, source: Any, size: Any) -> None:
    """Issue a 16-byte copy from global to shared memory; size 0 writes zeros instead."""
    text = "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};"
    emit(text, [], target, source, size)


def copy_16_at(target: tuple[Any, int], source: tuple[Any, int], size: Any) -> None:
    """Issue a 16-byte copy as `copy_16` does, between addresses with constant offsets."""
    (to, target_offset), (start, source_offset) = target, source
    text = (
        f"cp.async.cg.shared.global [{{$r0}} + {target_offset}], "
        f"[{{$r1}} + {source_offset}], 16, {{$r2}};"
    )
    emit(text, [], to, start, size)


def end_of_copies() -> None:
    """Wait for this thread's copies."""
    emit("cp.async.wait_all;", [])


def arrive_behind_copies(barrier: Any) -> None:
    """Arrive at a barrier as soon as this thread's copies so far have landed."""
    # noinc: the arrival is part of the barrier's initial count.
    emit("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{$r0}];", [], barrier)


def words_if(address: Any, present: Any, count: int) -> list[Any]:
    """Read words from global memory, or zeros."""
    names = ", ".join(f"{{$w{i}}}" for i in range(count))
    zeros = " ".join(f"mov.b32 {{$w{i}}}, 0;" for i in range(count))
    text = (
        f"{{ .reg .pred there; setp.ne.u32 there, {{$r1}}, 0; {zeros} "
        f"@there ld.global.v{count}.b32 {{{names}}}, [{{$r0}}]; }}"
    )
    return list(emit(text, [Uint32] * count, address, present))


def eight_bytes_twice_if(address: Any, distance: int, present: Any) -> list[Any]:
    """Read eight bytes of global memory twice, so far apart, or zeros."""
    text = (
        "{ .reg .pred there; setp.ne.u32 there, {$r1}, 0; "
        "mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; mov.b32 {$w2}, 0; mov.b32 {$w3}, 0; "
        "@there ld.global.v2.b32 {{$w0}, {$w1}}, [{$r0}]; "
        f"@there ld.global.v2.b32 {{{{$w2}}, {{$w3}}}}, [{{$r0}} + {distance}]; }}"
    )
    return list(emit(text, [Uint32] * 4, address, present))


def word_if(address: Any, present: Any) -> Any:
    """Read a word from global memory, or zero."""
    text = (
        "{ .reg .pred there; setp.ne.u32 there, {$r1}, 0; mov.b32 {$w0}, 0; "
        "@there ld.global.b32 {$w0}, [{$r0}]; }"
    )
    return emit(text, [Uint32], address, present)


def scale_if(address: Any, present: Any, size: int) -> Any:
    """Read one or two bytes from global memory, or zeros."""
    # Trap: read to 16 bits it would be converted at once, and so waited for: a latency of memory a
    # tile. A load of one or two bytes may write a whole register.
    text = (
        "{ .reg .pred there; setp.ne.u32 there, {$r1}, 0; mov.b32 {$w0}, 0; "
        f"@there ld.global.u{8 * size} {{$w0}}, [{{$r0}}]; }}"
    )
    return emit(text, [Uint32], address, present)


def index_if(address: Any, present: Any) -> Any:
    """Read a word from global memory, or -1."""
    text = (
        "{ .reg .pred there; setp.ne.u32 there, {$r1}, 0; mov.b32 {$w0}, -1; "
        "@there ld.global.b32 {$w0}, [{$r0}]; }"
    )
    return emit(text, [Uint32], address, present)


def store_word(address: Any, word: Any) -> None:
    """Write a word to shared memory."""
    emit("st.shared.b32 [{$r0}], {$r1};", [], address, word)


def store_bits(address: Any, word: Any, bits: int) -> None:
    """Write the low 8 or 16 bits of a word to shared memory."""
    text = f"{{ .reg .u16 low; cvt.u16.u32 low, {{$r1}}; st.shared.u{bits} [{{$r0}}], low; }}"
    emit(text, [], address, word)


def store_number(address: Any, number: Any) -> None:
    """Write a float32 to shared memory."""
    emit("st.shared.f32 [{$r0}], {$r1};", [], address, number)


def number_at(address: Any) -> Any:
    """Read a float32 from shared memory."""
    return emit("ld.shared.f32 {$w0}, [{$r0}];", [Float32], address)


def power_of_two(exponent: Any) -> Any:
    """Return 2**exponent; PTX ISA 9.1, ex2.approx: at most two float32 steps off, 0 of -inf."""
    return emit("ex2.approx.ftz.f32 {$w0}, {$r0};", [Float32], exponent)


def binary_logarithm(number: Any) -> Any:
    """Return log2; PTX ISA 9.1, lg2.approx: -inf of 0."""
    return emit("lg2.approx.ftz.f32 {$w0}, {$r0};", [Float32], number)


def larger(left: Any, right: Any) -> Any:
    """Return the larger of two numbers; a NaN operand is ignored."""
    return emit("max.f32 {$w0}, {$r0}, {$r1};", [Float32], left, right)


def pair_rounded(low: Any, high: Any) -> Any:
    """Return two numbers rounded to BF16 in a word."""
    return emit("cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", [Uint32], low, high)


def store_pair(address: Any, low: Any, high: Any) -> None:
    """Write two float32 numbers to global memory."""
    emit("st.global.v2.f32 [{$r0}], {{$r1}, {$r2}};", [], address, low, high)


def store_single(address: Any, number: Any) -> None:
    """Write a float32 number to global memory."""
    emit("st.global.f32 [{$r0}], {$r1};", [], address, number)


def store_16(address: Any, words: list[Any]) -> None:
    """Write 16 bytes to global memory."""
    emit("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", [], address, *words)


def single_at(address: Any) -> Any:
    """Read a float32 number from global memory."""
    return emit("ld.global.f32 {$w0}, [{$r0}];", [Float32], address)


def singles_at(address: Any) -> list[Any]:
    """Read four float32 numbers from global memory."""
    text = "ld.global.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
    return list(emit(text, [Float32] * 4, address))


def fetch_line_if(address: Any, present: Any) -> None:
    """Ask for a line of a cache in L2 where it is wanted; nothing is read."""
    text = "{ .reg .pred there; setp.ne.u32 there, {$r1}, 0; @there prefetch.global.L2 [{$r0}]; }"
    emit(text, [], address, present)


def word_at(address: Any) -> Any:
    """Read a word from global memory."""
    return emit("ld.global.b32 {$w0}, [{$r0}];", [Uint32], address)


def store_8(address: Any, words: list[Any]) -> None:
    """Write 8 bytes to global memory."""
    emit("st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", [], address, *words)


def store_numbers(address: Any, first: Any, second: Any) -> None:
    """Write two float32 to shared memory."""
    emit("st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};", [], address, first, second)


def numbers_of_rank(address: Any, rank: int, count: int) -> list[Any]:
    """Read float32 numbers from the shared memory of a thread block of the cluster."""
    names = ", ".join(f"{{$w{i}}}" for i in range(count))
    text = (
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, {$r0}, {$r1}; "
        f"ld.shared::cluster.v{count}.f32 {{{names}}}, [there]; }}"
    )
    return list(emit(text, [Float32] * count, address, Uint32(rank)))


def copy_16_if(target: Any, source: Any, size: Any, taken: Any) -> None:
    """Issue a 16-byte copy, or write zeros, if `taken`."""
    text = (
        "{ .reg .pred part; setp.ne.u32 part, {$r3}, 0; "
        "@part cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2}; }"
    )
    emit(text, [], target, source, size, ops.select(taken, Uint32(1), Uint32(0)))


def store_16_shared_if(address: Any, words: list[Any], taken: Any) -> None:
    """Write 16 bytes to shared memory if `taken`."""
    text = (
        "{ .reg .pred part; setp.ne.u32 part, {$r5}, 0; "
        "@part st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}; }"
    )
    emit(text, [], address, *words, ops.select(taken, Uint32(1), Uint32(0)))


def store_16_global_if(address: Any, words: list[Any], taken: Any) -> None:
    """Write 16 bytes to global memory if `taken`."""
    text = (
        "{ .reg .pred part; setp.ne.u32 part, {$r5}, 0; "
        "@part st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}; }"
    )
    emit(text, [], address, *words, ops.select(taken, Uint32(1), Uint32(0)))


def store_8_if(address: Any, words: list[Any], taken: Any) -> None:
    """Write 8 bytes to global memory if `taken`."""
    text = (
        "{ .reg .pred part; setp.ne.u32 part, {$r3}, 0; "
        "@part st.global.v2.b32 [{$r0}], {{$r1}, {$r2}}; }"
    )
    emit(text, [], address, *words, ops.select(taken, Uint32(1), Uint32(0)))


def store_single_if(address: Any, number: Any, taken: Any) -> None:
    """Write a float32 number to global memory if `taken`."""
    text = "{ .reg .pred part; setp.ne.u32 part, {$r2}, 0; @part st.global.f32 [{$r0}], {$r1}; }"
    emit(text, [], address, number, ops.select(taken, Uint32(1), Uint32(0)))


def numbers_at(address: Any, count: int) -> list[Any]:
    """Read two or four float32 from shared memory."""
    names = ", ".join(f"{{$w{i}}}" for i in range(count))
    text = f"ld.shared.v{count}.f32 {{{names}}}, [{{$r0}}];"
    return list(emit(text, [Float32] * count, address))


def give_numbers(address: Any, numbers: list[Any], barrier: Any, rank: Any) -> None:
    """Write two or four float32 to another thread block; its barrier counts the bytes."""
    count = len(numbers)
    names = ", ".join(f"{{$r{i + 3}}}" for i in range(count))
    text = (
        "{ .reg .b32 there, counts; mapa.shared::cluster.u32 there, {$r0}, {$r2}; "
        "mapa.shared::cluster.u32 counts, {$r1}, {$r2}; "
        f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v{count}.f32 "
        f"[there], {{{names}}}, [counts]; }}"
    )
    emit(text, [], address, barrier, rank, *numbers)


def arrive_at_rank(barrier: Any, rank: Any, one: Any) -> None:
    """Arrive with one thread at the barrier of another thread block of the cluster."""
    text = (
        "{ .reg .pred one; .reg .b32 there; setp.ne.u32 one, {$r2}, 0; "
        "mapa.shared::cluster.u32 there, {$r0}, {$r1}; "
        "@one mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there]; }"
    )
    emit(text, [], barrier, rank, ops.select(one, Uint32(1), Uint32(0)))


def await_phase_of_cluster(barrier: Any, phase: Any) -> None:
    """Wait for a phase in which other thread blocks of the cluster arrive."""
    text = """{
    .reg .pred ended;
    AGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 ended, [{$r0}], {$r1};
    @ended bra ENDED;
    bra AGAIN;
    ENDED:
    }"""
    emit(text, [], barrier, phase)


def store_one_of(address: Any, one: list[Any], other: list[Any], first: Any) -> None:
    """Write four float32 to shared memory: `one` if `first`, else `other`."""
    text = (
        "{ .reg .pred one; setp.ne.u32 one, {$r1}, 0; "
        "@one st.shared.v4.f32 [{$r0}], {{$r2}, {$r3}, {$r4}, {$r5}}; "
        "@!one st.shared.v4.f32 [{$r0}], {{$r6}, {$r7}, {$r8}, {$r9}}; }"
    )
    emit(text, [], address, ops.select(first, Uint32(1), Uint32(0)), *one, *other)
