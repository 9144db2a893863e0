"""Record of the report page of one checkpoint, its provenance, and its JSON.

reports/ renders from this record alone, so an old page renders again without torch or a GPU.
"""

from __future__ import annotations

import json
import math
import os
import platform
import types
import typing
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import UTC, datetime
from enum import Enum, StrEnum
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from degarble.harness.base.errors import DegarbleError, InvalidArgument, UnreadableFile
from degarble.harness.base.version import VERSION
from degarble.harness.report.blocks import BLOCKS, Block
from degarble.harness.report.verdict import LATER, SCHEMA, Origin, Verdict

# --------------------------------------------------------------------------------------------------
# Record of the report page of one checkpoint: subject, provenance, verdict, findings, panels.
#
# Panels have a fixed order, whatever the order in which they were added.


class PanelKind(StrEnum):
    """Kind of a panel, in the order in which every page shows them."""

    AUDIT = "audit"
    REPLAY = "replay"
    TEXT = "text"
    KERNELS = "kernels"
    HISTORY = "history"
    PROBE = "probe"
    COMPARE = "compare"


MANIFEST = "manifest"  # the fact of a check, or of a stored run, that names the checkpoint's page
_ALONE = frozenset({PanelKind.PROBE, PanelKind.COMPARE})


@dataclass(frozen=True)
class Subject:
    """Subject of the page. The manifest hash is the identity; the name is for people."""

    name: str
    kind: str
    manifest_hash: str

    @property
    def key(self) -> str:
        """A file name without directory parts, the same for the same subject."""
        kept = "".join(c if c.isascii() and c.isalnum() else "-" for c in self.name)
        words = "-".join(part for part in kept.lower().split("-") if part)[:48]
        digits = self.manifest_hash.lower().rpartition(":")[2]
        digest = "".join(c for c in digits if c in "0123456789abcdef")[:12]
        return f"{words.strip('-') or 'page'}-{digest or 'nohash'}"


@dataclass(frozen=True)
class Provenance:
    """Where the result was obtained: without it a figure cannot be checked."""

    created: str  # ISO 8601, UTC
    command: str
    machine: str
    versions: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class PageFinding:
    """One difference for the first screen: cause, what to do, and the origin as data.

    `reproduction` is a command that shows the fault by itself, `note` what else a reader must know,
    `blocks` show the difference.
    """

    cause: str
    remedy: str
    origin: Origin
    reproduction: str = ""
    note: str = ""
    blocks: tuple[Block, ...] = field(default=(), metadata={LATER: True})


@dataclass(frozen=True)
class Panel:
    """One part of the page. Without a verdict it did not run, and `sentence` says why.

    `word` is shown in the place of the verdict's own.
    """

    kind: PanelKind
    sentence: str
    verdict: Verdict | None = None
    blocks: tuple[Block, ...] = ()
    word: str = field(default="", metadata={LATER: True})


@dataclass(frozen=True)
class Page:
    """All that is known about one checkpoint. `word`: as of a panel."""

    subject: Subject
    provenance: Provenance
    verdict: Verdict
    sentence: str
    findings: tuple[PageFinding, ...] = ()
    panels: tuple[Panel, ...] = ()
    word: str = field(default="", metadata={LATER: True})

    def __post_init__(self) -> None:
        kinds = [panel.kind for panel in self.panels]
        if len(set(kinds)) != len(kinds):
            raise InvalidArgument(
                "panels of a page",
                [str(kind) for kind in kinds],
                "at most one panel of a kind",
                "Replace a panel with Page.with_panel.",
            )

    def with_panel(self, panel: Panel) -> Page:
        """Add `panel`, in the place of the older one of its kind."""
        others = tuple(old for old in self.panels if old.kind != panel.kind)
        return replace(self, panels=(*others, panel))

    @property
    def ordered_panels(self) -> tuple[Panel, ...]:
        """Return the panels in the order of PanelKind, those that did not run included.

        A server and two captures have a page of their own: no checkpoint's page lacks their panels,
        nor the reverse.
        """
        known = {panel.kind: panel for panel in self.panels}
        if known and set(known) <= _ALONE:
            return self.panels
        return tuple(
            known.get(kind) or Panel(kind, "Not run.")
            for kind in PanelKind
            if kind not in _ALONE or kind in known
        )


