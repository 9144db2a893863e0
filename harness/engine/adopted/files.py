"""Adopted faults in files: one JSON file states one fault; it is data, and nothing in it is run.

`fault_of` makes a fault of the catalogue of what a file states. It proposes one variant in every
component that it applies to, so that the search names it where the change reproduces the outputs.
"""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import (
    CANNOT_RUN,
    InvalidArgument,
    UnreadableFile,
)
from degarble.harness.base.files import read_small_text
from degarble.harness.engine.adopted.data import local_words, parameters, read
from degarble.harness.engine.faults.model_faults import FaultVariant, ModelFault
from degarble.harness.engine.faults.registry import KIND_FAULTS, MODEL_FAULTS, with_adopted
from degarble.harness.engine.recover import described  # noqa: F401  registers operations
from degarble.harness.engine.recover.stated import OPERATIONS
from degarble.harness.model.family import family_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from degarble.harness.engine.faults.model_faults import ComponentContext

SCHEMA = 1
SUFFIX = ".json"
LARGEST = 4 << 20  # bytes of a file
FAMILY = "adopted"
ID = re.compile(r"[A-Za-z][A-Za-z0-9_]*\.[a-z0-9][a-z0-9_]*", re.ASCII)
_OF_WEIGHTS = "model_faults.changed_weights"


@dataclass(frozen=True)
class AdoptedFault:
    """What a file states of a fault.

    `families`, `kind` and `components` (patterns of roles) say where it applies: a component with a
    kind by its kind, another one by its role. `condition` is when it acted where it was found, and
    `origin` says where that was; `case` is what the museum plants it in.
    """

    id: str
    sentence: str  # names of the component and of its weights are in angle brackets
    effect: str
    remedy: str
    families: tuple[str, ...]
    kind: str
    components: tuple[str, ...]
    words: str
    change: Mapping[str, Any]
    condition: Mapping[str, str] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)
    case: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Return the sentence as a title, without the names of one component."""
        text = self.sentence.rstrip(".").replace("<component>", "the component")
        text = re.sub(r"<\.(\w+)>", r"its \1", text)
        return re.sub(r"<([^<>]+)>", r"\1", text)

    def document(self) -> dict[str, Any]:
        """Return the fault as it stands in a file."""
        return {"degarble_fault": SCHEMA, **asdict(self)}


def fault_text(fault: AdoptedFault) -> str:
    """Return the text of a file."""
    return json.dumps(fault.document(), indent=1, allow_nan=False) + "\n"


def read_fault(path: Path) -> AdoptedFault:
    """Read a file, and refuse what states no fault."""
    text = read_small_text(path, LARGEST)
    try:
        document = json.loads(text, parse_constant=_no_number, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(
            str(path), str(error), "a file of an adopted fault, in JSON",
            "Adopt the description again: degarble faults adopt VERDICT.json --to "
            f"{path.parent}",
        ) from error  # fmt: skip
    return stated_fault(document, str(path))


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number in JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found


_FIELDS: Mapping[str, type] = {
    "id": str, "sentence": str, "effect": str, "remedy": str, "families": list, "kind": str,
    "components": list, "words": str, "change": dict, "condition": dict, "origin": dict,
    "case": dict,
}  # fmt: skip
_EXPECTED: Mapping[Any, str] = {dict: "a record", list: "a list of names", str: "a text"}


def stated_fault(document: Any, name: str) -> AdoptedFault:
    """Return the fault that data state; `name` is that of the file, for refusals."""
    again = "Adopt the description again, or mend this value by hand (docs/faults.md)."
    if not isinstance(document, dict) or document.get("degarble_fault") != SCHEMA:
        held = document.get("degarble_fault") if isinstance(document, dict) else document
        raise InvalidArgument(f"{name}: degarble_fault", held, f"{SCHEMA}, in a record", again)
    given: dict[str, Any] = {k: v for k, v in document.items() if k != "degarble_fault"}
    for key in sorted(set(given) ^ set(_FIELDS)):
        raise InvalidArgument(
            f"{name}: {key}", given.get(key), f"the keys {', '.join(_FIELDS)}", again
        )
    for key, kind in _FIELDS.items():
        value: Any = given[key]
        names = isinstance(value, list) and all(isinstance(each, str) for each in value)
        if not isinstance(value, kind) or (kind is list and not (names and value)):
            raise InvalidArgument(f"{name}: {key}", value, _EXPECTED[kind], again)
        if kind is list:
            given[key] = tuple(given[key])
    if not ID.fullmatch(given["id"]):
        raise InvalidArgument(
            f"{name}: id", given["id"], "FAMILY.name, such as adopted.rows", again
        )
    change = read(given["change"], None, f"{name}: change")
    if not isinstance(change, partial) or [*parameters(change.func)][-1:] != ["call"]:
        asked = given["change"].get("do")
        wraps = [each for each, made in OPERATIONS.items() if [*parameters(made)][-1:] == ["call"]]
        raise InvalidArgument(f"{name}: change.do", asked, f"one of {', '.join(wraps)}", again)
    if not all(isinstance(each, str) for each in given["condition"].values()):
        raise InvalidArgument(f"{name}: condition", given["condition"], "texts by name", again)
    return AdoptedFault(**given)


def read_folder(folder: Path) -> tuple[AdoptedFault, ...]:
    """Read the faults of a folder; raise for a file that states none."""
    if not folder.is_dir():
        raise UnreadableFile(
            "--faults", str(folder), "a folder of adopted faults",
            "Check the path for a typo, or adopt one: degarble faults adopt VERDICT.json --to "
            f"{folder}",
        )  # fmt: skip
    found: dict[str, AdoptedFault] = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        fault = read_fault(path)
        if fault.id in found:
            raise InvalidArgument(
                f"{path}: id", fault.id, "an id that no other file of the folder has",
                "Remove one of the two files.",
            )  # fmt: skip
        found[fault.id] = fault
    return tuple(found.values())


@contextmanager
def searching(folder: Path | None) -> Iterator[tuple[AdoptedFault, ...]]:
    """Search the adopted faults of a folder as well, where there is one; give them."""
    adopted = () if folder is None else read_folder(folder)
    for fault in adopted:
        if fault.id in MODEL_FAULTS or fault.id in KIND_FAULTS:
            raise InvalidArgument(
                f"{folder}: id", fault.id, "an id that the catalogue does not have",
                "Give the adopted fault another id, in its file and in the file's name.",
            )  # fmt: skip
    with with_adopted(map(fault_of, adopted)):
        yield adopted


def fault_of(adopted: AdoptedFault) -> ModelFault:
    """Return a fault of the catalogue."""
    return ModelFault(
        adopted.id, adopted.title, adopted.effect, adopted.remedy,
        partial(_applies_to, adopted), partial(_variants, adopted),
    )  # fmt: skip


def _applies_to(adopted: AdoptedFault, context: ComponentContext) -> bool:
    if adopted.kind != context.component.kind:
        return False
    if family_of(context.bound.config).name not in adopted.families:
        return False
    return any(fnmatchcase(context.role, pattern) for pattern in adopted.components)


def _variants(adopted: AdoptedFault, context: ComponentContext) -> Iterator[FaultVariant]:
    try:
        change = read(adopted.change, context)
        words = local_words(context, adopted.words)
    except CANNOT_RUN:
        return  # it speaks of a weight or a component that is not here
    whole = adopted.change["do"] != _OF_WEIGHTS
    yield FaultVariant(words, change, needs_whole_call=whole)
