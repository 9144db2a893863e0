"""PTX instructions of W4A16 and of NVFP4 tiles that the DSL does not offer, each as one function.

Decoding of pairs of weights (an integer product on sm_90a, cvt on sm_100a), mma.sync.m16n8k16,
mbarriers with byte counts, the release of a stage after all reads of it, and reads of shared
memory, also of other thread blocks of the cluster.

A decoded weight is code times block scale, exact in BF16; on sm_90a it is times 2**-8, which the
kernel takes out of the sums; or exact in FP16, times 2**-7 (`decoded_halves`).
"""

from typing import Any

from cutlass import Float32, Uint32, cute

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.primitives.e2m1 import (
    HALF_SCALE_EXPONENT,
    PAIRS,
    SCALE_EXPONENT,
    bf16_pairs,
    fp16_pairs,
    fp16_pairs_by_products,
)

WORDS = 4  # of 16 bytes
SCALE_FACTOR = (SCALE_EXPONENT + 127) << 23  # the bits of a float32
HALF_SCALE_FACTOR = (HALF_SCALE_EXPONENT + 15 << 10) * 0x1_0001  # of FP16, twice


def emit(instruction: str, results: list[Any], *arguments: Any) -> Any:
    """Emit an instruction; {$w0} and on are results, {$r0} and on are arguments."""
    return cute.arch.inline_ptx(
        instruction, write_only_types=results, read_only_args=list(arguments)
    )


def begin_barrier(barrier: Any, arrivals: int) -> None:
    """Initialise a barrier for so many arrivals."""
    emit("mbarrier.init.shared::cta.b64 [{$r0}], {$r1};", [], barrier, Uint32(arrivals))


def expect(barrier: Any, size: Any, one: Any) -> None:
    """Arrive with one thread, and make the barrier wait for so many bytes as well."""
    text = """{
    .reg .pred one; setp.ne.u32 one, {$r2}, 0;
    @one mbarrier.arrive.expect_tx.shared::cta.b64 _, [{$r0}], {$r1};
    }"""
    emit(text, [], barrier, size, ops.select(one, Uint32(1), Uint32(0)))


def arrive(barrier: Any, one: Any) -> None:
    """Arrive with one thread."""
    text = """{
    .reg .pred one; setp.ne.u32 one, {$r1}, 0;
    @one mbarrier.arrive.shared::cta.b64 _, [{$r0}];
    }"""
    emit(text, [], barrier, ops.select(one, Uint32(1), Uint32(0)))


def await_phase(barrier: Any, phase: Any) -> None:
    """Wait until the phase of this parity has ended."""
    # Trap: labels in braces are local to them, so that this text may stand more than once.
    text = """{
    .reg .pred ended;
    AGAIN: mbarrier.try_wait.parity.shared::cta.b64 ended, [{$r0}], {$r1};
    @ended bra ENDED;
    bra AGAIN;
    ENDED:
    }"""
    emit(text, [], barrier, phase)


def has_ended(barrier: Any, phase: Any) -> Any:
    """Return 1 where the phase of this parity has ended, and 0 where it has not."""
    text = """{
    .reg .pred ended;
    mbarrier.test_wait.parity.shared::cta.b64 ended, [{$r0}], {$r1};
    selp.u32 {$w0}, 1, 0, ended;
    }"""
    return emit(text, [Uint32], barrier, phase)


def shared_words(address: Any, count: int) -> list[Any]:
    """Read 4, 8 or 16 bytes of shared memory."""
    if count == 1:
        return [emit("ld.shared.b32 {$w0}, [{$r0}];", [Uint32], address)]
    names = ", ".join(f"{{$w{i}}}" for i in range(count))
    text = f"ld.shared.v{count}.b32 {{{names}}}, [{{$r0}}];"
    return list(emit(text, [Uint32] * count, address))


def shared_byte(address: Any) -> Any:
    """Read a byte of shared memory."""
    return emit("ld.shared.u8 {$w0}, [{$r0}];", [Uint32], address)