# --------------------------------------------------------------------------------------------------
# Convert records to plain JSON values and back, by the type annotations of the records.
#
# A record is an object, a tuple a list, an enum its word, a block an object with its name under
# `block`. A number that JSON lacks (NaN, infinity) is an object `{"float": "nan"}`. Input that does
# not match the annotations raises UnreadableFile with the path inside the document; nesting is
# bounded.

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]

_DEPTH_LIMIT = 64  # documents; a page nests to about 20
_BLOCK_NAMES: dict[type, str] = {record: name for name, record in BLOCKS.items()}
_FLOAT_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def to_plain(value: object) -> Plain:
    """`value`, a record or a part of one, as what json.dumps(allow_nan=False) accepts."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if is_dataclass(value):
        document = {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
        name = _BLOCK_NAMES.get(type(value))
        return document if name is None else {"block": name, **document}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    if isinstance(value, typing.Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__} has no plain form")


def from_plain(annotation: Any, plain: object, path: str) -> Any:
    """`plain` read as `annotation`; `path` names it in a refusal."""
    return _read(annotation, plain, path, 0)


def _refuse(path: str, plain: object, expectation: str) -> UnreadableFile:
    return UnreadableFile(
        path, plain, expectation, "The document is damaged or of another tool; write it again."
    )


def _read(annotation: Any, plain: object, path: str, depth: int) -> Any:
    if depth > _DEPTH_LIMIT:
        raise _refuse(path, "...", f"nesting of at most {_DEPTH_LIMIT} levels")
    origin = typing.get_origin(annotation)
    if origin in {typing.Union, types.UnionType}:
        return _read_union(typing.get_args(annotation), plain, path, depth)
    if origin is tuple:
        return _read_tuple(typing.get_args(annotation), plain, path, depth)
    if origin is not None:
        return _read_mapping(typing.get_args(annotation)[1], plain, path, depth)
    if is_dataclass(annotation):
        return _read_record(annotation, plain, path, depth)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        words = [str(member.value) for member in annotation]
        if plain not in words:
            raise _refuse(path, plain, f"one of {', '.join(words)}")
        return annotation(plain)
    return _read_scalar(annotation, plain, path)


def _read_scalar(annotation: Any, plain: object, path: str) -> Any:
    if annotation is float and isinstance(plain, dict) and set(plain) == {"float"}:
        word = plain["float"]
        if isinstance(word, str) and word in _FLOAT_WORDS:
            return _FLOAT_WORDS[word]
    if annotation is float and type(plain) is int:
        return float(plain)
    if type(plain) is annotation or (plain is None and annotation is types.NoneType):
        return plain
    raise _refuse(path, plain, f"a value of type {getattr(annotation, '__name__', annotation)}")


def _read_union(choices: tuple[Any, ...], plain: object, path: str, depth: int) -> Any:
    if all(is_dataclass(choice) for choice in choices):  # the blocks
        name = plain.get("block") if isinstance(plain, dict) else None
        if not isinstance(name, str) or name not in BLOCKS:
            raise _refuse(f"{path}.block", name, f"one of {', '.join(BLOCKS)}")
        return _read_record(BLOCKS[name], plain, path, depth)
    # Trap: an int is read as an int where both int and float are allowed, so exact matches go first
    exact = [c for c in choices if type(plain) is c]
    for choice in (*exact, *choices):
        try:
            return _read(choice, plain, path, depth)
        except UnreadableFile:
            continue
    names = ", ".join(str(getattr(choice, "__name__", choice)) for choice in choices)
    raise _refuse(path, plain, f"one of the types {names}")


def _read_tuple(arguments: tuple[Any, ...], plain: object, path: str, depth: int) -> Any:
    if not isinstance(plain, list):
        raise _refuse(path, plain, "a list")
    if arguments[-1] is Ellipsis:
        kinds: tuple[Any, ...] = (arguments[0],) * len(plain)
    else:
        kinds = arguments
    if len(kinds) != len(plain):
        raise _refuse(path, plain, f"a list of {len(kinds)}")
    return tuple(
        _read(kind, item, f"{path}[{index}]", depth + 1)
        for index, (kind, item) in enumerate(zip(kinds, plain, strict=True))
    )


def _read_mapping(kind: Any, plain: object, path: str, depth: int) -> dict[str, Any]:
    if not isinstance(plain, dict):
        raise _refuse(path, plain, "an object")
    return {str(k): _read(kind, item, f"{path}.{k}", depth + 1) for k, item in plain.items()}


def _read_record(record: Any, plain: object, path: str, depth: int) -> Any:
    if not isinstance(plain, dict):
        raise _refuse(path, plain, "an object")
    kinds = _field_types(record)
    given = set(plain) - {"block"}
    if given - set(kinds) or set(kinds) - given - _later_fields(record):
        odd = sorted(str(name) for name in given ^ set(kinds))
        raise _refuse(path, odd, f"exactly the fields {', '.join(kinds)}")
    values = {
        name: _read(kind, plain[name], f"{path}.{name}", depth + 1)
        for name, kind in kinds.items()
        if name in given
    }
    try:
        return record(**values)
    except DegarbleError as error:
        raise UnreadableFile(path, error.value, error.expectation, error.remedy) from error


@cache
def _later_fields(record: Any) -> set[str]:
    """Return the fields that older pages lack."""
    return {f.name for f in fields(record) if f.metadata.get(LATER)}


@cache
def _field_types(record: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(record)
    return {f.name: hints[f.name] for f in fields(record)}


# --------------------------------------------------------------------------------------------------
# Convert a report page to JSON text and back, with a schema number.
#
# The document is `{"schema": 1, "kind": "degarble.page", "page": {...}}`. Old pages stay readable.

KIND = "degarble.page"


def page_to_json(page: Page) -> str:
    """Write the page as text; the same page gives the same bytes."""
    document = {"schema": SCHEMA, "kind": KIND, "page": to_plain(page)}
    return json.dumps(document, allow_nan=False, ensure_ascii=True, indent=1) + "\n"


def page_from_json(text: str, name: str = "page") -> Page:
    """Read what page_to_json wrote; `name` is what a refusal calls the document."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(
            name, str(error), "a JSON document", "Write the page again with degarble."
        ) from error
    if not isinstance(document, dict) or document.get("kind") != KIND:
        found = document.get("kind") if isinstance(document, dict) else type(document).__name__
        raise UnreadableFile(
            name, found, f"a document of kind {KIND}", "Give the .json next to a report page."
        )
    if document.get("schema") != SCHEMA:
        raise UnreadableFile(
            name,
            document.get("schema"),
            f"schema {SCHEMA}",
            "Render it with the version of degarble that wrote it.",
        )
    page: Page = from_plain(Page, document.get("page"), "page")
    return page


