"""The walks of the house: the files that one reads, in order of calls, to follow one thing.

A function is called by the step above it, or by an earlier one that is still running. A walk lists
the way of one result; side branches (where in a tensor a difference lies, shares of origins,
minimal reproducers) are left out.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, NamedTuple

from degarble.suites.house.repository import ROOT, tree

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MOST_FILES = 20
MOST_RECORDS = 5


class Step(NamedTuple):
    """One step of a walk."""

    file: str
    function: str  # or Class.method
    does: str
    known_as: str = ""  # a caller's own name for it: a field that holds the function


class Record(NamedTuple):
    """A type that holds the number."""

    file: str
    name: str


_CHECK = "harness/commands/check/"
_ENGINE = "harness/engine/"
_REPORT = f"{_CHECK}report.py"

CAPTURE_TO_PAGE = (
    Step("harness/cli/commands/judging.py", "check", "reads the options of the command line"),
    Step(f"{_CHECK}check.py", "CheckRun.__enter__", "opens capture, twin and reference"),
    Step("harness/capture/files/reader.py", "Capture.open", "reads a capture and checks it"),
    Step("harness/inference/model.py", "open_model", "opens the twin's checkpoint"),
    Step(f"{_CHECK}check.py", "CheckRun.judge", "localises, diagnoses, attributes"),
    Step(f"{_ENGINE}localise/localise.py", "localise", "walks the components of a run"),
    Step(f"{_ENGINE}localise/judged_run.py", "Judge.component", "judges a component's calls"),
    Step(f"{_ENGINE}localise/replay.py", "replayed", "computes the twin on the captured inputs"),
    Step(f"{_ENGINE}budget/judging.py", "judge_outputs", "judges numbers, codes and choices"),
    Step(f"{_ENGINE}budget/roles.py", "budgets_of", "derives what rounding may change"),
    Step(f"{_ENGINE}budget/budget.py", "judge", "holds each level against its budget"),
    Step(f"{_ENGINE}compare/compare.py", "compare", "sums the differences of a pair"),
    Step(f"{_ENGINE}compare/loops.py", "loops_of", "compiles the loop over rows"),
    Step(f"{_ENGINE}diagnose/diagnose.py", "diagnose", "searches the fault that explains it"),
    Step(_REPORT, "write_check_report", "writes page, tables and JUnit"),
    Step(_REPORT, "replay_record", "turns the rows into plain numbers"),
    Step(
        f"{_CHECK}output_statistics.py",
        "StatisticsCollector.measured_output",
        "gives one output's details",
    ),
    Step(_REPORT, "check_page", "makes the page"),
    Step("reports/replay_panel.py", "replay_panel", "makes maps, close looks and tables"),
    Step(_REPORT, "write_check_page", "leaves out close looks of a page that is too large"),
    Step("harness/commands/report_folder.py", "write_page", "keeps the panels of earlier runs"),
    Step("reports/page_html.py", "page_html", "renders the page"),
    Step("reports/blocks_html.py", "block_element", "renders a block"),
    Step("reports/maps_html.py", "judged_map_element", "renders the map of layers by components"),
)

_TRANSFORM = "harness/checkpoint/transform/"
_WRITE = "harness/checkpoint/write/"

CHECKPOINT_TO_SHARD = (
    Step("harness/cli/commands/checkpoints.py", "quantise", "reads the options"),
    Step("harness/commands/transform.py", "job_from", "reads config, recipe and calibration"),
    Step(f"{_TRANSFORM}source.py", "require_model", "recognises the source"),
    Step("harness/commands/transform.py", "quantise", "plans, runs, summarises"),
    Step(f"{_TRANSFORM}pipeline.py", "Transform.plan", "lists the tensors of the target"),
    Step(f"{_WRITE}plan.py", "WritePlan.from_tensors", "divides them into shards"),
    Step(f"{_TRANSFORM}pipeline.py", "Transform.run", "writes the target, or resumes"),
    Step(f"{_WRITE}writer.py", "make_shards", "makes shards that are missing"),
    Step(f"{_WRITE}workers.py", "run_each", "spreads them over processes"),
    Step(f"{_TRANSFORM}pipeline.py", "_make_shard", "keeps the source open in a process"),
    Step(f"{_TRANSFORM}quantise/job.py", "QuantiseJob.make_shard", "quantises its tensors"),
    Step(f"{_WRITE}writer.py", "write_shard", "writes a shard and its hash"),
    Step(f"{_WRITE}disk.py", "Partial.commit", "shows the whole file or nothing"),
    Step(f"{_WRITE}writer.py", "finish", "writes index, configs, manifest"),
)

CALL_TO_LAUNCH = (
    Step("harness/backends/cutedsl/kernels.py", "KernelsOnGpu._run", "passes operands by name"),
    Step("kernels/runtime/kernel.py", "Kernel.run", "checks and allocates"),
    Step("kernels/runtime/operands.py", "require_tensor", "refuses what would be misread"),
    Step("kernels/runtime/kernel.py", "Kernel.run_checked", "chooses a form"),
    Step("kernels/rows/problem.py", "choose_norm_form", "chooses by problem", "choose_form"),
    Step("kernels/runtime/kernel.py", "Kernel.compile_form", "compiles a form once"),
    Step("kernels/runtime/compiling.py", "compile_kernel", "compiles, or reads the cache"),
    Step("kernels/runtime/kernel.py", "Kernel.launch", "makes pointers and numbers"),
    Step("kernels/runtime/operands.py", "pointer", "gives an address to the DSL"),
    Step("kernels/rows/simt_rmsnorm.py", "launch_rmsnorm", "sets grid and block", "compiled"),
    Step("kernels/rows/simt_rmsnorm.py", "rmsnorm_kernel", "runs on the device"),
)

# The difference of one output in units of its budget; what holds many of them is not listed.
RECORDS = (
    Record("harness/base/sums.py", "ErrorSums"),
    Record(f"{_ENGINE}budget/budget.py", "LevelFinding"),
    Record(f"{_ENGINE}budget/budget.py", "OutputResult"),
    Record(f"{_ENGINE}localise/judged_run.py", "OutputRow"),
    Record("harness/report/replay_record.py", "JudgedOutput"),
    Record("harness/report/blocks.py", "JudgedCell"),
)


def files_of(walk: tuple[Step, ...]) -> list[str]:
    """Return the files of a walk, each once."""
    return list(dict.fromkeys(step.file for step in walk))


def breaks(walk: tuple[Step, ...]) -> Iterator[str]:
    """Yield every step that is missing, or that no running step above it calls."""
    running: list[Step] = []
    for step in walk:
        if step.function not in _functions(step.file):
            yield f"{step.file} has no function {step.function}"
            continue
        while running and not _calls(running[-1], step):
            running.pop()
        if not running and step is not walk[0]:
            yield f"no step before it calls {step.function} of {step.file}"
        running.append(step)


def is_class(record: Record) -> bool:
    """Return whether a record is a class of its file."""
    found = tree(ROOT / record.file).body if (ROOT / record.file).is_file() else []
    return any(isinstance(node, ast.ClassDef) and node.name == record.name for node in found)


def _functions(file: str) -> Mapping[str, ast.AST]:
    """Return the functions of a file, and the methods as Class.method."""
    if not (ROOT / file).is_file():
        return {}
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    body = tree(ROOT / file).body
    methods = {
        f"{node.name}.{each.name}": each
        for node in body
        if isinstance(node, ast.ClassDef)
        for each in node.body
        if isinstance(each, kinds)
    }
    return {node.name: node for node in body if isinstance(node, kinds)} | methods


def _calls(caller: Step, step: Step) -> bool:
    """Return whether a function, or one of its file that it names, names the next step."""
    functions = _functions(caller.file)
    near: dict[str, list[ast.AST]] = {}
    for name, node in functions.items():
        near.setdefault(_called(name), []).append(node)
    waiting, read = [functions[caller.function]], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in read:
            continue
        read.add(id(node))
        names = _names(node)
        if (step.known_as or _called(step.function)) in names:
            return True
        waiting += [each for name in names for each in near.get(name, ())]
    return False


def _called(function: str) -> str:
    """Return the name by which a function is called: its class where the method is Python's own."""
    owner, _, name = function.rpartition(".")
    return owner if name.startswith("__") else name


def _names(node: ast.AST) -> set[str]:
    return {
        each.id if isinstance(each, ast.Name) else each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Name | ast.Attribute)
    }
