from __future__ import annotations

import pytest

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.report.page import Page, Panel, PanelKind, Subject
from degarble.harness.report.verdict import Verdict
from degarble.suites.reports.page_cases import HOSTILE, page_of


def test_panels_keep_one_order_whatever_the_order_of_runs() -> None:
    page = page_of("x")
    assert [panel.kind for panel in page.ordered_panels] == [
        "audit",
        "replay",
        "text",
        "kernels",
        "history",
    ]
    assert [p.kind for p in page.ordered_panels if p.verdict is None] == [
        "text",
        "kernels",
        "history",
    ]


def test_a_panel_takes_the_place_of_the_older_one_of_its_kind() -> None:
    page = page_of("x").with_panel(Panel(PanelKind.AUDIT, "new", Verdict.AGREES))
    assert [p.sentence for p in page.ordered_panels if p.kind is PanelKind.AUDIT] == ["new"]
    assert len(page.panels) == 3


def test_two_panels_of_one_kind_are_refused() -> None:
    page = page_of("x")
    with pytest.raises(InvalidArgument, match="at most one panel of a kind"):
        Page(
            page.subject,
            page.provenance,
            page.verdict,
            "",
            (),
            (Panel(PanelKind.TEXT, "a"), Panel(PanelKind.TEXT, "b")),
        )


@pytest.mark.parametrize(
    ("name", "digest", "key"),
    [
        ("DeepSeek-V4-Pro NVFP4", "sha256:AB12", "deepseek-v4-pro-nvfp4-ab12"),
        ("../../etc/passwd", "0" * 64, "etc-passwd-000000000000"),
        ("数", "", "page-nohash"),
        ("x" * 300, "sha256:f", "x" * 48 + "-f"),
    ],
)
def test_a_key_is_a_file_name_and_nothing_else(name: str, digest: str, key: str) -> None:
    assert Subject(name, "checkpoint", digest).key == key


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_names_give_harmless_keys(text: str) -> None:
    key = Subject(text, "checkpoint", text).key
    assert set(key) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
