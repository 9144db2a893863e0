"""O20 to O23: the paged KV cache was never written, or is read by other pages, strides or slots.

The address of a row is page * page size + slot. Where writer and reader disagree, the first page is
often right (flashinfer issue 4044); where nothing was written the output is empty or garbage, as
one team observed in its container for weeks. Rows of earlier calls and of this one lie in the same
cache, so both arrive wrong.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.memory.stale_memory import counts_of
from degarble.harness.engine.faults.model_faults import ModelFault, Reach, Way, with_inputs
from degarble.references.facts import spans_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import Scene, Sight

    Tensors = Mapping[str, Tensor]
    Read = Callable[[Tensor], Tensor]  # a sequence's rows as they are read back

PAGES = (16, 64, 256)  # rows of a page: FlashMLA has 64, others have these
# What holds new rows, and what holds those of earlier calls.
CACHES = {
    "window": "state_window", "compressed": "state_compressed", "rows": "state_rows",
    "keys": "state_keys",
}  # fmt: skip
_ROLES = ("attn.attend", "attn.indexer.scores")


def caches(scene: Scene) -> list[str]:
    """Return the caches that a component reads, by the input with their new rows."""
    names = {each.name for each in scene.component.inputs}
    return [new for new, old in CACHES.items() if new in names and old in names]


def read_back(scene: Scene, words: str, new: str, read: Read, **where: Any) -> Way:
    """Read back all rows of a cache, old and new ones of each sequence together."""
    block = scene.component.block
    ratio = block.ratio if block is not None and new in ("compressed", "keys") else 0

    def passed(inputs: Tensors) -> Tensors:
        old = CACHES[new]
        made = [span.entries_made(ratio) if ratio else span.count for span in spans_of(inputs)]
        kept = counts_of(scene, old, inputs) if old in inputs else [0] * len(made)
        before = inputs[old] if old in inputs else inputs[new][:0]
        if sum(made) != len(inputs[new]) or sum(kept) != len(before):
            return inputs  # other positions than the rows belong to
        olds, news = before.split(kept), inputs[new].split(made)
        rows = [read(torch.cat((a.to(b.dtype), b))) for a, b in zip(olds, news, strict=True)]
        found = dict(inputs)
        found[new] = torch.cat([r[k:] for r, k in zip(rows, kept, strict=True)])
        if old in inputs:
            parts = torch.cat([r[:k] for r, k in zip(rows, kept, strict=True)])
            found[old] = parts.to(before.dtype)
        return found

    return Way(f"{_told(new)}: {words}", with_inputs(passed), {"cache": new, **where})


def _told(new: str) -> str:
    return {
        "window": "rows of the window",
        "compressed": "compressed entries",
        "rows": "cached rows",
        "keys": "the indexer's keys",
    }[new]


def _gathered(rows: Tensor, index: Tensor) -> Tensor:
    """Gather rows by number; rows beyond the end are zeros, as fresh memory is."""
    inside = (index >= 0) & (index < len(rows))
    found = rows[index.clamp(0, max(0, len(rows) - 1))] if len(rows) else rows
    return torch.where(inside.reshape(-1, *[1] * (rows.ndim - 1)), found, 0.0).to(rows.dtype)


def _never(rows: Tensor) -> Tensor:
    return torch.zeros_like(rows)


def _never_of_latent(width: int, rows: Tensor) -> Tensor:
    made = rows.clone()
    made[:, :width] = 0
    return made


def _every_other(rows: Tensor) -> Tensor:
    made = rows.clone()
    made[1::2] = 0
    return made


def _paged(page: int, shift: int, rows: Tensor) -> Tensor:
    """Begin each page some rows away from where the reader expects it."""
    at = torch.arange(len(rows))
    # The offset grows from page to page; the first page is right.
    return _gathered(rows, at + at // page * shift)


def _aliased(page: int, back: int, rows: Tensor) -> Tensor:
    """Make pages from the second on read the first one, or the previous one."""
    at = torch.arange(len(rows))
    number = at // page
    seen = torch.zeros_like(number) if not back else (number - back).clamp(min=0)
    return _gathered(rows, seen * page + at % page)


def _other_size(written: int, read: int, rows: Tensor) -> Tensor:
    """Take slots by one page size and pages by another."""
    at = torch.arange(len(rows))
    return _gathered(rows, at // read * written + at % read)


def _strided(gap: int, rows: Tensor) -> Tensor:
    """Read rows with a stride that is some elements too small or too large."""
    width = rows.shape[1]
    flat = rows.reshape(-1)
    at = torch.arange(len(rows))[:, None] * (width + gap) + torch.arange(width)
    inside = at < len(flat)
    found = flat[at.clamp(0, max(0, len(flat) - 1))] if len(flat) else rows
    return torch.where(inside, found, torch.zeros_like(found))


def _slots(shift: int, rows: Tensor) -> Tensor:
    return _gathered(rows, torch.arange(len(rows)) + shift)


def _unwritten(scene: Scene) -> Iterator[Way]:
    for new in caches(scene):
        yield read_back(scene, "never written", new, _never)
        yield read_back(scene, "every second row never written", new, _every_other)
        half = partial(_never_of_latent, 64)
        yield read_back(scene, "the first 64 columns never written", new, half)


def _pages(scene: Scene) -> Iterator[Way]:
    for new in caches(scene):
        for page in (4, *PAGES):
            words = f"every page of {page} rows reads the first"
            yield read_back(scene, words, new, partial(_aliased, page, 0), page=page)
            words = f"every page of {page} rows reads the one before"
            yield read_back(scene, words, new, partial(_aliased, page, 1), page=page)
        for written, read in ((64, 16), (64, 32), (16, 64), (256, 64), (4, 8), (8, 4)):
            words = f"written in pages of {written} rows, read in pages of {read}"
            yield read_back(scene, words, new, partial(_other_size, written, read), page=read)


def _strides(scene: Scene) -> Iterator[Way]:
    for new in caches(scene):
        for page in (4, *PAGES):
            for shift in (1, -1):
                words = f"every page of {page} rows {shift:+d} row beside its place"
                change = partial(_paged, page, shift)
                yield read_back(scene, words, new, change, page=page, shift=shift)
        for gap in (-8, 8, 16):
            words = f"a row stride that is {gap:+d} elements off"
            yield read_back(scene, words, new, partial(_strided, gap), gap=gap)


def _slot_ways(scene: Scene) -> Iterator[Way]:
    for new in caches(scene):
        for shift in (1, -1, 4):
            words = f"slots {shift:+d} beside where rows were written"
            yield read_back(scene, words, new, partial(_slots, shift), shift=shift)


def _where_differing(
    ways: Callable[[Scene], Iterator[Way]],
) -> Callable[[Scene, Sight], Iterator[Way]]:
    """Propose ways for the caches whose rows are not those that were written."""

    def signature(scene: Scene, sight: Sight) -> Iterator[Way]:
        changed = {new for new in caches(scene) if _differs(sight, new, CACHES[new])}
        for way in ways(scene) if changed else ():
            if way.where["cache"] in changed:
                yield way

    return signature


def _differs(sight: Sight, *names: str) -> bool:
    pairs = [(sight.inputs.get(name), sight.implied.get(name)) for name in names]
    return any(
        a is not None and b is not None and (a.shape != b.shape or not torch.equal(a, b))
        for a, b in pairs
    )


def _fault(name: str, words: tuple[str, str, str], ways: Any) -> ModelFault:
    title, effect, remedy = words
    return ModelFault(
        id=name,
        title=title,
        effect=effect,
        remedy=remedy,
        sits=lambda scene: scene.role in _ROLES and bool(caches(scene)),
        ways=ways,
        signature=_where_differing(ways),
        reach=Reach.EDGE,
    )


MODEL_FAULTS = (
    _fault(
        "O20.never_written",
        (
            "The cache was never written, wholly or in part",
            "attention reads zeros: the output is empty, or the same whatever is asked",
            "Call the write in front of the read, and check it by reading a row back.",
        ),
        _unwritten,
    ),
    _fault(
        "O21.page_size",
        (
            "Pages of the cache are read by another size or another table",
            "the first page is right, later ones are other tokens' rows",
            "Take page size and table from one place for writer and reader.",
        ),
        _pages,
    ),
    _fault(
        "O22.alignment",
        (
            "Pages or rows of the cache are read with another stride",
            "rows drift off their place, page by page or row by row",
            "Pad pages and rows alike on both sides; pass strides and not extents.",
        ),
        _strides,
    ),
    _fault(
        "O23.slot",
        (
            "Rows of the cache are read beside the slots that they were written to",
            "every token sees its neighbours' rows in its own place",
            "Map slots once, and hand the mapping to writer and reader.",
        ),
        _slot_ways,
    ),
)
