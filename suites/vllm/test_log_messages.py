"""Banner, lines and records: what a start says of itself, whole or not at all."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.vllm import log_messages, parts

if TYPE_CHECKING:
    from pathlib import Path

BANNER = log_messages.Banner(
    manifest="manifest 3a28", recipe="8 modules BF16", target="sm_90a",
    kernels=("sm90_gemm_bf16",), graphs="ALWAYS", proof="1 ranks, 119 tensors placed",
    known=("attn.attend DIFFERS until 2026-12-01: slow (issue 7)",), commit="commit 1a2b",
    version="0.1.0", vllm="0.33.0",
)  # fmt: skip
KERNEL = parts.KERNELS["linear", parts.BF16]
RUNNING = [
    parts.ours("model.layers.0.attn.wq_b", "linear", "BF16", KERNEL, "by rows"),
    parts.theirs("model.layers.0.attn", "attend", "fp8_ds_mla"),
]


def test_the_banner_says_code_checkpoint_kernels_and_known_failures() -> None:
    assert BANNER.lines() == [
        "degarble 0.1.0 (commit 1a2b) in vLLM 0.33.0 on sm_90a",
        "checkpoint manifest 3a28, recipe 8 modules BF16",
        "loader proof: 1 ranks, 119 tensors placed",
        "kernels: sm90_gemm_bf16; CUDA graphs: ALWAYS",
        "known failure: attn.attend DIFFERS until 2026-12-01: slow (issue 7)",
    ]


def test_every_part_has_a_line_and_says_whose_it_is() -> None:
    assert log_messages.lines(RUNNING) == [
        "2 parts: 1 by degarble, 1 by vllm",
        "model.layers.0.attn.wq_b linear [BF16]: degarble kernels: sm90_gemm_bf16 (by rows)",
        "model.layers.0.attn attend [fp8_ds_mla]: vllm its own (asked for)",
    ]


def test_records_become_labels(tmp_path: Path) -> None:
    folder = tmp_path / "start"
    log_messages.leave(folder, 3, BANNER, RUNNING)
    log_messages.leave(folder, 0, BANNER, RUNNING[:1])
    found = log_messages.read_records(folder)
    assert found == {0: RUNNING[:1], 3: RUNNING}
    label = log_messages.labels(3, found[3])[1]
    assert label["rank"] == "3"
    assert (label["part"], label["by"], label["kernel"]) == ("attend", "vllm", "its own")
    assert [path.suffix for path in folder.iterdir()] == [".json"] * 2


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 2}', '{"schema": 1, "rank": 0}'])
def test_records_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "rank-0.json").write_text(text)
    with pytest.raises(UnreadableFile, match=r"rank-0\.json"):
        log_messages.read_records(tmp_path)


def test_a_record_holds_no_path(tmp_path: Path) -> None:
    path = log_messages.leave(tmp_path, 0, BANNER, RUNNING)
    assert str(tmp_path) not in json.dumps(json.loads(path.read_text()))


def test_commit_and_folder() -> None:
    assert log_messages.commit_of("0.1.0+g1a2b3c") == "commit 1a2b3c"
    assert log_messages.commit_of("0.1.0") == log_messages.NO_COMMIT
    assert log_messages.folder_of("../x1", None).name.endswith("-x1")
    assert str(log_messages.folder_of("x", "asked")) == "asked"