def give_back(barrier: Any, words: list[Any], zero: Any, one: Any) -> None:
    """Arrive with one thread after every lane of the warp has received `words`; `zero` is 0."""
    # Trap: neither bar.warp.sync nor the release of an arrival waits for reads under way (the
    # machine code shows it), and the next TMA write may overtake them. So the address depends on
    # what all lanes have read, through `zero`, which the compiler cannot know to be 0.
    cute.arch.sync_warp()
    joined = " ".join(f"or.b32 all, all, {{$r{i}}};" for i in range(4, len(words) + 3))
    text = f"""{{
    .reg .b32 all; .reg .pred some, one;
    mov.b32 all, {{$r3}}; {joined} and.b32 all, all, {{$r1}};
    setp.ne.u32 some, all, 0; setp.ne.u32 one, {{$r2}}, 0;
    vote.sync.ballot.b32 all, some, 0xffffffff; add.u32 all, all, {{$r0}};
    @one mbarrier.arrive.shared::cta.b64 _, [all];
    }}"""
    emit(text, [], barrier, zero, ops.select(one, Uint32(1), Uint32(0)), *words)


def global_number(address: Any) -> Any:
    """Read a float32 at this point; a compiler would move a plain read to its first use."""
    return emit("ld.global.f32 {$w0}, [{$r0}];", [Float32], address)


def global_word(address: Any) -> Any:
    """Read 4 bytes of global memory at this point."""
    return emit("ld.global.b32 {$w0}, [{$r0}];", [Uint32], address)


def early_word(address: Any) -> Any:
    """Read 4 bytes of global memory that another launch may be writing: past L1, which keeps it."""
    return emit("ld.relaxed.gpu.global.b32 {$w0}, [{$r0}];", [Uint32], address)


def early_number(address: Any) -> Any:
    """Read a float32 of weights before the wait, apart from reads that come behind it."""
    return emit("ld.relaxed.gpu.global.f32 {$w0}, [{$r0}];", [Float32], address)


def global_byte(address: Any) -> Any:
    """Read a byte of global memory."""
    text = "{ .reg .u16 byte; ld.global.u8 byte, [{$r0}]; cvt.u32.u16 {$w0}, byte; }"
    return emit(text, [Uint32], address)


def global_half(address: Any) -> Any:
    """Read two bytes of global memory."""
    text = "{ .reg .u16 half; ld.global.u16 half, [{$r0}]; cvt.u32.u16 {$w0}, half; }"
    return emit(text, [Uint32], address)


def global_words(address: Any, count: int) -> list[Any]:
    """Read 8 or 16 bytes of global memory."""
    names = ", ".join(f"{{$w{i}}}" for i in range(count))
    text = f"ld.global.v{count}.b32 {{{names}}}, [{{$r0}}];"
    return list(emit(text, [Uint32] * count, address))


def chosen_bytes(low: Any, high: Any, selector: Any) -> Any:
    """Return the bytes of two words that a selector names (prmt)."""
    return emit("prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};", [Uint32], low, high, selector)


def store_words(address: Any, words: list[Any]) -> None:
    """Write 8 or 16 bytes to shared memory."""
    names = ", ".join(f"{{$r{i + 1}}}" for i in range(len(words)))
    emit(f"st.shared.v{len(words)}.b32 [{{$r0}}], {{{names}}};", [], address, *words)


def store_number(address: Any, number: Any) -> None:
    """Write a float32 to shared memory."""
    emit("st.shared.f32 [{$r0}], {$r1};", [], address, number)


def store_factors(address: Any, factors: tuple[Any, Any], known: Any) -> None:
    """Write two factors to 16 bytes of shared memory, and whether they are known.

    As they were read: ptxas would move arithmetic, and its wait for them, out of a loop.
    """
    text = "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r3}};"
    bits = [ops.bits_of(factor) for factor in factors]
    emit(text, [], address, *bits, ops.select(known, Uint32(1), Uint32(0)))


def shared_scale(address: Any) -> Any:
    """Return the product of two factors that `store_factors` wrote; 0 where they are not known."""
    text = """{
    .reg .pred known; .reg .b32 one, other; .reg .f32 a, b;
    ld.shared.v4.b32 {a, b, one, other}, [{$r0}];
    setp.ne.u32 known, one, 0; mul.rn.f32 a, a, b; selp.f32 {$w0}, a, 0f00000000, known;
    }"""
    return emit(text, [Float32], address)


