"""`--backend`: kernels of the user's own in place of components, and what is refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.backends import registry as backends
from degarble.harness.backends.pairings import pair
from degarble.harness.base.errors import DegarbleError, NotBuilt
from degarble.harness.capture.files.reader import Capture
from degarble.harness.inference.model import open_model
from degarble.harness.model.recipes import recipe_named
from degarble.references.numerics import HeadNorm
from degarble.suites.capture.capture_models import bound_v4
from degarble.suites.commands.calls import call
from degarble.suites.serve.talking_cases import write_speaker

if TYPE_CHECKING:
    from pathlib import Path

MODULE = """
import torch

def linear(inputs, weights):
    (weight,) = weights.values()
    return {"out": inputs["x"] @ weight.values(inputs["x"].dtype).T}

def doubled(inputs, weights):
    return {"out": linear(inputs, weights)["out"] * 2}

class Mine:
    name = "mine"
    def components(self):
        return {"attn.wq_b": linear, "layers.1.attn.wq_b": doubled}

def plain():
    return {"head": lambda i, w: {"out": linear(i, w)["out"].float()}}

def fails():
    raise RuntimeError("no device")

def unnamed():
    return 3

class Lists:
    name = "lists"
    def components(self):
        return []

def unknown():
    return {"attn.wq": linear}

def uncallable():
    return {"attn.wq_b": 3}

def wrong():
    return {"attn.wq_b": lambda i, w: {"result": 1}}

class Fused:
    name = "fused"
    conventions = {"head_norm": "once"}
    def components(self):
        return {"attn.wq_b": linear}

class Strange(Fused):
    conventions = {"head_norm": "twice"}

def late():
    return {"attn.wq_b": lambda i, w: {"out": 1 / 0}}

NUMBER = 3
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speaker(tmp_path_factory.mktemp("v4") / "model", "v4")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of kernels, under a name that no other test imports."""
    name = f"kernels_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path / f"{name}.py"


def test_a_backend_computes_what_it_offers_and_the_rest_falls_to_torch(
    model: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ("--json", "capture", model, "--prompt", "w7 w8", "--max-new-tokens", 2)
    done = call(capsys, *line, "--out", here.parent / "run", "--backend", f"{here.stem}:Mine")
    assert done.status == 0, done.err
    capture = Capture.open(here.parent / "run")
    facts, told = capture.facts, done.document["backend"]
    assert (facts["backend"], told["name"]) == ("mine", "mine")
    assert all(name.endswith("attn.wq_b") for name in facts["by_backend"])
    assert "layers.1.attn.wq_b" in facts["by_backend"]
    assert "layers.1.attn.wq_a" in facts["fell_to_torch"]
    assert (facts["by_backend"], facts["fell_to_torch"]) == (told["components"], told["torch"])
    with open_model(model) as opened, torch.inference_mode():
        for captured_call in capture.by_component()["layers.1.attn.wq_b"]:
            twin = opened.logits_model.bound(
                captured_call.component, **capture.inputs(captured_call)
            )["out"]
            found = capture.outputs(captured_call)["out"]
            assert float((found.float() - 2 * twin.float()).abs().max()) < 0.02 * float(
                found.abs().max()
            )
    result = call(
        capsys, *line[1:], "--out", here.parent / "again", "--backend", f"{here.stem}:plain"
    )
    assert "fell to torch" in result.out


REFUSED = {
    "nowhere_at_all:make": "a module that can be imported",
    "HERE:nothing": "factory in",
    "HERE:NUMBER": "a function or class without arguments",
    "HERE:fails": "RuntimeError: no device",
    "HERE:unnamed": "`name` and `components()`",
    "HERE:Lists": "components()",
    "HERE:unknown": "component of backend",
    "HERE:uncallable": "a callable of inputs and weights",
    "HERE:wrong": "a dict of out",
    "HERE:late": "ZeroDivisionError",
    "cutedsl": "an NVIDIA GPU of sm_90a or sm_100a",
    "vllm": "vLLM 0.33 in this environment",
}


@pytest.mark.parametrize("backend", REFUSED)
def test_what_is_no_backend_is_refused_and_leaves_nothing(
    model: Path, here: Path, capsys: pytest.CaptureFixture[str], backend: str
) -> None:
    value = backend.replace("HERE", here.stem)
    out = here.parent / "run"
    done = call(capsys, "capture", model, "--prompt", "w7", "--out", out, "--backend", value)
    assert done.status == 2, done.out
    assert REFUSED[backend] in done.err, done.err
    assert "Traceback" not in done.err
    assert not out.exists()


def test_an_entry_point_is_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name = "installed"

        def load(self) -> Any:
            return lambda: {"embed": lambda i, w: {"out": i["tokens"], **w}}

    monkeypatch.setattr(backends, "entry_points", lambda **_: [Point()])
    backend, recipe = backends.AskedBackend("installed"), recipe_named("bf16", bound_v4(1).config)
    paired = backends.use_backend(bound_v4(1), backend, recipe)
    assert paired.taken == ("embed",)
    assert backends.use_backend(bound_v4(1), backends.AskedBackend(), recipe).lines() == []
    with pytest.raises(DegarbleError, match="instaled"):
        backends.backend_named("instaled")
    with pytest.raises(NotBuilt):
        backends.backend_named("vllm")


def test_a_full_name_goes_before_a_role_and_names_are_checked_first() -> None:
    bound = bound_v4(1)
    plain = dict(bound.calls)

    def role(inputs: Any, weights: Any) -> Any:
        return {"out": torch.zeros(1), **inputs, **weights}

    def full(inputs: Any, weights: Any) -> Any:
        return {"out": torch.ones(1), **inputs, **weights}

    with pytest.raises(DegarbleError, match="nothing"):
        pair(bound, "mine", {"attn.wq_a": role, "nothing": role})
    assert bound.calls == plain
    for offered in ({"layers.0.attn.wq_a": full, "attn.wq_a": role},
                    {"attn.wq_a": role, "layers.0.attn.wq_a": full}):  # fmt: skip
        bound = bound_v4(1)
        pair(bound, "mine", offered)
        assert float(bound.calls["layers.0.attn.wq_a"]({}, {})["out"]) == 1
        assert float(bound.calls["layers.1.attn.wq_a"]({}, {})["out"]) == 0


def test_a_backend_states_its_conventions(
    here: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = backends.AskedBackend(f"{here.stem}:Fused")
    assert backend.conventions == {"head_norm": HeadNorm.ONCE}
    assert backend.offered is backend.offered
    assert backends.AskedBackend(f"{here.stem}:plain").conventions == {}
    with pytest.raises(DegarbleError, match="head_norm of --backend"):
        _ = backends.AskedBackend(f"{here.stem}:Strange").conventions
    out = tmp_path / "run"
    words = ["--prompt", "w7", "--max-new-tokens", "2", "--out", str(out)]
    words += ["--convention", "routing_epsilon=1e-20"]
    assert call(capsys, "capture", model, "--backend", backend.name, *words).status == 0
    stated = Capture.open(out).facts["conventions"]
    assert stated == {"head_norm": "once", "routing_epsilon": 1e-20}
