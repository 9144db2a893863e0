"""A model with vLLM's names and ranks, captured and checked: it agrees, and faults are found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from torch import distributed

from degarble.harness.base.errors import NotBuilt
from degarble.harness.capture.capture import CaptureSettings, facts_of
from degarble.harness.capture.engine.maps import vllm_component_maps
from degarble.harness.capture.engine.ranks import APART, join_ranks
from degarble.harness.capture.files.reader import Capture
from degarble.harness.commands.check.check import CheckRun, CheckSettings
from degarble.harness.inference.model import open_model
from degarble.harness.model.config.config import small_v32
from degarble.harness.report.verdict import Verdict
from degarble.suites.museum.torchrun import run_ranks
from degarble.suites.vllm.vllm_ranks import PROMPTS, STEPS, captured

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.harness.commands.check.check import CheckResult

TINY = Path(__file__).parents[2] / "references" / "tiny" / "v1" / "v4"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm")
    run_ranks("degarble.suites.vllm.vllm_ranks", 2, str(TINY), str(folder))
    return folder


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    meeting = f"file://{tmp_path}/store"
    distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def joined(folder: Path) -> Path:
    ranks = sorted(folder.glob("rank-*"))
    with open_model(TINY) as model:
        places = vllm_component_maps(model.config, len(ranks))
        facts = facts_of(TINY, model, CaptureSettings(backend="vllm")) | {"backend": "vllm"}
    join_ranks(ranks, places, folder / "joined", facts)
    return folder / "joined"


def checked(capture: Path) -> CheckResult:
    with CheckRun(CheckSettings(capture, TINY)) as run:
        return run.judge()


@pytest.mark.usefixtures("alone")
def test_one_rank_agrees_and_only_what_was_requested_is_captured(tmp_path: Path) -> None:
    captured(TINY, tmp_path / "one", ())
    result = checked(joined(tmp_path / "one"))
    assert result.verdict is Verdict.AGREES
    capture = Capture.open(tmp_path / "one" / "joined")
    assert capture.facts["requests"] == ["cmpl-mine-0", "cmpl-and-mine-1"]
    wanted = [PROMPTS[name] for name in capture.facts["requests"]]
    assert len(capture.steps) == STEPS
    assert list(capture.steps[0].tokens) == [token for ids in wanted for token in ids]
    judged = {row.component.role for row in result.localised.rows if not row.undecided}
    assert judged >= {
        "embed", "attn.wq_a", "attn.wkv", "attn.q_norm", "attn.wq_b", "attn.compressor.proj",
        "attn.indexer.wq_b", "attn.indexer.compressor.proj", "attn.wo_b", "ffn.gate", "ffn.topk",
        "ffn.shared.w13", "ffn.shared.act", "ffn.shared.w2", "ffn.moe_sum", "norm", "head",
    }  # fmt: skip


@pytest.mark.slow
def test_two_ranks_agree(two_ranks: Path) -> None:
    result = checked(joined(two_ranks / "healthy"))
    assert result.verdict is Verdict.AGREES
    assert not result.localised.notes


@pytest.mark.slow
def test_faults_of_loading_and_of_ranks_are_found(two_ranks: Path) -> None:
    result = checked(joined(two_ranks / "faulty"))
    assert result.verdict is Verdict.DIFFERS
    named = {
        origin.discrepancy.site.component: origin.diagnosed.named[0].fault.id
        for origin in result.origins
        if origin.diagnosed is not None and origin.diagnosed.named
    }
    assert named["layers.1.ffn.shared.w13"] == "M14.swapped"
    blamed = {origin.discrepancy.site.component for origin in result.origins}
    assert blamed == {
        "layers.1.ffn.shared.w13", "layers.2.attn.wq_a", "layers.2.attn.wkv",
        "layers.3.ffn.shared.w2",
    }  # fmt: skip
    apart = Capture.open(two_ranks / "faulty" / "joined").facts[APART]
    assert apart[0] == "layers.1.attn.wkv.out: rank 1 is not as rank 0"
    assert any("copies differ between ranks" in note for note in result.localised.notes)


def test_another_family_is_refused() -> None:
    with pytest.raises(NotBuilt, match="modules of a model family = 'deepseek_v32'"):
        vllm_component_maps(small_v32())