def shared_number(address: Any, rank: int, ranks: int) -> Any:
    """Read a float32 from the shared memory of a thread block of the cluster."""
    if ranks == 1:
        return emit("ld.shared.f32 {$w0}, [{$r0}];", [Float32], address)
    text = """{
    .reg .b32 there; mapa.shared::cluster.u32 there, {$r0}, {$r1};
    ld.shared::cluster.f32 {$w0}, [there];
    }"""
    return emit(text, [Float32], address, Uint32(rank))


def shared_numbers(address: Any, rank: int, ranks: int) -> list[Any]:
    """Read four float32 from the shared memory of a thread block of the cluster."""
    four = "{{$w0}, {$w1}, {$w2}, {$w3}}"
    if ranks == 1:
        return list(emit(f"ld.shared.v4.f32 {four}, [{{$r0}}];", [Float32] * 4, address))
    text = f"""{{
    .reg .b32 there; mapa.shared::cluster.u32 there, {{$r0}}, {{$r1}};
    ld.shared::cluster.v4.f32 {four}, [there];
    }}"""
    return list(emit(text, [Float32] * 4, address, Uint32(rank)))


def store_rounded(address: Any, number: Any) -> None:
    """Write a float32 as BF16, rounded to nearest even."""
    text = "{ .reg .b16 code; cvt.rn.bf16.f32 code, {$r1}; st.global.b16 [{$r0}], code; }"
    emit(text, [], address, number)


def store_four_rounded(address: Any, numbers: list[Any]) -> None:
    """Write four float32 as BF16, rounded to nearest even, to an address of 8 bytes."""
    text = """{
    .reg .b32 low, high;
    cvt.rn.bf16x2.f32 low, {$r2}, {$r1}; cvt.rn.bf16x2.f32 high, {$r4}, {$r3};
    st.global.v2.b32 [{$r0}], {low, high};
    }"""
    emit(text, [], address, *numbers)


def block_scales(word: Any, native: bool) -> list[Any]:
    """Return the two scales in a word's low half, each twice: BF16 times 2**118, or FP16."""
    if native:
        text = """{
        .reg .b16 codes, none; .reg .b32 both;
        mov.b32 {codes, none}, {$r0};
        cvt.rn.f16x2.e4m3x2 both, codes;
        prmt.b32 {$w0}, both, 0, 0x1010;
        prmt.b32 {$w1}, both, 0, 0x3232;
        }"""
    else:
        text = f"""{{
        .reg .b16 codes, none, low, high; .reg .b32 both; .reg .f32 f, factor;
        mov.b32 {{codes, none}}, {{$r0}};
        cvt.rn.f16x2.e4m3x2 both, codes;
        mov.b32 {{low, high}}, both;
        mov.b32 factor, {SCALE_FACTOR};
        cvt.f32.f16 f, low; mul.rn.f32 f, f, factor; cvt.rn.bf16x2.f32 {{$w0}}, f, f;
        cvt.f32.f16 f, high; mul.rn.f32 f, f, factor; cvt.rn.bf16x2.f32 {{$w1}}, f, f;
        }}"""
    return list(emit(text, [Uint32, Uint32], word))


def decoded(word: Any, scale: Any, native: bool) -> list[Any]:
    """Return four words of two BF16 weights: codes j and j + 4 times 2**-8, or 2 j and 2 j + 1.

    The cvt of sm_100a (PTX ISA 9.1) gives FP16, in which the product with the scale is exact as
    well.
    """
    if not native:
        return [
            emit("mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", [Uint32], pair, scale)
            for pair in bf16_pairs(word, Uint32)
        ]
    pairs = "\n".join(
        f"cvt.rn.f16x2.e2m1x2 both, b{i}; mul.rn.f16x2 both, both, {{$r1}}; "
        f"mov.b32 {{low, high}}, both; cvt.f32.f16 f, low; cvt.f32.f16 g, high; "
        f"cvt.rn.bf16x2.f32 {{$w{i}}}, g, f;"
        for i in range(PAIRS)
    )
    text = f"""{{
    .reg .b8 b0, b1, b2, b3; .reg .b16 low, high; .reg .b32 both; .reg .f32 f, g;
    mov.b32 {{b0, b1, b2, b3}}, {{$r0}};
    {pairs}
    }}"""
    return list(emit(text, [Uint32] * PAIRS, word, scale))


