"""The reading of tcgen05 instructions in a text: by hand, and with other numbers in it."""

from __future__ import annotations

import pytest

from degarble.suites.kernels import tcgen05_code as code
from degarble.suites.kernels import tcgen05_words as words

WORD = words.operand_word(0, 1024, 128)
TEXT = f"""
    or.b64  %rd8, %rd204, {WORD};
    add.s64 %rd9, %rd8, 6;
    add.s64 %rd10, %rd204, {WORD + 1026};
    mov.pred    %p1, 0;
    mov.b32     %r5, 138413200;
    tcgen05.mma.cta_group::1.kind::f16.collector::a::discard [%r33], %rd9, %rd10, %r5, {{%r1}}, %p1;
    tcgen05.ld.sync.aligned.32x32b.x2.b32 {{%r61, %r62}}, [%r7];
    mov.b64 %rd3, {{%r61, %r62}};
    tcgen05.wait::ld.sync.aligned;
    mov.b64 {{%r63, %r64}}, %rd3;
    add.s32 %r65, %r64, %r64;
"""


def test_reads_what_stands_in_the_text() -> None:
    assert code.products(TEXT) == [code.Product("kind::f16", 138_413_200, 6, 1026, adds=False)]
    assert code.operand_words(TEXT) == {WORD}
    assert code.reads(TEXT) == [code.Read("32x32b.x2", 2, 4)]
    assert not code.early_uses(TEXT)


def test_other_text_is_seen() -> None:
    assert code.products(TEXT.replace("%p1, 0", "%p1, -1"))[0].adds is True
    assert code.products(TEXT.replace("mov.pred    %p1, 0;", ""))[0].adds is None
    assert code.products(TEXT.replace("%rd8, 6", "%rd8, 8"))[0].a == 8
    assert code.operand_words(TEXT.replace(str(WORD), str(WORD ^ 1 << 61))) != {WORD}
    for early in ("add.s32 %r3, %r61, 1;", "mov.b64 {%r3, %r4}, %rd3;\nadd.s32 %r5, %r4, 1;"):
        text = TEXT.replace("    tcgen05.wait", f"{early}\n    tcgen05.wait")
        assert len(code.early_uses(text)) == 1
    for damaged in (
        TEXT.replace("cta_group::1", "cta_group::2"),
        TEXT.replace("mov.b32     %r5", "ld.b32      %r5"),
    ):
        with pytest.raises(words.WrongWord):
            code.products(damaged)
    with pytest.raises(words.WrongWord):
        code.reads(TEXT.replace("wait::ld", "wait::st"))
