"""Run the audit with all its parts, on threads and on a cluster."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import pytest

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.checkpoint.audit.findings import FindingLocation, Findings
from degarble.harness.checkpoint.audit.numbers.numbers import judge_numbers, measure_numbers
from degarble.harness.checkpoint.audit.rules import UNEXPECTED, Level
from degarble.harness.checkpoint.audit.table import NUMBER_COLUMNS
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.commands.audit.audit import (
    KINDS,
    OTHER,
    WHOLE,
    AuditRequest,
    audit,
    by_rule,
    kind_of,
    kind_of_name,
)
from degarble.harness.commands.audit.audit import layer_of_name as layer
from degarble.harness.commands.audit.spread import WalkPiece, measured, pieces
from degarble.harness.model.config.config import small_v4, small_v32
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.tensors import tensors_of
from degarble.harness.report.progress import Progress
from degarble.harness.report.verdict import Verdict
from degarble.suites.checkpoint.structure_cases import V4 as STORED
from degarble.suites.checkpoint.structure_cases import write
from degarble.suites.commands.audit.audit_cases import healthy_checkpoint, sick_checkpoint, without
from degarble.suites.commands.calls import call
from degarble.suites.commands.cluster_cases import PlayedCluster, played_cluster
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.harness.model.config.config import Config


# --------------------------------------------------------------------------------------------------
# `degarble audit`: healthy checkpoints agree, spoilt ones are named, wrong words are refused.

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
    (V4, "transformers"),
    (small_v32(), "nvfp4-experts"),
]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return healthy_checkpoint(tmp_path_factory)


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sick_checkpoint(tmp_path_factory)


@pytest.mark.parametrize(
    ("config", "layout"), CASES, ids=[f"{c.family}-{layout}" for c, layout in CASES]
)
def test_healthy_checkpoints_agree(config: Config, layout: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "made", Synthetic(config, layout, seed=1))
    found = audit(AuditRequest(tmp_path / "made"))
    assert found.verdict is Verdict.AGREES
    assert not found.counts[Level.ERROR], found.findings
    assert [part.name for part in found.judged] == ["structure", "numbers"]
    assert found.table is not None
    assert found.table["nbytes"].sum() == found.subject.nbytes


def test_a_healthy_checkpoint_ends_with_status_0(
    healthy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = call(capsys, "audit", healthy)
    assert done.status == 0
    assert done.out.startswith("✓ NO ERRORS FOUND  No error in the structure and the numbers")
    assert "\nnot judged  against " in done.out


def test_spoilt_numbers_are_named_with_status_1(
    sick: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = call(capsys, "--json", "audit", sick)
    assert done.status == 1
    document = done.document
    assert document["verdict"] == "DIFFERS"
    rules = {each["rule"] for each in document["findings"] if each["level"] == "error"}
    assert {
        "numbers.scale_not_finite",
        "numbers.scale_not_positive",
        "numbers.tensor_zero",
        "numbers.identical",
    } <= rules
    assert document["origins"][0]["reproducer"] == "degarble audit sick-v4"


def test_structure_alone_reads_no_numbers_and_says_so(
    sick: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("numbers were read")

    monkeypatch.setattr("degarble.harness.commands.audit.spread.measured", never)
    done = call(capsys, "--json", "audit", sick, "--only", "structure")
    document = done.document
    assert list(document["judged"]) == ["structure"]
    assert "--only structure" in document["not_judged"]["numbers"]
    assert "structure of all" in document["sentence"] or document["verdict"] == "DIFFERS"
    assert document["numbers"] is None
    assert not any(each["rule"].startswith("numbers.") for each in document["findings"])


def test_missing_tensors_are_named(
    healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoilt = without(healthy, tmp_path / "spoilt", "layers.2.attn.wq_b.weight")
    done = call(capsys, "--json", "audit", spoilt, "--only", "structure")
    assert done.status == 1
    errors = [each for each in done.document["findings"] if each["level"] == "error"]
    assert any("layers.2.attn.wq_b" in error["message"] for error in errors)
    assert all(error["remedy"] for error in errors)


def test_missing_input_scales_are_one_finding_a_layer(healthy: Path, tmp_path: Path) -> None:
    spoilt = without(healthy, tmp_path / "spoilt", ".w1.input_scale")
    found = audit(AuditRequest(spoilt, numbers=False))
    about = [
        finding
        for finding in found.findings
        if finding.layer == 1 and "input_scale" in finding.message
    ]
    assert about
    assert sum(finding.count for finding in about) >= 4


def test_one_rule_in_many_places_is_reported_once(sick: Path) -> None:
    found = audit(AuditRequest(sick))
    gathered = {rule.first.rule: rule for rule in by_rule(found.findings)}
    assert gathered["numbers.scale_not_finite"].extent == "in 3 places, layer 1"
    assert gathered["numbers.tensor_zero"].extent == ""
    assert len(gathered) == len({finding.rule for finding in found.findings})
    assert sum(rule.count for rule in gathered.values()) == sum(found.counts.values())


def test_the_identity_follows_what_is_in_the_files(healthy: Path, tmp_path: Path) -> None:
    same = tmp_path / "same"
    shutil.copytree(healthy, same)
    first = audit(AuditRequest(healthy, numbers=False)).subject.identity
    assert audit(AuditRequest(same, numbers=False)).subject.identity == first
    spoilt = without(healthy, tmp_path / "spoilt", "norm.weight")
    assert audit(AuditRequest(spoilt, numbers=False)).subject.identity != first


def test_loading_is_proven_by_a_map(healthy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = call(capsys, "--json", "audit", healthy, "--only", "structure", "--loader", "vllm:tp=2")
    document = done.document
    assert done.status == 0, document["findings"]
    assert document["judged"]["loader"].startswith("map vllm for deepseek_v4 on 2 ranks: ")
    assert document["loader"]["ranks"] == {"tp": 2, "ep": 1, "pp": 1, "proven": [0, 1]}
    assert [share["rank"] for share in document["loader"]["shares"]] == [0, 1]


def test_partners_that_do_not_fit_are_a_finding_and_the_rest_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """32 rows of q_a, where fused_wqa_wkv has one row of scales for 128."""
    write_checkpoint(tmp_path / "made", Synthetic(V4, "official", seed=1))
    words = ("audit", tmp_path / "made", "--loader", "vllm", "--report", tmp_path / "page")
    done = call(capsys, "--json", *words)
    assert done.status == 1
    document = done.document
    (error,) = (each for each in document["findings"] if each["level"] == "error")
    assert error["rule"] == "loader.partners_differ"
    assert "rows in front of layers.0.attn.wkv: 32, expected a multiple of 128" in error["message"]
    assert list(document["judged"]) == ["structure", "numbers", "loader"]
    assert document["judged"]["loader"].endswith("nothing else of the loading was judged.")
    assert document["loader"]["ranks"]["proven"] == []
    assert document["loader"]["shares"] == []
    (tmp_path / "map.yaml").write_text("base: vllm\nname: mine\n")
    again = call(capsys, "audit", tmp_path / "made", "--loader", tmp_path / "map.yaml")
    assert (again.status, again.err) == (1, "")


def test_one_format_in_all_layers_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "made", STORED, "nvfp4-full")
    words = ("--only", "structure", "--loader", "vllm")
    document = call(capsys, "--json", "audit", tmp_path / "made", *words).document
    told = [each for each in document["findings"] if each["rule"] == "loader.format"]
    of_wq_a = [each for each in told if each["module"].endswith(".q_a_proj")]
    (first,) = of_wq_a
    assert (first["count"], first["layer"], first["layers"]) == (3, None, [0, 1, 2])
    assert first["message"].endswith("And 2 more like it, layers 0-2.")
    assert first["module"] == "model.layers.0.self_attn.q_a_proj"
    assert {each["module"].split(".")[-1] for each in told} > {"o_b_proj", "kv_proj", "up_proj"}


def test_a_map_that_drops_scales_differs(
    healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "map.yaml").write_text('base: vllm\nskip: ["\\\\.weight_scale$"]\n')
    done = call(capsys, "audit", healthy, "--only", "structure", "--loader", tmp_path / "map.yaml")
    assert done.status == 1
    assert "loader.skipped_scale" in done.out


def test_the_page_and_the_file_are_written(
    sick: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    done = call(capsys, "audit", sick, "--report", tmp_path / "page", "--json", file)
    assert done.status == 1
    (path,) = (tmp_path / "page").glob("*.html")
    assert f"Open the report: {path}" in done.out
    text = path.read_text(encoding="utf-8")
    for part in ("The worst finding of each layer", "numbers.scale_not_finite", "DIFFERS"):
        assert part in text
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["schema"] == 1
    assert document["report"] == str(path)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("--only", "numbers"), "--only"),
        (("--only", "structure", "--against", "."), "--against"),
        (("--only", "structure", "--cluster", "ray"), "--cluster"),
        (("--loader", "vlm"), "--loader"),
        (("--loader", "vllm:tp=none"), "tp=none"),
        (("--loader", "vllm:tp=3"), "tp"),
        (("--loader", "vllm:"), "loader map: ranks = ''"),
        (("--loader", "vllm:tp=3", "--report", "page/of/mine"), "tp"),
        (("--against", ""), "--against = ''"),
        (("--report=",), "--report = ''"),
        (("--json", "nowhere/found.json"), "--json"),
        (("--json", "."), "--json"),
        (("--report", "file"), "--report"),
    ],
)
def test_wrong_words_are_refused_before_the_walk(
    healthy: Path,
    tmp_path: Path,
    words: tuple[str, ...],
    name: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("numbers were read")

    monkeypatch.setattr("degarble.harness.commands.audit.spread.measured", never)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("in the way")
    done = call(capsys, "audit", healthy, *words)
    assert done.status == 2, done
    assert name in done.err
    assert "Traceback" not in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_is_no_checkpoint_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = call(capsys, "audit", tmp_path)
    assert done.status == 2
    assert "no safetensors file" in done.err
    (tmp_path / "map.yaml").write_text("parameters: 3\n")
    done = call(capsys, "audit", tmp_path / "map.yaml")
    assert (done.status, done.out) == (2, "")


def test_a_broken_map_is_refused(
    healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "map.yaml").write_text("parameters: 3\n")
    done = call(capsys, "audit", healthy, "--loader", tmp_path / "map.yaml")
    assert done.status == 2
    assert "loader map: parameters" in done.err


def test_an_interrupted_audit_writes_nothing(
    healthy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("degarble.harness.commands.audit.spread.measured", interrupted)
    target = tmp_path / "page"
    done = call(capsys, "audit", healthy, "--report", target, "--json", tmp_path / "found.json")
    assert done.status == 130
    assert not target.exists()
    assert not (tmp_path / "found.json").exists()


def test_progress_counts_every_byte(healthy: Path) -> None:
    seen: list[Progress] = []

    class Listening:
        def __init__(self, total: int) -> None:
            self.progress = Progress("audit", total)

        def __enter__(self) -> Progress:
            seen.append(self.progress)
            return self.progress

        def __exit__(self, *_: object) -> None:
            return None

    audit(AuditRequest(healthy), 2, Listening)
    (progress,) = seen
    assert progress.pace.done == progress.pace.total > 0


def test_joined_tables_are_the_table_of_one_walk(sick: Path) -> None:
    asked: list[str | None] = []
    counted: list[int] = []
    with Checkpoint.survey(sick) as checkpoint:
        alone = measure_numbers(checkpoint)
        joined = measured(checkpoint, sick, PlayedCluster(asked), counted.append)
        assert joined.units == alone.units
        assert len(asked) > 1
        assert sum(counted) == alone["nbytes"].sum()
        for name in NUMBER_COLUMNS:
            assert np.array_equal(
                joined[name], alone[name], equal_nan=alone[name].dtype.kind == "f"
            ), name
        assert judge_numbers(checkpoint, joined) == judge_numbers(checkpoint, alone)


def test_the_command_is_spread_over_a_cluster(
    sick: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = call(capsys, "--json", "audit", sick).document
    asked = played_cluster(monkeypatch)
    there = call(capsys, "--json", "audit", sick, "--cluster", "ray").document
    assert len(asked) > 1
    assert there["findings"] == here["findings"]
    assert there["numbers"] == here["numbers"]


def test_places_are_cut_into_pieces_of_about_one_size() -> None:
    cut = pieces([("a", 4), ("b", 10), ("a", 6), ("c", 500), ("d", 10), ("e", 10)], 4)
    assert cut == [WalkPiece(("a", "b", "c"), 520), WalkPiece(("d", "e"), 20)]
    many = pieces(((str(i), 1) for i in range(1000)), 8)
    assert len(many) <= 8
    assert [name for piece in many for name in piece.places] == [str(i) for i in range(1000)]


def test_a_thread_that_fails_ends_the_walk(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Otherwise Ctrl-C and a full disk would be answered when 881 GB have been read."""
    calls: list[int] = []
    lock = threading.Lock()

    def refuse(nbytes: int) -> None:
        with lock:
            calls.append(nbytes)
        raise InvalidArgument("progress", nbytes, "nothing", "Planted.")

    folder = healthy_checkpoint(tmp_path_factory)
    with Checkpoint.survey(folder) as opened, pytest.raises(InvalidArgument, match="Planted"):
        measure_numbers(opened, workers=2, progress=refuse)
    assert 1 <= len(calls) <= 2  # each thread at its first unit at most