def half_scales(word: Any) -> Any:
    """Return the two scales in a word's low half, times 2**7 as FP16."""
    text = f"""{{
    .reg .b16 codes, none; .reg .b32 both, factor;
    mov.b32 {{codes, none}}, {{$r0}}; mov.b32 factor, {HALF_SCALE_FACTOR};
    cvt.rn.f16x2.e4m3x2 both, codes; mul.rn.f16x2 {{$w0}}, both, factor;
    }}"""
    return emit(text, [Uint32], word)


def twice(both: Any, which: int) -> Any:
    """Return the lower or the upper half of a word in both halves."""
    name = ("low", "high")[which]
    text = f"""{{
    .reg .b16 low, high; mov.b32 {{low, high}}, {{$r0}}; mov.b32 {{$w0}}, {{{name}, {name}}};
    }}"""
    return emit(text, [Uint32], both)


def decoded_halves(word: Any, scale: Any) -> list[Any]:
    """Return four words of two FP16 weights: codes j and j + 4 times 2**-7."""
    return [
        emit("mul.rn.f16x2 {$w0}, {$r0}, {$r1};", [Uint32], pair, scale)
        for pair in fp16_pairs(word, permuted_bytes, Uint32)
    ]


def decoded_halves_by_products(word: Any, scale: Any, zero: Any) -> list[Any]:
    """Return what `decoded_halves` does, on both pipes; `zero` is as in `give_back`."""

    def product(number: Any, factor: int, addend: Any) -> Any:
        return multiplied(number, factor, addend, zero)

    return [
        emit("mul.rn.f16x2 {$w0}, {$r0}, {$r1};", [Uint32], pair, scale)
        for pair in fp16_pairs_by_products(word, permuted_bytes, product, Uint32)
    ]


def multiplied(word: Any, factor: int, addend: Any, zero: Any) -> Any:
    """Return a word times a factor plus an addend, modulo 2**32, on the pipe that multiplies."""
    # Trap: of a factor that it knows ptxas makes a shift or a sum, which are on the integer pipe.
    text = "mad.lo.u32 {$w0}, {$r0}, {$r1}, {$r2};"
    return emit(text, [Uint32], word, zero + Uint32(factor), Uint32(addend))


def permuted_bytes(low: Any, high: Any, order: int) -> Any:
    """Return four of eight bytes, by their numbers as nibbles."""
    return emit(f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {order};", [Uint32], low, Uint32(high))


def as_halves(word: Any) -> Any:
    """Return two BF16 numbers as FP16, which is exact for what codes and scales stand for."""
    text = """{
    .reg .b32 low, high; .reg .f32 a, b;
    shl.b32 low, {$r0}, 16; and.b32 high, {$r0}, 0xffff0000;
    mov.b32 a, low; mov.b32 b, high; cvt.rn.f16x2.f32 {$w0}, b, a;
    }"""
    return emit(text, [Uint32], word)


def halves_of(numbers: list[Any]) -> list[Any]:
    """Round float32 numbers to FP16, nearest even, two a word, the first in the low half."""
    return [
        emit("cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};", [Uint32], *pair)
        for pair in zip(numbers[0::2], numbers[1::2], strict=True)
    ]


def paired(words: list[Any], native: bool) -> list[Any]:
    """Return eight activations in the order in which `decoded` gives weights."""
    if native:
        return words
    # Pairs of activations j and j + 4, as bf16_pairs decodes codes j and j + 4 together.
    return [word for i in range(2) for word in paired_halves(words[i], words[i + 2])]


def paired_halves(low: Any, high: Any) -> list[Any]:
    """Return the lower halves of two words, and the upper ones."""
    return [
        emit(f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {order};", [Uint32], low, high)
        for order in ("0x5410", "0x7632")
    ]


def products(
    sums: Any, at: int, weights: list[Any], activations: list[Any], kind: str = "bf16"
) -> None:
    """Add products of 16 outputs' 16 weights and 8 rows of activations to a lane's four sums."""
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};"
    )
    before = [sums[at + i] for i in range(4)]
    after = emit(text, [Float32] * 4, *weights, *activations, *before)
    for i in range(4):
        sums[at + i] = after[i]
