"""`degarble audit`: healthy checkpoints agree, spoilt ones are named, the page shows both."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file, save_file

from degarble.harness.anatomy.presets import small_v4, small_v32
from degarble.harness.checkpoint.rules import Level
from degarble.harness.checkpoint.synthetic import Synthetic, write_checkpoint
from degarble.harness.record.verdict import Verdict
from degarble.harness.runs.audit import NOT_JUDGED, audit
from degarble.harness.runs.audit_page import audit_page
from degarble.harness.runs.machine import provenance
from degarble.reports.page_html import page_html
from degarble.suites.cli.calls import call

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.harness.anatomy.config import Config

NARROW = {"hidden_size": 64, "moe_intermediate_size": 64, "n_routed_experts": 4}
V4 = small_v4(
    **NARROW, q_lora_rank=32, o_lora_rank=32, head_dim=64, qk_rope_head_dim=16, index_head_dim=32
)
CASES: list[tuple[Config, str]] = [
    (V4, "official"),
    (V4, "nvfp4-experts"),
    (V4, "nvfp4-full"),
    (V4, "compressed-tensors"),
    (V4, "bf16"),
    (small_v32(), "nvfp4-experts"),
]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("audited") / "small-v4"
    write_checkpoint(target, Synthetic(V4, "nvfp4-experts", seed=3), shards=2)
    return target


def _spoilt(healthy: Path, folder: Path, drop: str) -> Path:
    """A copy whose shards lack every tensor that ends with `drop`, the index included."""
    target = folder / "spoilt"
    shutil.copytree(healthy, target)
    for shard in sorted(target.glob("*.safetensors")):
        tensors = {n: t for n, t in load_file(shard).items() if not n.endswith(drop)}
        save_file(tensors, shard)
    return target


@pytest.mark.parametrize(
    ("config", "layout"), CASES, ids=[f"{c.family}-{layout}" for c, layout in CASES]
)
def test_healthy_checkpoints_agree(config: Config, layout: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "made", Synthetic(config, layout, seed=1))
    found = audit(tmp_path / "made")
    assert found.verdict is Verdict.AGREES
    assert not found.counts[Level.ERROR], found.findings
    assert found.tensors > 100


def test_a_healthy_checkpoint_ends_with_status_0(
    healthy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = call(capsys, "audit", healthy)
    assert done.status == 0
    assert "AGREES" in done.out
    assert NOT_JUDGED in done.out


def test_missing_tensors_are_named_with_status_1(
    healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sick = _spoilt(healthy, tmp_path, "layers.2.attn.wq_b.weight")
    done = call(capsys, "--json", "audit", sick)
    assert done.status == 1
    document = done.document
    assert document["verdict"] == "DIFFERS"
    assert document["judged"] == ["structure"]
    errors = [each for each in document["findings"] if each["level"] == "error"]
    assert any("layers.2.attn.wq_b" in each["message"] for each in errors)
    assert all(each["remedy"] for each in errors)


def test_missing_input_scales_are_one_finding_a_layer(healthy: Path, tmp_path: Path) -> None:
    found = audit(_spoilt(healthy, tmp_path, ".w1.input_scale"))
    about = [each for each in found.findings if each.layer == 1 and "input_scale" in each.message]
    assert about
    assert sum(each.count for each in about) >= 4


def test_the_page_shows_map_findings_and_what_was_not_judged(
    healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sick = _spoilt(healthy, tmp_path, "layers.2.attn.wq_b.weight")
    done = call(capsys, "audit", sick, "--report", tmp_path / "page")
    assert done.status == 1
    (path,) = (tmp_path / "page").glob("*.html")
    text = path.read_text(encoding="utf-8")
    for part in (NOT_JUDGED, "Worst finding by layer", "layers.2.attn.wq_b", "DIFFERS"):
        assert part in text


def test_a_page_of_many_findings_stays_small(healthy: Path, tmp_path: Path) -> None:
    found = audit(_spoilt(healthy, tmp_path, "weight"))
    assert len(found.findings) > 20
    assert len(page_html(audit_page(found, provenance("degarble audit x")))) < 3_000_000


def test_the_identity_follows_what_is_in_the_files(healthy: Path, tmp_path: Path) -> None:
    same = tmp_path / "same"
    shutil.copytree(healthy, same)
    assert audit(same).identity == audit(healthy).identity
    assert audit(_spoilt(healthy, tmp_path, "norm.weight")).identity != audit(healthy).identity


@pytest.mark.parametrize("option", [("--against", "."), ("--loader", "vllm")])
def test_what_is_not_built_refuses_by_name(
    healthy: Path, option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    done = call(capsys, "audit", healthy, *option)
    assert done.status == 2
    assert option[0] in done.err


def test_a_folder_without_a_checkpoint_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = call(capsys, "audit", tmp_path)
    assert done.status in (1, 2)
    assert "Traceback" not in done.err