def test_an_interrupted_walk_ends_soon(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []

    def interrupted(_: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr("degarble.harness.checkpoint.audit.table.as_completed", interrupted)
    folder = healthy_checkpoint(tmp_path_factory)
    with Checkpoint.survey(folder) as opened, pytest.raises(KeyboardInterrupt):
        measure_numbers(opened, workers=2, progress=done.append)
    assert sum(done) < sum(entry.nbytes for entry in opened.entries.values()) / 2


SPELLINGS = ("official", "bf16", "nvfp4-full", "compressed-tensors", "transformers", "vllm")


@pytest.mark.parametrize("config", [small_v4(), small_v32()], ids=lambda c: str(c.family))
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_tensor_of_every_spelling_has_a_kind(config: Config, spelling: str) -> None:
    names = [tensor.name for tensor in tensors_of(config, layout_named(spelling, config))]
    found = defaultdict(list)
    for name in names:
        found[kind_of_name(name)].append(re.sub(r"\d+", "#", name))
    assert OTHER not in found, set(found[OTHER])
    assert {"experts", "shared experts", "router", "indexer", "norms", "attention"} <= set(found)
    assert all("shared" not in name for name in found["experts"])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("layers.3.ffn.experts.17.w1.weight_scale_2", "experts"),
        ("model.layers.3.mlp.experts.gate_up_proj", "experts"),
        ("layers.3.ffn.shared_experts.w1.weight", "shared experts"),
        ("layers.3.ffn.gate.tid2eid", "router"),
        ("model.layers.3.mlp.gate.e_score_correction_bias", "router"),
        ("model.layers.3.mlp.gate_proj.weight", "dense MLP"),
        ("layers.3.attn.indexer.compressor.wkv.weight", "indexer"),
        ("layers.3.attn.compressor.norm.weight", "compressor"),
        ("hc_head_fn", "mixing"),
        ("layers.3.attn.q_norm.weight", "norms"),
        ("layers.3.attn.wo_a.weight", "attention"),
        ("mtp.0.e_proj.scale", "drafter input"),
        ("lm_head.weight", "embedding, head"),
        ("rotary.inv_freq", OTHER),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of_name(name) == kind
    assert kind in KINDS


def test_layers() -> None:
    assert layer("layers.3.attn.wkv.weight", 61) == 3
    assert layer("model.layers.61.eh_proj.weight", 61) == 61
    assert layer("mtp.0.e_proj.weight", 61) == 61
    assert layer("norm.weight", 61) is None


def test_a_finding_without_a_name_is_about_all() -> None:
    findings = Findings()
    findings.add(UNEXPECTED, FindingLocation(), "m", "r")
    findings.add(UNEXPECTED, FindingLocation(None, "layers.1.attn.wkv"), "m", "r")
    assert {kind_of(finding) for finding in findings.sorted()} == {WHOLE, "attention"}


def test_a_content_hash_follows_the_weights_where_the_identity_does_not(
    healthy: Path, tmp_path: Path
) -> None:
    same, other = tmp_path / "same", tmp_path / "other"
    for folder in (same, other):
        shutil.copytree(healthy, folder)
        (folder / "manifest.json").unlink(missing_ok=True)
    shard = next(other.glob("*.safetensors"))
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    first, second = (
        audit(AuditRequest(folder, numbers=False, content_hash=True)) for folder in (same, other)
    )
    assert first.subject.identity == second.subject.identity
    assert first.content != second.content
    assert first.headline == "NO ERRORS FOUND"
    assert audit(AuditRequest(same, numbers=False)).content is None
