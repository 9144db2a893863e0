"""A page as a check of one checkpoint would give, for the suites that keep its text."""

from __future__ import annotations

from degarble.harness.report.blocks import Column, ColumnKind, Sentence, Table, Tone
from degarble.harness.report.page import Page, PageFinding, Panel, PanelKind, Provenance, Subject
from degarble.harness.report.verdict import Origin, Verdict

ORIGIN = Origin(
    23,
    "ffn.experts.w2",
    "layers.23.ffn.experts.w2.out",
    {"expert": 17, "rows": "128 to 255"},
    "M10.nibble_order",
    0.1234,
    1.41,
    0.0951,
    1.0,
    "Swapping the two nibbles of every byte reproduces 100.0 % of 65,536 codes.",
)
PAGE = Page(
    Subject("a checkpoint", "Checkpoint", "sha256:0123456789abcdef0123456789abcdef"),
    Provenance("2026-01-02 03:04 UTC", "degarble check x", "CPU: a processor, 2 cores", ()),
    Verdict.DIFFERS,
    "Layer 23 differs in one expert.",
    (
        PageFinding(
            "The nibbles are swapped", "Swap them back.", ORIGIN, "degarble check y", "Rare."
        ),
    ),
    (
        Panel(PanelKind.TEXT, "not shown"),
        Panel(
            PanelKind.AUDIT,
            "one table",
            Verdict.DIFFERS,
            (
                Table(
                    "t",
                    (Column("tensor"), Column("verdict", ColumnKind.VERDICT),
                     Column("gain", ColumnKind.NUMBER), Column("share", ColumnKind.SHARE)),
                    (("w1", "AGREES", 1.0, 0.25), ("w2", "DIFFERS", 921000.0, None)),
                ),
                Sentence("Look here.", Tone.WARNING),
                Sentence("Left to the page."),
            ),
        ),
    ),
)  # fmt: skip
