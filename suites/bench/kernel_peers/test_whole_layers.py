"""Whole layers beside vLLM: slopes, the checkpoint's first layers, turns, and rows with reasons.

vLLM is replaced by stand-ins; ours is launched on a pretended GPU.
"""

from __future__ import annotations

import fcntl
import json
import sys
import time
from collections import defaultdict
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.references.tiny.configs import TINY_V4
from degarble.suites.bench import decoder, gpu
from degarble.suites.bench.kernel_peers import __main__ as command
from degarble.suites.bench.kernel_peers import report, vllm_layers, whole_layers
from degarble.suites.bench.kernel_peers.contest import OURS, TimedRow
from degarble.suites.bench.kernel_peers.whole_layers import VLLM, LayersRun
from degarble.suites.bench.test_gpu_benches import Recording
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

US = 1e-6
SMALL = replace(
    TINY_V4, hidden_size=256, q_lora_rank=128, o_lora_rank=128, moe_intermediate_size=128,
    num_hash_layers=0, num_nextn_predict_layers=0,
)  # fmt: skip


# ---- slopes and rows -----------------------------------------------------------------------------


def test_what_does_not_grow_with_layers_is_no_part_of_a_slope() -> None:
    steps = {8: [90 * US, 91 * US, 92 * US], 4: [50 * US, 51 * US, 52 * US]}
    made = whole_layers.slope(steps)
    assert made.median == pytest.approx(10 * US)
    assert made.low == pytest.approx((90.5 - 51.5) / 4 * US)
    assert made.high == pytest.approx((91.5 - 50.5) / 4 * US)
    later = whole_layers.slope({n: [each + 300 * US for each in of] for n, of in steps.items()})
    assert later.median == pytest.approx(made.median)


def test_a_row_has_both_slopes_their_ratio_and_whole_steps() -> None:
    ours = whole_layers.arm_record({4: [40 * US] * 3, 8: [80 * US] * 3})
    theirs = whole_layers.arm_record({4: [100 * US] * 3, 8: [160 * US] * 3})
    made = whole_layers.row_record({OURS: ours, VLLM: theirs})
    assert made["ratio"] == pytest.approx(1.5)
    assert made["best"] == VLLM
    assert made["goals"][0]["met"]
    assert made["arms"][VLLM]["steps"] == {"4": pytest.approx(100), "8": pytest.approx(160)}
    slower = whole_layers.row_record({OURS: theirs, VLLM: ours})
    assert not slower["goals"][0]["met"]
    record = {"group": "layers", "row": whole_layers.name_of(64, 2048), "origin": "here", **made}
    text = report.markdown([record], {"layers": "layers"})
    assert "64 tokens, context 2,048 |" in text
    assert "| 10.0 | 15.0 | 1.50 (vLLM 0.26) | 1.50 of the best peer (>= 1: met) |" in text


def test_a_row_without_one_side_has_a_reason_and_no_ratio() -> None:
    rows = [{"layers": 4, "seconds": [US], "experts": [], "step_seconds": US}]
    theirs = whole_layers.vllm_arm(rows, (4, 8), "")
    assert theirs == {"reason": "not every number of layers was timed"}
    made = whole_layers.row_record({OURS: {"microseconds": 1.0}, VLLM: theirs})
    assert "ratio" not in made
    assert made["goals"] == []
    assert whole_layers.vllm_arm([], (4, 8), "no vLLM")["reason"] == "no vLLM"


