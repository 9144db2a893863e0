"""The stable surface: its names, and the examples of docs/api.md as they stand there."""

from __future__ import annotations

import doctest
import html
import math
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import degarble
from degarble.harness import api
from degarble.harness.base.version import VERSION
from degarble.harness.capture.modules import places_by_name
from degarble.harness.model.config.json_file import config_from_file
from degarble.reports.markup import escape
from degarble.suites.house.repository import ROOT

PAGE = ROOT / "docs" / "api.md"
NAMES = {
    "NVFP4", "Checked", "CheckedModules", "DegarbleError", "JudgedKernel", "ModulePlace", "Place",
    "QuantisedTensor", "Setting", "Twin", "Verdict", "Weight", "capture", "check", "dequantise",
    "fp8", "judge", "mxfp4", "mxfp8", "nvfp4", "quantise",
}  # fmt: skip


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_names_are_the_contract() -> None:
    """Taking one away is a new major version; adding one is a line here and on the page."""
    assert set(api.__all__) == NAMES
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in sorted(NAMES) if f"`{name}" not in text] == []
    assert all(getattr(api, name) is not None for name in NAMES)


def test_the_root_package_gives_the_same_names() -> None:
    assert set(degarble.__all__) == {*NAMES, "__version__"}
    assert [name for name in NAMES if getattr(degarble, name) is not getattr(api, name)] == []
    assert set(dir(degarble)) >= set(degarble.__all__)
    assert degarble.__version__ == VERSION
    with pytest.raises(AttributeError, match="no attribute 'judged'"):
        degarble.judged  # noqa: B018
    assert (Path(degarble.__file__).parent / "py.typed").is_file()


def test_every_name_that_is_called_has_an_example_that_runs() -> None:
    results = {"CheckedModules", "Checked", "JudgedKernel", "QuantisedTensor"}  # others make them
    kinds = {"DegarbleError", "NVFP4", "Verdict"}
    finder, without = doctest.DocTestFinder(recurse=False), []
    for name in sorted(NAMES - results - kinds):
        (example,) = finder.find(getattr(api, name), name, globs={}) or (None,)
        if example is None or not example.examples:
            without.append(name)
            continue
        runner = doctest.DocTestRunner(verbose=False)
        runner.run(example)
        assert runner.summarize(verbose=False).failed == 0, name
    assert without == []


def test_the_root_package_is_light() -> None:
    """`import degarble` takes a millisecond of its own: it loads nothing but the version."""
    script = (
        "import sys; before = set(sys.modules); import degarble; print(*set(sys.modules) - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) <= {
        *("degarble", "degarble.harness", "degarble.harness.base", "degarble.harness.base.version"),
        *(name for name in done.stdout.split() if name.split(".")[0] in sys.stdlib_module_names),
    }


@pytest.mark.parametrize("number", range(4))
def test_examples_of_the_page_run(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "example.py").write_text(examples()[number])
    runpy.run_path(str(tmp_path / "example.py"))


def test_every_example_is_run() -> None:
    runnable = [
        example
        for example in examples()
        if "def test_" not in example and "def patch" not in example
    ]
    assert len(runnable) == 4
    assert examples()[:4] == runnable


# --------------------------------------------------------------------------------------------------
# What a notebook shows, and names as people have them


