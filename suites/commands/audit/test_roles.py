from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from degarble.harness.checkpoint.audit.statistics.inference import ORDER_NAMES
from degarble.harness.commands.audit.audit import AuditRequest, audit
from degarble.harness.commands.audit.document import NOT_PACKED, order_text, roles_of, span
from degarble.suites.commands.audit.audit_cases import sick_checkpoint

if TYPE_CHECKING:
    from degarble.harness.checkpoint.audit.numbers.table import NumberTable


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> NumberTable:
    found = audit(AuditRequest(sick_checkpoint(tmp_path_factory))).table
    assert found is not None
    return found


def test_every_weight_is_in_one_role(table: NumberTable) -> None:
    roles = roles_of(table)
    assert sum(role.weights for role in roles) == len(table)
    assert sum(role.nbytes for role in roles) == table["nbytes"].sum()
    assert [role.name for role in roles] == sorted({unit.role for unit in table.units})


def test_spans_leave_out_what_is_not_there_and_what_is_no_number(table: NumberTable) -> None:
    roles = {role.name: role for role in roles_of(table)}
    experts = roles["layers.*.ffn.experts.*.w1"]
    scale = experts.spans["decode_scale"]
    assert scale is not None
    assert 0 < scale[0] <= scale[1] <= scale[2] < 1  # three are NaN
    assert experts.formats == ("NVFP4",)
    norm = roles["layers.*.attn_norm"]
    assert (norm.spans["decode_scale"], norm.spans["pairing"], norm.order) == (None, None, "")
    rms = norm.spans["rms"]
    assert rms is not None
    assert rms[0] == 0 < rms[1]


def test_span() -> None:
    assert span(np.array([3.0, math.nan, 1.0, math.inf, 2.0])) == (1.0, 2.0, 3.0)
    assert span(np.array([math.nan])) is None


def test_orders_in_words() -> None:
    assert [order_text(order) for order in (NOT_PACKED, -1, 0)] == [
        "not packed",
        "undecided",
        ORDER_NAMES[0],
    ]
