"""The known answers are met, and a codec that is spoilt is seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.formats.codec import encode
from degarble.harness.nightly import codecs as night_codecs
from degarble.harness.nightly.codecs import count, wrong_codecs

if TYPE_CHECKING:
    import pytest


def test_the_formats_meet_what_is_known() -> None:
    assert wrong_codecs() == []
    assert count() == 44


def test_a_spoilt_codec_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(night_codecs, "encode", lambda v, f: encode(v * 1.1, f))
    assert any(line.startswith("E2M1: 0.25 is 0x0, 0x1") for line in wrong_codecs())


def test_swapped_nibbles_and_places_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    made = night_codecs.BLOCK_CODES
    monkeypatch.setattr(night_codecs, "BLOCK_CODES", bytes(b >> 4 | (b & 15) << 4 for b in made))
    assert wrong_codecs() == ["NVFP4 block: codes 1032547698badcfe, not 0123456789abcdef"]
    monkeypatch.setattr(night_codecs, "BLOCK_CODES", made)

    def linear(scales: Any, _: object) -> Any:
        return scales.flatten()

    monkeypatch.setattr(night_codecs, "to_layout", linear)
    found = wrong_codecs()
    assert found[0] == "scale 1, 0 of a swizzled tile lies at [4], not 16"


def test_a_block_that_reads_otherwise_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(night_codecs, "dequantise", lambda each: torch.zeros(each.shape))
    assert wrong_codecs() == ["NVFP4 block: what was quantised without loss reads otherwise"]
