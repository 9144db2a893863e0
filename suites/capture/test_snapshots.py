from __future__ import annotations

import math

import pytest
import torch

from degarble.harness.base.errors import DtypeMismatch
from degarble.harness.capture.files.records import DTYPE_BYTES
from degarble.harness.capture.recorder import WORDS, Snapshots, same, statistics_of


def test_every_dtype_of_the_format_is_taken_as_it_is() -> None:
    assert set(WORDS.values()) == set(DTYPE_BYTES)
    snapshots = Snapshots()
    for dtype, word in WORDS.items():
        values = torch.tensor([0, 1, 1, 0, 1, 0], dtype=torch.uint8)
        tensor = values.to(dtype).reshape(2, 3)
        payload = snapshots.take(tensor).payload
        assert (payload.dtype, payload.shape) == (word, (2, 3))
        assert payload.data is not None
        assert bytes(payload.data) == tensor.view(torch.uint8).numpy().tobytes()


def test_an_unchanged_tensor_gives_the_same_snapshot() -> None:
    snapshots, x = Snapshots(), torch.arange(12.0).reshape(3, 4)
    first = snapshots.take(x)
    assert snapshots.take(x.view(4, 3)).payload is first.payload
    assert snapshots.take(x[:2]).payload is not first.payload
    assert snapshots.take(x.T).payload is not first.payload
    assert snapshots.take(x.clone()).payload is not first.payload  # told by hash, not here


def test_a_changed_tensor_is_another_snapshot() -> None:
    """Also one changed behind torch's back, as a kernel does."""
    snapshots, x = Snapshots(), torch.arange(12.0)
    first = snapshots.take(x)
    x.numpy()[3] = -0.0
    assert not same(first, x)
    second = snapshots.take(x)
    assert second.payload is not first.payload
    assert first.codes.view(torch.float32)[3] == 3


def test_a_changed_last_byte_and_another_size_are_detected() -> None:
    snapshots, x = Snapshots(), torch.arange(1 << 16, dtype=torch.uint8)
    first = snapshots.take(x)
    x[-1] += 1
    assert not same(first, x)
    x[-1] -= 1
    assert same(first, x)
    assert not same(first, x[:-1])
    assert same(snapshots.take(x[:0]), x[:0])


def test_nan_and_the_sign_of_zero_are_bytes() -> None:
    snapshots, x = Snapshots(), torch.tensor([math.nan, 0.0])
    first = snapshots.take(x)
    assert same(first, x)
    x[1] = -0.0
    assert not same(first, x)


def test_rows_with_gaps_are_taken_without_them() -> None:
    x = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    snapshot = Snapshots().take(x[:, 1:3])
    assert snapshot.codes.view(torch.bfloat16).tolist() == [1, 2, 5, 6, 9, 10]
    assert same(snapshot, x[:, 1:3])


def test_only_so_many_bytes_are_kept() -> None:
    snapshots = Snapshots(kept_bytes=100)
    tensors = [torch.full((10,), float(n)) for n in range(5)]
    taken = [snapshots.take(each) for each in tensors]
    again = [snapshots.take(each) for each in reversed(tensors)]
    shared = [a.payload is b.payload for a, b in zip(taken, reversed(again), strict=True)]
    assert shared == [False, False, False, True, True]
    assert snapshots.take(torch.zeros(1000)).payload.nbytes == 4000


def test_statistics_by_hand() -> None:
    x = torch.tensor([3.0, -4.0, 0.0, math.nan, math.inf, -math.inf])
    found = statistics_of(x)
    rms = found.pop("rms")
    assert found == {
        "count": 6, "nan": 1, "inf": 2, "zeros": 1, "min": -4.0, "max": 3.0, "mean": -1 / 3,
    }  # fmt: skip
    assert math.isclose(rms, math.sqrt(25 / 3))
    assert math.isclose(statistics_of(torch.full((2,), 1e300, dtype=torch.float64))["rms"], 1e300)
    assert statistics_of(torch.tensor([math.nan])) == {"count": 1, "nan": 1, "inf": 0}
    assert statistics_of(torch.empty(0)) == {"count": 0}
    assert statistics_of(torch.tensor([True, False]))["mean"] == 0.5


def test_what_the_format_cannot_spell_is_refused() -> None:
    with pytest.raises(DtypeMismatch, match="complex64"):
        Snapshots().take(torch.zeros(2, dtype=torch.complex64))