class Blocks(torch.nn.Module):
    """Linears under names as transformers gives them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.linears = [torch.nn.Linear(16, 16, bias=False) for _ in range(count)]
        layers = [torch.nn.ModuleDict({"proj": linear}) for linear in self.linears]
        self.model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            x = linear(x)
        return x


@pytest.fixture(scope="module")
def many() -> tuple[Blocks, torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Blocks(30), torch.randn(8, 16)


def weights_of(model: Blocks, spelling: str) -> dict[str, torch.Tensor]:
    return {
        spelling.format(number): linear.weight.detach().clone()
        for number, linear in enumerate(model.linears)
    }


def test_no_repr_is_longer_than_two_kilobytes(
    many: tuple[Blocks, torch.Tensor], tmp_path: Path
) -> None:
    model, x = many
    stored = weights_of(model, "layers.{}.proj")
    wrong = {name: weight * 2 for name, weight in stored.items()}
    run, kept = api.capture(model, x), api.capture(model, x, folder=tmp_path / "run")
    checked, broken = api.check(run, stored), api.check(run, wrong)
    quantised = api.quantise(torch.randn(512, 512), api.NVFP4)
    config = config_from_file(ROOT / "references/tiny/v1/v4/config.json")
    error = api.DegarbleError("name" * 9, "value" * 999, "an expectation", "A remedy.")
    objects = (
        *(api.NVFP4, checked, broken, error, *broken.judged.values(), quantised, kept, run),
        *(places_by_name(model)[0], api.Setting(config=config), api.Twin(stored)),
        *(*api.Verdict, api.Weight(value=torch.randn(512, 512)), api.Weight.of(quantised)),
        *(api.Weight(), kept.parts[0], *kept.calls, *kept.steps),
    )
    assert {type(each).__name__ for each in objects if len(repr(each)) > 2000} == set()
    classes = {getattr(api, name) for name in NAMES if isinstance(getattr(api, name), type)}
    assert classes <= {type(each) for each in objects}
    assert repr(kept) == "Capture(run: 30 calls of 30 components in 1 step)"


@pytest.mark.parametrize(
    "spelling", ["model.layers.{}.proj", "layers.{}.proj", "model.layers.{}.proj.weight"]
)
def test_names_with_model_or_without(many: tuple[Blocks, torch.Tensor], spelling: str) -> None:
    model, x = many
    twin = api.Twin(weights_of(model, spelling))
    for _ in range(2):
        found = api.check(api.capture(model, x), twin)
        assert (found.verdict, len(found.judged), found.unjudged) == ("AGREES", 30, ())


def test_two_names_of_one_component_are_refused(many: tuple[Blocks, torch.Tensor]) -> None:
    model, x = many
    both = weights_of(model, "model.layers.{}.proj") | weights_of(model, "layers.{}.proj")
    with pytest.raises(api.DegarbleError, match=r"one name for layers\.0\.proj"):
        api.check(api.capture(model, x), both)


def test_refusals_name_parameters(many: tuple[Blocks, torch.Tensor], tmp_path: Path) -> None:
    model, x = many
    wrong = {"layers.0.proj": torch.zeros(16, 16)}
    api.capture(model, x, folder=tmp_path / "used")
    calls = {
        "components": lambda: api.capture(model, x, components="attn.*"),
        "folder": lambda: api.capture(model, x, folder=str(tmp_path / "used")),
        "faults": lambda: api.check(api.capture(model, x), wrong, faults=str(tmp_path / "none")),
    }
    for name, call in calls.items():
        with pytest.raises(api.DegarbleError) as refused:
            call()  # type: ignore[no-untyped-call]
        assert f"--{name}" not in str(refused.value)
        assert name in str(refused.value)


def test_paths_are_str_or_path(many: tuple[Blocks, torch.Tensor], tmp_path: Path) -> None:
    model, x = many
    kept = api.capture(model, x, folder=str(tmp_path / "run"))
    for folder in (tmp_path / "run", str(tmp_path / "run")):
        assert type(kept).open(folder).hash == kept.hash
        assert api.check(folder, weights_of(model, "layers.{}.proj")).verdict == "AGREES"


def test_results_are_cards_in_a_notebook(many: tuple[Blocks, torch.Tensor]) -> None:
    model, x = many
    stored = weights_of(model, "layers.{}.proj")
    broken = api.check(
        api.capture(model, x), {**stored, "layers.7.proj": stored["layers.7.proj"] * 2}
    )
    for result in (broken, broken.judged["layers.7.proj"]):
        card = result._repr_html_()
        assert card is not None
        assert card.startswith("<iframe ")
        assert card.count("<iframe") == 1
        inside = html.unescape(card.split('srcdoc="')[1].split('"></iframe>')[0])
        assert inside.startswith("<!doctype html>")
        assert "Content-Security-Policy" in inside
        assert escape(result.sentence) in inside
        assert "The difference in budgets, by rows and columns of the output" in inside
        assert len(card) < 400_000
    picture = broken.judged["layers.7.proj"].elements["out"].picture
    assert picture is not None
    assert (picture.row_labels[:2], picture.column_labels[-1]) == (("0", "1"), "15")


def test_a_picture_shows_where_the_output_is_wrong() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(6)
        x, w = torch.randn(64, 64), torch.randn(40, 64)
    out = x @ w.T
    out[20, 30] += 1
    out[63, 0] = math.nan
    picture = api.judge("gemm", x, w, out).elements["out"].picture
    assert picture is not None
    beyond = {
        (picture.row_labels[row], picture.column_labels[column])
        for row, cells in enumerate(picture.values)
        for column, value in enumerate(cells)
        if value is not None
    }
    assert beyond == {("20-23", "30-32"), ("60-63", "0-2")}


# --------------------------------------------------------------------------------------------------
# A bias that nobody gave the twin is no fault

Biased = tuple[torch.nn.Sequential, torch.nn.Linear, torch.Tensor]


@pytest.fixture(scope="module")
def biased() -> Biased:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        linear = torch.nn.Linear(16, 8)
        return torch.nn.Sequential(linear), linear, torch.randn(6, 16)


@pytest.mark.parametrize("kept", [False, True])
def test_a_module_whose_bias_was_not_given_is_not_judged(
    biased: Biased, tmp_path: Path, *, kept: bool
) -> None:
    model, linear, x = biased
    weight = linear.weight.detach().clone()
    run = api.capture(model, x, folder=tmp_path / "run" if kept else None)
    found = api.check(run, {"m0": weight})
    assert (found.verdict, found.unjudged, found.without_bias) == ("UNDECIDED", ("m0",), ("m0",))
    assert '"m0.bias"' in found.sentence
    assert found.document()["without_bias"] == ["m0"]


@pytest.mark.parametrize("name", ["m0", "m0.weight"])
def test_a_bias_stands_under_its_own_name(biased: Biased, name: str) -> None:
    model, linear, x = biased
    weight, bias = linear.weight.detach().clone(), linear.bias.detach().clone()
    run = api.capture(model, x)
    assert api.check(run, {name: weight, "m0.bias": bias}).verdict == "AGREES"
    wrong = api.check(run, {name: weight, "m0.bias": bias + 1})
    assert (wrong.verdict, wrong.without_bias) == ("DIFFERS", ())
    none = api.check(run, {"m0": {"w": weight, "bias": None}})
    assert (none.verdict, none.without_bias) == ("DIFFERS", ())


def test_a_vector_added_to_every_row_is_told(biased: Biased) -> None:
    weight, dice = biased[1].weight.detach().bfloat16(), torch.Generator().manual_seed(3)
    x = torch.randn(16, 16, generator=dice).bfloat16()
    out = (x.float() @ weight.float().T + torch.linspace(-2, 2, 8)).bfloat16()
    told = api.judge("gemm", x, weight, out)
    assert told.verdict == "DIFFERS"
    assert "the same vector is added to every row" in told.sentence
    out[3] += 1  # no vector explains that
    assert "the same vector" not in api.judge("gemm", x, weight, out).sentence
