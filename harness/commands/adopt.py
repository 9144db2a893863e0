"""Save a description as a fault that is named from then on: `degarble faults adopt`.

A verdict's JSON holds what was described as data. One file of data states the fault and its museum
case, one page says it to people.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument, UnreadableFile, UnwritablePath
from degarble.harness.base.files import read_small_text
from degarble.harness.base.version import VERSION
from degarble.harness.engine.adopted.files import (
    FAMILY,
    ID,
    SCHEMA,
    SUFFIX,
    AdoptedFault,
    fault_text,
    stated_fault,
)
from degarble.harness.engine.adopted.statement import REFUSED
from degarble.harness.engine.faults.registry import KIND_FAULTS, MODEL_FAULTS
from degarble.harness.report.files import usable_folder, write_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_LARGEST = 256 << 20  # bytes of a verdict
_REPORTED = "*-descriptions.json"  # what `check --report` writes
_TOKENS, _SEED = 48, 5  # of the museum's case of a product
_WEIGHT = ".weight"
PRODUCT = "traced.linear"
_AGAIN = (
    "Write the verdict as JSON: degarble check CAPTURE --reference CKPT --json FILE, or"
    " document() of judge() and api.check()."
)


@dataclass(frozen=True)
class AdoptedFiles:
    """A fault and the two files that state it."""

    fault: AdoptedFault
    data: Path
    page: Path

    def write(self) -> None:
        """Write both; one that stands there with another content is not replaced."""
        usable_folder("--to", self.data.parent)
        texts = {self.data: fault_text(self.fault), self.page: page_of(self.fault)}
        for path, text in texts.items():
            if path.exists() and path.read_text(encoding="utf-8") != text:
                raise UnwritablePath(
                    "--id", self.fault.id, f"an id that {path} does not state already",
                    "Name another one with --id, or remove that file.",
                )  # fmt: skip
        for path, text in texts.items():
            write_text(path, text)


def adopted_from(
    verdict: Path, folder: Path, finding: int | None = None, identity: str | None = None
) -> AdoptedFiles:
    """Return what is to be written for a description of a verdict."""
    number, statement = _chosen(verdict, finding)
    if REFUSED in statement:
        raise InvalidArgument(
            f"{verdict}: finding {number}", "a description", "one that a file can state",
            str(statement[REFUSED]),
        )  # fmt: skip
    stated = dict(statement)
    origin = stated.get("origin")
    if not isinstance(origin, dict):
        raise InvalidArgument(f"{verdict}: origin", origin, "a record", _AGAIN)
    stated["origin"] = {**origin, "version": VERSION, "verdict": verdict.name}
    wanted = identity or _id_of(stated)
    if not ID.fullmatch(wanted) or wanted in MODEL_FAULTS or wanted in KIND_FAULTS:
        raise InvalidArgument(
            "--id", wanted, "FAMILY.name in small letters, which the catalogue does not have",
            f"For example --id {FAMILY}.first_rows.",
        )  # fmt: skip
    effect = f"found in {origin.get('component')}; no known fault explained it there"
    document = {"degarble_fault": SCHEMA, "id": wanted, "effect": effect, "case": {}, **stated}
    fault = stated_fault(document, str(verdict))
    fault = replace(fault, case=_case_of(fault))
    return AdoptedFiles(fault, folder / f"{wanted}{SUFFIX}", folder / f"{wanted}.md")


def _chosen(verdict: Path, finding: int | None) -> tuple[int, Mapping[str, Any]]:
    known = dict(_statements(verdict))
    listed = ", ".join(map(str, known)) or "none"
    if not known:
        raise InvalidArgument(
            str(verdict), "no description", "a verdict with a cause that is described",
            "A named cause is in the catalogue already, and a place alone states no fault.",
        )  # fmt: skip
    if finding is None and len(known) > 1:
        raise InvalidArgument(
            "--finding", "none", f"one of {listed}", f"Choose one: --finding {min(known)}."
        )
    number = min(known) if finding is None else finding
    if number not in known:
        raise InvalidArgument(
            "--finding", number, f"a described one: {listed}", f"--finding {min(known)}"
        )
    return number, known[number]


def _statements(verdict: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the descriptions of a verdict by the number of the finding, which begins at 1."""
    if verdict.is_dir():
        files = sorted(verdict.glob(_REPORTED))
        if len(files) != 1:
            raise UnreadableFile(
                str(verdict), f"{len(files)} files {_REPORTED}", "a report with one of them",
                "Name the JSON file itself." if files else _AGAIN,
            )  # fmt: skip
        verdict = files[0]
    try:
        document = json.loads(read_small_text(verdict, _LARGEST))
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(str(verdict), str(error), "a verdict in JSON", _AGAIN) from error
    if not isinstance(document, dict):
        raise UnreadableFile(str(verdict), type(document).__name__, "a verdict in JSON", _AGAIN)
    described = document.get("described")
    if isinstance(described, dict) and isinstance(described.get("statement"), dict):
        yield 1, described["statement"]  # of judge()
    several = document.get("descriptions")
    for each in several if isinstance(several, list) else ():
        if isinstance(each, dict) and type(each.get("origin_number")) is int:
            stated = {key: value for key, value in each.items() if key != "origin_number"}
            yield each["origin_number"] + 1, stated