@pytest.mark.parametrize("layers", [("4", "4"), ("0", "4")])
def test_a_slope_needs_two_numbers_of_layers(
    layers: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert whole_layers.main([str(tmp_path), "--layers", *layers]) == 2
    assert "two numbers of layers" in capsys.readouterr().err


def test_a_checkpoint_of_other_layers_is_not_taken(tmp_path: Path) -> None:
    assert LayersRun(tmp_path, (4, 6)).checkpoint != LayersRun(tmp_path, (4, 8)).checkpoint


# ---- a checkpoint's first layers -----------------------------------------------------------------


def test_first_layers_are_links_and_their_own_config(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    write_checkpoint(whole, Synthetic(SMALL, whole_layers.LAYOUT, seed=1), shards=9)
    count = SMALL.num_hidden_layers - 1
    part = vllm_layers.first_layers(whole, tmp_path / "part", count)
    config = json.loads((part / vllm_layers.CONFIG).read_text())
    assert config["num_hidden_layers"] == count
    assert config["compress_ratios"] == list(SMALL.compress_ratios[:count])
    index = json.loads((part / vllm_layers.INDEX).read_text())["weight_map"]
    assert max(map(vllm_layers.layer_of, index)) == count - 1
    assert "head.weight" in index
    files = {path.name for path in part.glob("*.safetensors")}
    assert files == set(index.values())
    assert files < {path.name for path in whole.glob("*.safetensors")}
    assert vllm_layers.first_layers(whole, part, count) == part, "an earlier run's is replaced"
    assert vllm_layers.first_layers(whole, part, SMALL.num_hidden_layers) == whole


def test_the_loader_passes_over_layers_that_the_config_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []

    class Model:
        config = SimpleNamespace(num_hidden_layers=2)

        def load_weights(self, weights: Any) -> None:
            seen.extend(name for name, _ in weights)

    module = ModuleType("vllm.models.deepseek_v4")
    vars(module)["DeepseekV4ForCausalLM"] = Model
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.models", ModuleType("vllm.models"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    vllm_layers.read_first_layers()
    names = ("embed.weight", "layers.1.attn.wkv.weight", "layers.2.attn.wkv.weight", "norm.weight")
    Model().load_weights((name, None) for name in names)
    assert seen == [name for name in names if "layers.2" not in name]


def test_layers_of_a_kind_share_a_group_and_so_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(_approximate_gcd=min)
    monkeypatch.setattr(vllm_layers, "import_module", {"vllm.v1.core.kv_cache_utils": module}.get)
    vllm_layers.share_plans()
    layers = [2, 6, 2, 2]  # of caches with pages of each kind; 6 sliding windows
    assert module._approximate_gcd(layers, lower_bound=layers[0]) == 6


# ---- an engine -----------------------------------------------------------------------------------


class StandInEngine:
    """Computes prompts one a step, then a token of each lane a step."""

    def __init__(self, lanes: int) -> None:
        self.prompts: dict[str, list[int]] = {}
        self.spoken: dict[str, list[int]] = defaultdict(list)
        capture = SimpleNamespace(replay=lambda: None, segments=[1])
        keys = SimpleNamespace(num_tokens=lanes), SimpleNamespace(num_tokens=lanes + 1)
        model = SimpleNamespace(entries=[])
        model.entries = SimpleNamespace(
            items=lambda: [(keys[1], SimpleNamespace(capture=None)),
                           (keys[0], SimpleNamespace(capture=capture))]
        )  # fmt: skip
        dispatcher = SimpleNamespace(dispatch=lambda **named: named)
        self.runner = SimpleNamespace(model=model, cudagraph_dispatcher=dispatcher)
        self.llm_engine = self
        self.routers: Any = None

    def collective_rpc(self, of: Callable[[Any], Any]) -> list[Any]:
        return [of(SimpleNamespace(model_runner=self.runner))]

    def add_request(self, name: str, prompt: dict[str, list[int]], _how: Any) -> str:
        self.prompts[f"{name}-inner"] = prompt["prompt_token_ids"]
        return f"{name}-inner"

    def step(self) -> list[Any]:
        if self.routers is not None and self.spoken:
            self.routers().select_experts()
        started = list(self.prompts)[: len(self.spoken) + 1]
        for name in started:
            self.spoken[name].append(1)
        return [
            SimpleNamespace(
                request_id=name.removesuffix("-inner"), prompt_token_ids=self.prompts[name],
                outputs=[SimpleNamespace(token_ids=self.spoken[name])],
            )
            for name in started
        ]  # fmt: skip


@pytest.fixture
def vllm_here(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    class FusedMoERouter:
        def select_experts(self) -> Any:
            return None, torch.tensor([[1, 2], [2, 7]])

    class CUDAGraphMode:
        NONE = "none"

    place = "vllm.model_executor.layers.fused_moe.router.fused_moe_router"
    known = {
        "vllm": SimpleNamespace(SamplingParams=lambda **named: named),
        place: SimpleNamespace(FusedMoERouter=FusedMoERouter),
        "vllm.config": SimpleNamespace(CUDAGraphMode=CUDAGraphMode),
    }
    monkeypatch.setattr(vllm_layers, "import_module", known.__getitem__)
    monkeypatch.setattr(vllm_layers, "replays", lambda replay: [replay() or 2e-3])
    monkeypatch.setattr(vllm_layers, "kernels_of", lambda _replay: [("marlin", 2, 9.0)])
    return SimpleNamespace(router=FusedMoERouter)


def test_lanes_come_to_the_end_of_the_context_and_go(
    vllm_here: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = StandInEngine(5)
    engine.routers = vllm_here.router
    dispatch, select = engine.runner.cudagraph_dispatcher.dispatch, vllm_here.router.select_experts
    context = vllm_layers.CHUNK  # so each prompt is a step
    lanes = vllm_layers.Lanes(engine, context, 5, 50)
    lanes.add(1)
    lanes.step()
    lanes.add(5)
    found = lanes.timed()
    assert (found["lanes"], found["parts"]) == (5, 1)
    assert found["seconds"] == [2e-3]
    low, high = found["context"]
    assert context <= low <= high <= context + vllm_layers.STEPS + 2
    assert found["experts"] == [3]
    assert engine.runner.cudagraph_dispatcher.dispatch is dispatch
    assert vllm_here.router.select_experts is select
    assert {token for prompt in engine.prompts.values() for token in prompt} <= set(range(50))
    assert "now computing 5 prompts of 8,192 tokens, 4 are done" in capsys.readouterr().out


def test_what_cannot_be_counted_leaves_what_was_timed(vllm_here: Any) -> None:
    engine = StandInEngine(1)
    engine.routers = vllm_here.router
    engine.runner.cudagraph_dispatcher = None
    lanes = vllm_layers.Lanes(engine, 100, 1, 50)
    lanes.add(1)
    found = lanes.timed()
    assert found["seconds"] == [2e-3]
    assert found["experts"] == []


def test_who_times_has_the_gpu_alone(tmp_path: Path) -> None:
    path = tmp_path / "turn"

    def waits(*, alone: bool) -> bool:
        how = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        with path.open("a") as file:
            try:
                fcntl.flock(file, how | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    with vllm_layers.turn(path, alone=False):
        assert waits(alone=True)
        assert not waits(alone=False)
    with vllm_layers.turn(path, alone=True):
        assert waits(alone=False)
    assert not waits(alone=True)


def test_each_number_of_lanes_is_written_once_it_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, written = tmp_path / "out.json", []

    class Lanes:
        def __init__(self, *given: Any) -> None:
            assert given == (None, 90, 4, SMALL.vocab_size)
            self.runner = None

        def add(self, lanes: int) -> None:
            self.lanes = lanes

        def timed(self) -> dict[str, Any]:
            if out.exists():
                written.append(len(json.loads(out.read_text())["rows"]))
            return {"lanes": self.lanes, "seconds": [1e-3]}

    write_checkpoint(tmp_path / "whole", Synthetic(SMALL, whole_layers.LAYOUT, seed=1), shards=1)
    for name in ("read_first_layers", "share_plans", "without_foreign_warmup"):
        monkeypatch.setattr(vllm_layers, name, lambda: None)
    monkeypatch.setattr(vllm_layers, "import_module", lambda _name: SimpleNamespace(__version__=1))
    monkeypatch.setattr(vllm_layers, "engine_of", lambda *_: None)
    monkeypatch.setattr(vllm_layers, "Lanes", Lanes)
    monkeypatch.setattr(vllm_layers, "step_graph", lambda _runner, lanes: (lanes, 1))
    monkeypatch.setattr(vllm_layers, "kernels_of", lambda lanes: [("marlin", lanes, 9.0)])
    line = [str(tmp_path / "whole"), str(out), "--layers", str(SMALL.num_hidden_layers)]
    vllm_layers.main([*line, "--lanes", "4", "1", "--context", "90"])
    rows = json.loads(out.read_text())["rows"]
    assert [row["lanes"] for row in rows] == [1, 4]
    assert [row.get("kernels") for row in rows] == [None, [["marlin", 4, 9.0]]]
    assert written == [1]


# ---- the contest ---------------------------------------------------------------------------------

ENGINE = """
import json, sys, time, pathlib
checkpoint, out, count = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[4])
print("[  0.0 s] now waiting for the checkpoint")
while not checkpoint.exists():
    time.sleep(0.05)
if count == BROKEN:
    sys.exit("RuntimeError: no such kernel")
print("[  0.1 s] now timing 1 lanes")
print("[  0.2 s] 9 us, a kernel's name", flush=True)
if count == SLOW:
    time.sleep(60)
rows = [{"layers": count, "lanes": lanes, "seconds": [1e-4 * count + 1e-3] * 3, "parts": 1,
         "context": [90, 99], "step_seconds": 5e-3, "experts": [5, 7]} for lanes in (1, 2)]
out.write_text(json.dumps({"versions": {"vllm": "0"}, "rows": rows}))
"""


@pytest.fixture
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LayersRun]:
    """A vLLM that is a script; our graphs need no time but what their names say."""

    def make(broken: int = 0, slow: int = 0) -> LayersRun:
        place = tmp_path / "stand_in_engine.py"
        place.write_text(ENGINE.replace("BROKEN", str(broken)).replace("SLOW", str(slow)))
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}")
        monkeypatch.setattr(whole_layers, "ENGINE", "stand_in_engine")
        monkeypatch.setattr(whole_layers, "has_vllm", lambda: True)
        monkeypatch.setattr(whole_layers, "write", lambda folder, *_: folder.mkdir())
        monkeypatch.setattr(whole_layers.OurGraphs, "capture", captured)
        return LayersRun(tmp_path / "run", (2, 4), (1, 2), 99, 3, 1, within=60)

    def captured(self: Any) -> None:
        for lanes in self.run.lanes:
            self.graphs[lanes] = [SimpleNamespace(name=f"{n} layers") for n in self.run.layers]

    return make


class LayersClock:
    """A step takes as long as its graph's name says."""

    def replayed(self, graphs: Any, rounds: int) -> list[tuple[float, ...]]:
        return [({"2 layers": 3e-4, "4 layers": 4e-4}[each.name],) * rounds for each in graphs]


CLOCK: Any = LayersClock()


def test_both_sides_are_timed_one_after_the_other(pretended: Any) -> None:
    found = whole_layers.contested(pretended(), CLOCK)
    assert set(found) == {1, 2}
    for record in found.values():
        ours, theirs = record["arms"][OURS], record["arms"][VLLM]
        assert ours["microseconds"] == pytest.approx(50)
        assert theirs["microseconds"] == pytest.approx(100)
        assert record["ratio"] == pytest.approx(2)
        assert theirs["experts"] == 6
        assert theirs["engine_steps"] == {"2": 5000, "4": 5000}


def test_an_engine_that_ends_early_is_a_reason(
    pretended: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    found = whole_layers.contested(pretended(broken=4), CLOCK)
    reason = found[1]["arms"][VLLM]["reason"]
    assert reason == "4 layers: status 1: RuntimeError: no such kernel"
    assert found[1]["arms"][OURS]["microseconds"] == pytest.approx(50)
    assert "vLLM, 4 layers" in capsys.readouterr().out


def test_where_time_ran_out_is_what_the_engine_did(
    pretended: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = pretended(slow=4)
    log, left = run.out / "vllm-4.log", [60.0]  # for the engine that ends

    def seconds(_run: LayersRun) -> float:
        while not left and "a kernel's name" not in log.read_text():
            time.sleep(0.05)
        return left.pop() if left else 0.0

    monkeypatch.setattr(LayersRun, "left", property(seconds))
    found = whole_layers.contested(run, CLOCK)
    reason = found[1]["arms"][VLLM]["reason"]
    assert reason == "4 layers: time ran out while timing 1 lanes"
    assert "ratio" not in found[1]


def test_without_vllm_a_row_says_so(pretended: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = pretended()
    monkeypatch.setattr(whole_layers, "has_vllm", lambda: False)
    found = whole_layers.contested(run, CLOCK)
    assert found[2]["arms"][VLLM] == {"reason": whole_layers.NO_VLLM}
    assert not run.checkpoint.exists()


def test_kernels_without_vllm_itself_are_no_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "vllm").mkdir()
    assert not whole_layers.has_vllm()


def test_rows_of_the_group_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[LayersRun] = []

    def contested(run: LayersRun, _clock: Any) -> dict[int, Any]:
        calls.append(run)
        return {lanes: {"arms": {OURS: {"microseconds": lanes}}, "goals": []} for lanes in (1, 64)}

    monkeypatch.setattr(whole_layers, "contested", contested)
    rows = list(command.rows_of("layers"))
    assert all(isinstance(row, TimedRow) for row in rows)
    run = command.Run(whole_layers.OUT, "here")
    found = [command.one_row(run, row, 7, CLOCK, command.Hang(run, print, 1)) for row in rows]
    assert [record["arms"][OURS]["microseconds"] for record in found] == [1, 64]
    assert [call.rounds for call in calls] == [7]


@pytest.mark.slow
def test_our_layers_are_the_first_ones_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "SETS", 1)
    monkeypatch.setattr(decoder, "ENTRY", "bf16")
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    every = decoder.experts(256, 128, SMALL.n_routed_experts)
    given = decoder.Given(Recording(), SMALL, every, decoder.FP8, "bf16", 256)
    launched = []
    for arm in whole_layers.our_arms(given, SMALL.layers, (2, 3), 2):
        given.kernels.calls = []
        arm.make(0)()
        names = [name for name, *_ in given.kernels.calls]
        launched.append((arm.name, names.count("sm90_sparse_attention")))
    assert launched == [("2 layers", 2), ("3 layers", 3)]
