"""Photograph report pages for the documents: `make pages` writes docs/pages/.

    python -m degarble.suites.reports.screenshots [FOLDER]

The pages are of runs on the CPU with the small models; only the nights of the history are drawn by
chance, from a fixed seed.
"""

from __future__ import annotations

import base64
import io
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from degarble.harness import api
from degarble.harness.commands.check.compare_runs import compare_runs, compared_page
from degarble.harness.commands.check.report import check_page, page_sentence, replay_record
from degarble.harness.commands.report_folder import history_page
from degarble.harness.history.panel import history_of
from degarble.harness.history.store import HistoryStore
from degarble.harness.report.page import Subject
from degarble.harness.report.verdict import Verdict
from degarble.reports.page_html import page_html
from degarble.suites.commands.browser import chromium
from degarble.suites.history.history_cases import W2, history, night
from degarble.suites.house.repository import ROOT
from degarble.suites.museum.demo_cases import PROVENANCE as WHERE
from degarble.suites.museum.demo_cases import whole_story

if TYPE_CHECKING:
    from collections.abc import Callable

    from degarble.harness.report.page import Page
    from degarble.suites.commands.browser import Window

FOLDER = ROOT / "docs" / "pages"
LARGEST = 150_000  # bytes of a picture
_COLOURS = 160
_NIGHTS, _MOVED, _SEED = 60, 45, 7
_BLOCKS, _WIDTH = 12, 64
_CASE = "DIR/reproducers/CAPTURE/1-layers-3-ffn-experts-w2/reproduce.py"


def finding_page(_folder: Path) -> Page:
    """Return the page of a check of the demonstration's faulty run."""
    sick = whole_story().sick
    sentence = page_sentence(sick.localised, sick.origins)
    command = "degarble check CAPTURE --reference BF16_CKPT --report DIR"
    began = [replace(origin, reproducer=_CASE) for origin in sick.origins]
    record = replay_record(sick.localised, began, sick.statistics, sentence)
    subject = Subject("tiny V4, nvfp4-full", "Checkpoint", whole_story().model.identity)
    return check_page(subject, replace(WHERE, command=command), record, began)


def comparison_page(folder: Path) -> Page:
    """Return the page of two captures of a model, of whose fourth block one weight was scaled."""
    folders = [folder / name for name in ("before", "after")]
    for path, scale in zip(folders, (1.0, 1.5), strict=True):
        torch.manual_seed(_SEED)
        layers = [torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_BLOCKS)]
        with torch.no_grad():
            layers[3].weight.mul_(scale)
        x = torch.linspace(-1, 1, 3 * _WIDTH).reshape(3, _WIDTH)
        api.capture(torch.nn.Sequential(*layers), x, folder=path, label=path.name)
    where = replace(WHERE, command="degarble compare before after")
    return compared_page(compare_runs(*folders), where)


def nights_page(folder: Path) -> Page:
    """Return the page of 60 nights, of which the last failed."""
    with HistoryStore(str(folder / "history.sqlite"), create=True) as store:
        *earlier, last = history(_NIGHTS, _MOVED, _SEED)
        for run in earlier:
            store.add(run)
        values = {**last.values["budgets"], W2: 178_494.0}
        store.add(replace(last, verdict=Verdict.DIFFERS, values={"budgets": values}))
        page = history_page(history_of(store, store.streams()[0]))
    where = replace(WHERE, created=f"{night(_NIGHTS)} 03:04 UTC", command=page.provenance.command)
    return replace(page, provenance=where)


@dataclass(frozen=True)
class Shot:
    """One picture: of which page, from which element, how wide and high, light or dark."""

    page: Callable[[Path], Page]
    element: str
    width: int = 1280
    height: int = 1000
    scheme: str = "light"


SHOTS = {
    "finding": Shot(finding_page, "#verdict", height=1330),
    "run": Shot(finding_page, "#replay", height=1000),
    "phone": Shot(finding_page, "#findings", width=390, height=1200, scheme="dark"),
    "compare": Shot(comparison_page, "#verdict", height=1150),
    "history": Shot(nights_page, "#verdict", height=1150),
}


def photograph(window: Window, shot: Shot, page: Path) -> bytes:
    """Return a picture of a page, as a PNG of few colours."""
    from PIL import Image  # noqa: PLC0415  only here

    window.media(scheme=shot.scheme, width=shot.width)
    window.open(page)
    top = "const box = document.querySelector(arguments[0]).getBoundingClientRect();"
    y = window.run(f"{top} return box.top + scrollY", shot.element)
    clip = {"x": 0, "y": max(0, y - 16), "width": shot.width, "height": shot.height, "scale": 1}
    asked = {"captureBeyondViewport": True, "clip": clip}
    taken = window.driver.execute_cdp_cmd("Page.captureScreenshot", asked)
    picture = Image.open(io.BytesIO(base64.b64decode(taken["data"]))).convert("RGB")
    stream = io.BytesIO()
    picture.quantize(_COLOURS, dither=Image.Dither.NONE).save(stream, "png", optimize=True)
    return stream.getvalue()


def write(folder: Path) -> list[Path]:
    """Write every picture; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    pages: dict[Callable[[Path], Page], Path] = {}
    with tempfile.TemporaryDirectory() as name, chromium(Path(name) / "profile") as window:
        for title, shot in SHOTS.items():
            if shot.page not in pages:
                own = Path(name) / title
                own.mkdir()
                pages[shot.page] = own / "page.html"
                pages[shot.page].write_text(page_html(shot.page(own)), encoding="utf-8")
            path = folder / f"{title}.png"
            path.write_bytes(photograph(window, shot, pages[shot.page]))
            made.append(path)
    return made


if __name__ == "__main__":
    for picture in write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER):
        sys.stdout.write(f"{picture}  {picture.stat().st_size:,} bytes\n")