def _id_of(stated: Mapping[str, Any]) -> str:
    """Return an id of the component's role or kind and of a digest of the change."""
    digest = hashlib.sha256(json.dumps(stated.get("change"), sort_keys=True).encode()).hexdigest()
    roles = stated.get("components")
    role = str(roles[0]) if isinstance(roles, list) and roles else ""
    stem = str(stated.get("kind") or role).rpartition(".")[2]
    stem = re.sub(r"[^a-z0-9]+", "_", stem.lower()).strip("_") or "change"
    return f"{FAMILY}.{stem}_{digest[:6]}"


def _case_of(fault: AdoptedFault) -> dict[str, Any]:
    """Return what the museum plants it in: its small models, or a product of these extents."""
    if not fault.kind:
        return {"models": list(fault.families)}
    weights, inputs = (fault.origin.get(name) for name in ("weights", "inputs"))
    weight = weights.get(_WEIGHT) if isinstance(weights, dict) else None
    form = inputs.get(_WEIGHT) if isinstance(inputs, dict) else None
    if fault.kind != PRODUCT or not isinstance(weight, dict) or form is None:
        return {}
    return {"product": {**weight, "input": form, "tokens": _TOKENS, "seed": _SEED}}


def page_of(fault: AdoptedFault) -> str:
    """Return the page of a fault: what is wrong, where it was found, how to use it."""
    condition = "; ".join(f"{key} {value}" for key, value in fault.condition.items())
    where = ", ".join(fault.components) if not fault.kind else fault.kind
    lines = [
        f"# {fault.id}", "", f"{fault.title}.", "",
        "| | |", "|---|---|",
        f"| applies to | {where} of {', '.join(fault.families)} |",
        f"| found in | {fault.origin.get('component')} |",
        f"| acted | {condition or 'always'} |",
        f"| proof | {fault.origin.get('evidence')} |",
        f"| look at | {fault.remedy} |",
        f"| written by | degarble {fault.origin.get('version')} |", "",
        f"`{fault.id}{SUFFIX}` states the change as data; nothing in it is run.", "",
        "A search names the fault where it reproduces the outputs:", "",
        "```", "degarble check CAPTURE --reference CKPT --faults .", "```", "",
        "The museum plants it and has to find it:" if fault.case else
        "No case of the museum is of this kind, so that it is not planted.", "",
    ]  # fmt: skip
    if fault.case:
        lines += ["```", f"degarble faults run {fault.id} --faults .", "```", ""]
    return "\n".join(lines)
