"""The packing order is told from company on the same input; how strong channels must be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from degarble.harness.checkpoint.audit.statistics.inference import (
    ORDERS,
    Kinship,
    ReferenceProfile,
    infer_order,
    logs_of,
)
from degarble.suites.checkpoint.number_cases import channels, generator, matrix

if TYPE_CHECKING:
    from numpy.typing import NDArray

WIDTH = 3072
ROWS = 32


def energies(seed: int, gains: torch.Tensor, rows: int = ROWS) -> NDArray[np.float32]:
    values = matrix(seed, rows, len(gains), gains).float()
    found: NDArray[np.float32] = values.square().sum(0).numpy()
    return found


def packed_as(order: str, columns: NDArray[np.float32]) -> NDArray[np.float32]:
    """What is measured low nibble first, where codes were packed in another order."""
    found = np.empty_like(columns.reshape(-1, 16))
    found[:, ORDERS[order]] = columns.reshape(-1, 16)
    return found.reshape(-1)


@pytest.mark.parametrize("order", ORDERS)
def test_an_unpacked_sibling_tells_every_order(seed: int, order: str) -> None:
    gains = channels(seed, WIDTH)
    reference = ReferenceProfile(Kinship.SIBLING, logs_of(energies(seed + 1, gains, 64)))
    found = infer_order(packed_as(order, energies(seed + 2, gains)), [reference])
    assert found.value == order
    assert found.because == Kinship.SIBLING
    assert found.confidence > 0.999


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("slope", [1.0, -1.0])
def test_a_norm_tells_whatever_the_sign_of_the_relation(
    seed: int, order: str, slope: float
) -> None:
    gains = channels(seed, WIDTH, 0.5)
    norm = ReferenceProfile(Kinship.NORM, slope * logs_of(gains.numpy()))
    found = infer_order(packed_as(order, energies(seed + 1, gains)), [norm])
    assert found.value == order


@pytest.mark.parametrize("kinship", [Kinship.NORM, Kinship.PRODUCER])
def test_a_stranger_tells_nothing(seed: int, kinship: Kinship) -> None:
    stranger = ReferenceProfile(kinship, logs_of(channels(seed + 1, WIDTH, 0.5).numpy()))
    found = infer_order(energies(seed, channels(seed, WIDTH, 0.5)), [stranger])
    assert found.value is None
    assert "no relation" in found.because


def test_power_by_the_spread_of_channels(seed: int) -> None:
    """At a width of 3072 a spread of 10 % decides; without spread nothing does."""
    decided = {}
    for spread in (0.0, 0.1, 0.2):
        values = []
        for i in range(8):
            gains = torch.exp(spread * torch.randn(WIDTH, generator=generator(seed + i)))
            reference = ReferenceProfile(
                Kinship.SIBLING, logs_of(energies(seed + 100 + i, gains, 64))
            )
            swapped = packed_as("high_even", energies(seed + 200 + i, gains))
            values.append(infer_order(swapped, [reference]).value)
        assert set(values) <= {None, "high_even"}
        decided[spread] = sum(value is not None for value in values)
    assert decided[0.0] == 0
    assert decided[0.2] == 8
    assert decided[0.1] >= 6


def test_smooth_channels_do_not_tell(seed: int) -> None:
    gains = torch.exp(torch.sin(torch.arange(WIDTH) / 300.0))
    reference = ReferenceProfile(Kinship.SIBLING, logs_of(energies(seed, gains, 64)))
    assert infer_order(energies(seed + 1, gains), [reference]).value is None


def test_what_is_missing_is_told(seed: int) -> None:
    columns = energies(seed, channels(seed, 256))
    assert "no profile" in infer_order(columns, []).because
    narrow = ReferenceProfile(Kinship.SIBLING, np.zeros(128))
    assert "no profile" in infer_order(columns, [narrow]).because
    assert "too few" in infer_order(columns[:64], [narrow]).because
    flat = ReferenceProfile(Kinship.SIBLING, np.zeros(256))
    assert infer_order(columns, [flat]).value is None


def test_the_best_of_several_references_counts(seed: int) -> None:
    gains = channels(seed, WIDTH)
    flat = ReferenceProfile(Kinship.SIBLING, np.zeros(WIDTH))
    norm = ReferenceProfile(Kinship.NORM, -logs_of(gains.numpy()))
    found = infer_order(energies(seed + 1, gains), [flat, norm])
    assert (found.value, found.because) == ("low_even", Kinship.NORM)


def test_zeros_and_infinities_in_a_profile() -> None:
    logs = logs_of(np.array([0.0, 4.0, np.inf, np.nan, 1.0], np.float32))
    assert logs.tolist() == [0, 2, 2, 0, 0]
    assert logs_of(np.zeros(3, np.float32)).tolist() == [0, 0, 0]
