"""Summary, document and page of a night: every word, escaped names, panels in their order."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from degarble.harness.history.ledger import Failure
from degarble.harness.nightly.night import Night, NightConfig, NightStep, StepResult
from degarble.harness.nightly.pages import markdown, page_of, write_night
from degarble.harness.nightly.steps import history, ledger
from degarble.harness.report.page import PanelKind
from degarble.harness.report.verdict import Verdict
from degarble.suites.snapshots import assert_as_kept

if TYPE_CHECKING:
    from pathlib import Path

IDENTITY = "sha256:" + "5a" * 32
FAULT = Failure("layers.3.ffn.experts.w2", Verdict.DIFFERS, "M10.nibble_order", "nibbles swapped")
RESULTS = {
    "environment": StepResult(
        Verdict.AGREES,
        "CPU: of a suite; no GPU.",
        facts={"machine": "CPU: of a suite", "manifest": IDENTITY},
    ),
    "audit": StepResult(Verdict.AGREES, "No error in the structure of all 612 tensors."),
    "codecs": StepResult(Verdict.AGREES, "44 known answers of the formats are met."),
    "kernels": StepResult(Verdict.UNDECIDED, "No GPU was asked for.", asked=False),
    "check": StepResult(
        Verdict.DIFFERS,
        "Layer 3, ffn.experts.w2: the two nibbles of each byte are exchanged.",
        values={"budgets": {FAULT.component: 812.0, "head": 0.25}},
        failures=(FAULT,),
        judged=(FAULT.component, "head"),
        lines=("Layer 3, ffn.experts.w2: nibbles exchanged. Store the even element low.",),
    ),
    "text": StepResult(
        Verdict.DIFFERS,
        "perplexity: drift 0.9 nats.",
        rows=(("perplexity", "DIFFERS", "drift 0.9"), ("echo", "AGREES", "drift 0")),
        failures=(Failure("text.perplexity", Verdict.DIFFERS, None, "drift 0.9"),),
    ),
    "museum": StepResult(Verdict.UNDECIDED, "It was to run and could not: `a|b` <b>"),
}
LEDGER = """
- component: text.*
  verdict: DIFFERS
  issue: https://example.org/12
  until: 2026-12-01
  why: being mended
"""


def night_in(folder: Path) -> Night:
    checkpoint = folder / "tiny_[v4]"
    checkpoint.mkdir()
    (folder / "known.yaml").write_text(LEDGER)
    asked = NightConfig(
        checkpoint, checkpoint, folder / "out", "2026-11-22", commit="4" * 40,
        store=str(folder / "history.sqlite"), ledger=folder / "known.yaml",
    )  # fmt: skip
    steps = [NightStep(name, lambda *_, each=each: each) for name, each in RESULTS.items()]
    closing = [
        NightStep("history", history, all_before=True),
        NightStep("ledger", ledger, all_before=True),
    ]
    night = Night(asked, [*steps, *closing])
    night.run()
    return night


def test_the_summary_says_everything(tmp_path: Path) -> None:
    assert_as_kept("nightly/night.txt", markdown(night_in(tmp_path)))


def test_page_document_and_summary_are_written(tmp_path: Path) -> None:
    night = night_in(tmp_path)
    written = write_night(night)
    html = written.page.read_text()
    assert "drift 0.9" in html
    assert "Ledger: known until 2026-12-01" in html
    document = json.loads(written.document.read_text())
    assert document["verdict"] == "DIFFERS"
    assert document["red"] == ["check", "museum", "ledger"]
    assert document["steps"]["check"]["failures"][0]["fault"] == "M10.nibble_order"
    assert written.summary.read_text() == markdown(night)
    before = written.page.read_bytes()
    assert write_night(night).page.read_bytes()[:200] == before[:200]


def test_the_page_has_the_panels_that_a_night_has(tmp_path: Path) -> None:
    page = page_of(night_in(tmp_path))
    assert page.verdict is Verdict.DIFFERS
    assert page.sentence.startswith("check: Layer 3, ffn.experts.w2: the two nibbles")
    found = {panel.kind: panel for panel in page.panels}
    assert set(found) == {PanelKind.TEXT, PanelKind.KERNELS, PanelKind.HISTORY}
    assert found[PanelKind.KERNELS].verdict is Verdict.UNDECIDED  # codecs alone prove no kernel
    assert found[PanelKind.TEXT].verdict is Verdict.DIFFERS
    assert page.subject.manifest_hash == IDENTITY