# --------------------------------------------------------------------------------------------------
# Provenance of a result: time, command, machine, versions.
#
# It contains nothing that identifies a person: no user, no host name, no path, and no environment
# variable is read.

_PACKAGES = ("torch", "numpy", "numba")
_OF_KERNELS = ("nvidia-cutlass-dsl", "triton", "vllm")  # what compiles kernels, or brings them


def provenance(command: str, now: datetime | None = None) -> Provenance:
    """Return the provenance of this run; `now` is for suites."""
    moment = (now or datetime.now(UTC)).astimezone(UTC)
    packages = [(name, found) for name in _PACKAGES if (found := _version(name))]
    return Provenance(
        created=moment.strftime("%Y-%m-%d %H:%M UTC"),
        command=command,
        machine=machine(),
        versions=(("degarble", VERSION), ("Python", platform.python_version()), *packages),
    )


def kernel_versions() -> dict[str, str]:
    """Return the versions of kernel compilers, because they change the machine code of a source."""
    return {name: found for name in _OF_KERNELS if (found := _version(name))}


def machine() -> str:
    """Return the name of the processor."""
    cores = os.cpu_count() or 1
    name = _processor() or platform.processor() or platform.machine()
    return f"CPU: {name}, {cores} {'core' if cores == 1 else 'cores'}, {platform.system()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else ""


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
