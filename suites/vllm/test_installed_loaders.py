"""vLLM's own loaders take what `convert` and `quantise` write for them: each name, each parameter.

Real extents matter here (blocks of 128), so the sources are synthetic; the trained small models are
loaded by the campaign suites/campaigns/consumers.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.checkpoint.transform.convert.job import convert
from degarble.harness.checkpoint.transform.convert.prove import prove
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.recipes import Recipe, Rule, recipe_named
from degarble.suites.checkpoint.structure_cases import V4, V32
from degarble.suites.hang_guard import HANG_SECONDS
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.vllm

CONFIGS: dict[str, Any] = {
    "v4": replace(V4, head_dim=512, index_head_dim=128, num_nextn_predict_layers=0),
    "v32": replace(V32, num_nextn_predict_layers=0),
}
# (family, layout of the source): what it is converted to; an empty word: as it is.
READ = {
    ("v4", "bf16"): ("", "fp8-block", "fused-compressor"),
    ("v4", "official"): ("", "bf16", "fp8-block", "fused-compressor"),
    ("v4", "nvfp4-experts"): ("", "bf16", "fp8-block", "fused-compressor"),
    ("v4", "nvfp4-full"): ("bf16", "fp8-block"),
    ("v32", "bf16"): ("", "fp8-block", "nvfp4"),
    ("v32", "official"): ("", "bf16", "fp8-block"),
    ("v32", "nvfp4-experts"): ("bf16", "fp8-block"),
    ("v32", "nvfp4-full"): ("", "bf16", "fp8-block"),
}
_NO_COMPRESSORS = (Rule("*.compressor.*", "BF16"),)


def test_vllm_reads_what_is_written_for_it(tmp_path: Path) -> None:
    folders = []
    for (family, layout), targets in READ.items():
        source = tmp_path / f"{family}-{layout}"
        write_checkpoint(source, Synthetic(CONFIGS[family], layout, seed=5))
        for to in targets:
            folders.append(tmp_path / f"{family}-{layout}-{to}" if to else source)
            if to:
                convert(source, folders[-1], to)
                assert prove(source, folders[-1]).holds
    told = loaded(tmp_path / "out", folders)
    assert {each["checkpoint"] for each in told} == {folder.name for folder in folders}
    assert [each for each in told if "error" in each or each["missing"] or each["unexpected"]] == []
    assert all(each["parameters"] > 30 for each in told)


def test_compressors_alone_keep_vllm_from_v4_in_nvfp4(tmp_path: Path) -> None:
    """vLLM 0.33 builds them unquantised: models/deepseek_v4/compressor.py, quant_config=None."""
    config = CONFIGS["v4"]
    rules = _NO_COMPRESSORS + recipe_named("nvfp4-full", config).rules
    released = replace(layout_named("official", config), recipe="nvfp4-full")
    full, without = tmp_path / "full", tmp_path / "without"
    write_checkpoint(full, Synthetic(config, released, seed=5))
    write_checkpoint(without, Synthetic(config, released, Recipe("without", rules), seed=5))
    stopped, read = loaded(tmp_path / "out", [full, without])
    assert "compressor.fused_wkv_wgate" in stopped["error"]
    assert (read["missing"], read["unexpected"]) == ([], [])


def test_nvfp4_that_is_not_declared_to_vllm_does_not_load_in_it(tmp_path: Path) -> None:
    """Where one of these loads, harness/checkpoint/view/consumers.py may name vLLM for it."""
    experts, beside_fp8, lossless = (tmp_path / name for name in ("experts", "fp8", "lossless"))
    write_checkpoint(experts, Synthetic(CONFIGS["v32"], "nvfp4-experts", seed=5))
    write_checkpoint(tmp_path / "v32", Synthetic(CONFIGS["v32"], "official", seed=5))
    write_checkpoint(tmp_path / "v4", Synthetic(CONFIGS["v4"], "official", seed=5))
    convert(tmp_path / "v32", beside_fp8, "nvfp4")
    convert(tmp_path / "v4", lossless, "nvfp4-lossless")
    told = loaded(tmp_path / "out", [experts, beside_fp8, lossless])
    assert [each["checkpoint"] for each in told if "error" in each] == [
        "experts",
        "fp8",
        "lossless",
    ]
    assert "size of tensor" in told[2]["error"]


def loaded(out: Path, folders: list[Path]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "degarble.suites.vllm.loading_model", str(out)]
    done = subprocess.run(
        [*command, *map(str, folders)],
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_SECONDS,
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check')]
