"""Run `degarble audit`: check loading, structure and numbers, compare, and reach the verdict.

The verdict covers only the parts that were judged; an audit lists the others with the reason.
Whatever can raise (checkpoint, loader map, reference) is opened before the long walk over the
bytes. Once the checkpoint is open, everything wrong in it becomes a finding.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import Counter
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import UnknownName
from degarble.harness.checkpoint.audit.findings import format_ranges, in_order
from degarble.harness.checkpoint.audit.rules import Level
from degarble.harness.checkpoint.audit.structure.manifest_check import (
    bytes_hashed,
    judge_manifest,
    require_as_written,
)
from degarble.harness.checkpoint.audit.structure.structure import audit_structure
from degarble.harness.checkpoint.read.types import ProblemKind, shown
from degarble.harness.checkpoint.view.content import content_of
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.report.progress import Progress, duration, size
from degarble.harness.report.verdict import NO_ERRORS, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from degarble.harness.checkpoint.audit.findings import Finding
    from degarble.harness.checkpoint.audit.loader.derived_maps import DerivedEngine
    from degarble.harness.checkpoint.audit.loader.engine_maps import Ranks
    from degarble.harness.checkpoint.audit.loader.maps import LoaderMap
    from degarble.harness.checkpoint.audit.loader.proof import LoaderProof
    from degarble.harness.checkpoint.audit.table import AgainstTable, NumberTable
    from degarble.harness.checkpoint.write.workers import Workers


# --------------------------------------------------------------------------------------------------
# Kind and layer of a tensor, from its name, for grouping findings. Patterns match what all known
# spellings have in common, so that a checkpoint of an unknown model gets a map too. The order of
# the kinds is that of the map.

# The first pattern that matches decides; `#` stands for any number.
_KINDS = (
    ("experts", r"\bexperts\b|\bw13_|\bw2_weight"),
    ("shared experts", r"shared_experts?"),
    ("router", r"\bgate\.|\bgate$|tid2eid|correction_bias"),
    ("indexer", r"indexer"),
    ("compressor", r"compressor"),
    ("mixing", r"\bhc_|(attn|ffn|head)_hc|\bhc\b"),
    ("norms", r"norm"),
    ("dense MLP", r"\bmlp\.(gate|up|down|gate_up)_proj\b|\bffn\.w#\b"),
    ("drafter input", r"\b(eh|e|h)_proj\b"),
    ("attention", r"\b(attn|self_attn|mla_attn)\b"),
    ("embedding, head", r"\b(embed|embed_tokens|head|lm_head|shared_head)\b"),
)
OTHER = "other"
WHOLE = "checkpoint"
_HEADLINE = 120  # characters of a finding in the verdict's sentence
KINDS = (*(kind for kind, _ in _KINDS), OTHER, WHOLE)
_NUMBER = re.compile(r"\d+")
_LAYER = re.compile(r"\b(layers|mtp)\.(\d+)\b")


def kind_of_name(name: str) -> str:
    """Return the kind of a tensor, module or parameter by its name."""
    return _kind_of_pattern(_NUMBER.sub("#", name))


@lru_cache(maxsize=4096)
def _kind_of_pattern(name: str) -> str:
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name)), OTHER)


def kind_of(finding: Finding) -> str:
    """Return the kind of tensor that a finding concerns; without a name it concerns all of them."""
    name = finding.tensor or finding.module
    return kind_of_name(name) if name else WHOLE


def layer_of_name(name: str, layers: int) -> int | None:
    """Return the layer of a name; a drafter's number follows those of the decoder's `layers`."""
    found = _LAYER.search(name)
    if found is None:
        return None
    number = int(found[2])
    return number + layers if found[1] == "mtp" else number


if TYPE_CHECKING:
    Listen = Callable[[int], AbstractContextManager[Progress]]  # given the bytes that are known

STRUCTURE, NUMBERS, AGAINST, LOADER = "structure", "numbers", "against", "loader"
PARTS = (STRUCTURE, NUMBERS, AGAINST, LOADER)
_WHY_NOT = {
    NUMBERS: "Left out by --only structure: values of scales and codes were not looked at.",
    AGAINST: "No reference was given. --against CKPT compares every weight with its source.",
    LOADER: "No map was given. --loader MAP proves which bytes reach which parameter.",
}


@dataclass(frozen=True)
class AuditRequest:
    """What to audit: checkpoint, parts, loader map, reference."""

    path: Path
    numbers: bool = True
    loader: str | None = None
    against: Path | None = None
    vllm_source: Path | None = None  # a folder with vLLM's source; None: the installed vLLM, if any
    content_hash: bool = False


@dataclass(frozen=True)
class AuditPart:
    """One part of an audit: what was judged, or why it was not."""

    name: str
    text: str
    judged: bool


@dataclass(frozen=True)
class AuditedCheckpoint:
    """The audited checkpoint. `identity` hashes its config and every header entry, no weights.

    `places` counts tensors by layer and kind; a drafter's layer number follows the decoder's.
    """

    name: str
    identity: str
    family: str
    layout: str
    layers: int
    drafters: int
    shards: int
    tensors: int
    nbytes: int
    places: Mapping[tuple[int | None, str], int]


@dataclass(frozen=True)
class ReferenceComparison:
    """The reference of a comparison, and the table of measurements against it."""

    name: str
    identity: str
    table: AgainstTable


@dataclass(frozen=True)
class Audit:
    """The findings in one checkpoint."""

    subject: AuditedCheckpoint
    parts: tuple[AuditPart, ...]
    findings: tuple[Finding, ...]
    table: NumberTable | None = None
    loader: LoaderProof | None = None
    comparison: ReferenceComparison | None = None
    content: str | None = None  # hash of all tensors, where it was asked for

    @property
    def judged(self) -> tuple[AuditPart, ...]:
        """Return the parts that the verdict covers."""
        return tuple(part for part in self.parts if part.judged)

    @property
    def not_judged(self) -> tuple[AuditPart, ...]:
        """Return the parts that the verdict does not cover."""
        return tuple(part for part in self.parts if not part.judged)

    @property
    def counts(self) -> dict[Level, int]:
        """Count places by level; one finding may stand for many."""
        found: Counter[Level] = Counter()
        for finding in self.findings:
            found[finding.level] += finding.count
        return {level: found[level] for level in Level}

    @property
    def verdict(self) -> Verdict:
        """Return DIFFERS if there is any error, else AGREES."""
        return Verdict.DIFFERS if self.counts[Level.ERROR] else Verdict.AGREES

    @property
    def headline(self) -> str:
        """Return the word to show: AGREES only where weights were compared with a reference."""
        agrees = self.verdict is Verdict.AGREES
        return NO_ERRORS if agrees and self.comparison is None else self.verdict

    @property
    def sentence(self) -> str:
        """Return the verdict in one sentence that names what was judged."""
        counts = self.counts
        if not counts[Level.ERROR]:
            *front, last = [_IN_WORDS[part.name] for part in self.judged]
            what = f"{', '.join(front)} and {last}" if front else last
            rest = f"; {places(counts[Level.WARNING], 'warning')}" if counts[Level.WARNING] else ""
            alone = (
                "" if self.comparison else " Nothing was compared with a reference: see --against."
            )
            return f"No error in {what} of all {self.subject.tensors:,} tensors{rest}.{alone}"
        errors = [finding for finding in self.findings if finding.level is Level.ERROR]
        more = counts[Level.ERROR] - 1
        rest = f" And {places(more, 'more error')}." if more else ""
        first = errors[0].message.rstrip(".")
        if len(first) > _HEADLINE:
            first = f"{first[:_HEADLINE].rpartition(' ')[0]} .."
        return f"{first}.{rest}"


@dataclass(frozen=True)
class BrokenRule:
    """One broken rule: its first finding, the number of places, the layers."""

    first: Finding
    count: int
    layers: str

    @property
    def extent(self) -> str:
        """Return the number of places and the layers as text; empty for a single place."""
        word = "layer" if self.layers.isdecimal() else "layers"
        layers = f", {word} {self.layers}" if self.layers else ""
        return f"in {self.count:,} places{layers}" if self.count > 1 else ""


def by_rule(findings: Iterable[Finding]) -> list[BrokenRule]:
    """Group findings by rule, in the order of the first of each."""
    gathered: dict[str, list[Finding]] = {}
    for finding in findings:
        gathered.setdefault(finding.rule, []).append(finding)
    return [
        BrokenRule(
            found[0],
            sum(each.count for each in found),
            format_ranges({layer for each in found for layer in each.layers}),
        )
        for found in gathered.values()
    ]


_IN_WORDS = {
    STRUCTURE: "the structure",
    NUMBERS: "the numbers",
    AGAINST: "the comparison",
    LOADER: "the loading",
}


def places(count: int, word: str) -> str:
    """Write a count with its noun."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def audit(wanted: AuditRequest, workers: Workers = 1, listen: Listen | None = None) -> Audit:
    """Audit a checkpoint; `listen` returns the counter of bytes that are walked."""
    unheard: Listen = lambda total: nullcontext(Progress("", total))  # noqa: E731  a default
    with ExitStack() as stack:
        progress = stack.enter_context((listen or unheard)(0))
        progress.step("heads")
        checkpoint = stack.enter_context(Checkpoint.survey(wanted.path))
        _require_tensors(checkpoint)
        reference = None
        if wanted.against is not None:
            reference = stack.enter_context(Checkpoint.open(wanted.against))
        steps = _Steps(checkpoint, reference, wanted)
        progress.step("loading")
        steps.look_at_loading()  # first, because it refuses a wrong map
        progress.step("structure")
        steps.look_at_structure()
        if wanted.numbers:
            steps.walk(workers, progress)
        if wanted.content_hash:
            steps.hash_content(workers, progress)
        return steps.audit()


PACKING_TABLE = "degarble's own packing table"


def derived_loader(
    checkpoint: Checkpoint, engine: str, ranks: Ranks, vllm_source: Path | None = None
) -> LoaderMap:
    """Return the map of an engine for a model that transformers alone describes."""
    # Torch and transformers, which no other part of an audit needs.
    from degarble.harness.checkpoint.audit.loader.derived_maps import (  # noqa: PLC0415
        DerivedEngine,
        derived_map,
    )
    from degarble.harness.inference.traced import naming_rules, traced_config  # noqa: PLC0415

    if engine not in ("transformers", "vllm"):
        raise UnknownName.among("loader map", engine, ("transformers", "vllm"))
    config = traced_config(checkpoint)
    names = naming_rules(config)
    chosen = DerivedEngine(engine)
    if engine == "vllm":
        chosen = _vllm(_stated(names.model.config), checkpoint.config, vllm_source)
    return derived_map(checkpoint, config, names, chosen, ranks)


def _stated(config: Any) -> dict[str, Any]:
    """Return what a config of transformers answers: properties and other spellings as well."""
    found: dict[str, Any] = config.to_dict()
    for name in {*dir(config), *config.attribute_map} - found.keys():
        value = None if name.startswith("_") else getattr(config, name, None)
        if isinstance(value, (str, int, float, list, dict)):
            found[name] = value
    return found


def _vllm(
    config: Mapping[str, Any], stated: Mapping[str, Any], folder: Path | None
) -> DerivedEngine:
    """Return what vLLM's own source says of a model's class, or our packing table."""
    from degarble.harness.capture.engine.derived import PACKED  # noqa: PLC0415  torch, as above
    from degarble.harness.checkpoint.audit.loader.derived_maps import DerivedEngine  # noqa: PLC0415
    from degarble.harness.checkpoint.audit.loader.engine_sources import EngineSource  # noqa: PLC0415

    table = partial(DerivedEngine, "vllm", PACKED, ("w13", "w2"))
    source = EngineSource.installed() if folder is None else EngineSource.at(folder)
    if source is None:
        return table(origin=f"{PACKING_TABLE}: no vLLM is installed, and --vllm-source names none")
    architecture = next(iter(stated.get("architectures") or ()), "")
    loader = source.loader(architecture, config)
    if loader is None:
        without = f"{source.name} has no text model of its own for {shown(architecture or '?')}"
        return table(origin=f"{PACKING_TABLE}: {without}")
    return table(loader=loader, origin=loader.origin)


class _Steps:
    """One audit, step by step; a part whose step is skipped is not judged."""

    def __init__(
        self, checkpoint: Checkpoint, reference: Checkpoint | None, wanted: AuditRequest
    ) -> None:
        self._checkpoint, self._reference, self._wanted = checkpoint, reference, wanted
        self._findings: list[Finding] = []
        self._texts: dict[str, str] = {}
        self._table: NumberTable | None = None
        self._loader: LoaderProof | None = None
        self._comparison: ReferenceComparison | None = None
        self._subject = _subject(checkpoint, wanted.path)
        self._hashes = self._reference_hashes = ""
        self._content: str | None = None

    def look_at_structure(self) -> None:
        """Judge files, names, shapes, dtypes, partner tensors, and what the config promises."""
        self._findings += audit_structure(self._checkpoint)
        about = self._subject
        by = "module by module, because no known config says what belongs there"
        if self._checkpoint.problems.counts[ProblemKind.UNREADABLE_CONFIG]:
            by = "module by module, because config.json states no model that can be"
        if self._checkpoint.model is not None:
            by = "module by module, because too few names are those of the config's model"
        if self._checkpoint.names is not None:
            by = f"against the config of {about.family}"
        files = places(about.shards, "file")
        self._texts[STRUCTURE] = f"{about.tensors:,} tensors in {files}, {by}."

    def look_at_loading(self) -> None:
        """Prove what a loader does with every byte."""
        if self._wanted.loader is None:
            return
        # Torch takes 200 MB, and a structure audit needs none of it.
        from degarble.harness.checkpoint.audit.loader.map_files import read_loader_map  # noqa: PLC0415
        from degarble.harness.checkpoint.audit.loader.proof import prove  # noqa: PLC0415

        chosen = read_loader_map(
            self._wanted.loader,
            self._checkpoint,
            partial(derived_loader, self._checkpoint, vllm_source=self._wanted.vllm_source),
        )
        self._loader = proof = prove(self._checkpoint, chosen)
        self._findings += proof.findings
        ranks, counts = len(proof.ranks), proof.counts
        derived = chosen.derived
        origin = "" if derived is None or not derived.origin else f", by {derived.origin},"
        self._texts[LOADER] = (
            f"map {chosen.name}{origin} on {places(ranks, 'rank')}:"
            f" {counts['transfers']:,} writes to {counts['parameters']:,} parameters."
            if not proof.stopped
            else f"map {chosen.name}: partners do not fit into its fused parameters; nothing else"
            " of the loading was judged."
        )

    def walk(self, workers: Workers, progress: Progress) -> None:
        """Judge every stored number, by itself and against the reference."""
        # Torch takes 200 MB, and a structure audit needs none of it.
        from degarble.harness.checkpoint.audit.against.against import bytes_against  # noqa: PLC0415

        total = self._subject.nbytes + bytes_hashed(self._checkpoint)
        if self._reference is not None:
            total += bytes_against(self._checkpoint, self._reference)  # refuses another model
            total += bytes_hashed(self._reference)
        progress.expect(total)
        progress.step("hashes")
        threads = workers if isinstance(workers, int) else 1
        if self._reference is not None:
            verified = require_as_written(self._reference, threads, progress.advance)
            self._reference_hashes = " The reference's hashes were verified." if verified else ""
        changed = judge_manifest(self._checkpoint, threads, progress.advance)
        self._findings += changed or []
        self._hashes = "" if changed is None else " The hashes of manifest.json were verified."
        progress.step("numbers")
        self._look_at_numbers(workers, progress)
        if self._reference is not None and self._wanted.against is not None:
            progress.step("against")
            self._compare(self._reference, self._wanted.against, workers, progress)

    def hash_content(self, workers: Workers, progress: Progress) -> None:
        """Hash every tensor."""
        progress.expect(self._subject.nbytes)
        progress.step("content hash")
        threads = workers if isinstance(workers, int) else 1
        self._content = content_of(self._checkpoint, threads, progress.advance)

    def _look_at_numbers(self, workers: Workers, progress: Progress) -> None:
        from degarble.harness.checkpoint.audit.numbers.numbers import judge_numbers  # noqa: PLC0415  as above
        from degarble.harness.commands.audit.spread import measured  # noqa: PLC0415

        begun = time.monotonic()
        path = self._wanted.path.resolve()
        self._table = table = measured(self._checkpoint, path, workers, progress.advance)
        text = _read(self._subject.nbytes, begun)
        self._findings += judge_numbers(self._checkpoint, table)
        unread = len(table.unread)
        rest = f" {places(unread, 'tensor')} could not be read." if unread else ""
        self._texts[NUMBERS] = f"{len(table):,} weights, {text}.{rest}{self._hashes}"

    def _compare(
        self, reference: Checkpoint, path: Path, workers: Workers, progress: Progress
    ) -> None:
        from degarble.harness.checkpoint.audit.against.against import judge_against  # noqa: PLC0415  as above
        from degarble.harness.commands.audit.spread import compared  # noqa: PLC0415

        begun, before = time.monotonic(), progress.pace.done
        paths = self._wanted.path.resolve(), path.resolve()
        table = compared(self._checkpoint, reference, paths, workers, progress.advance)
        text = _read(progress.pace.done - before, begun)
        self._findings += judge_against(self._checkpoint, reference, table)
        name = path.resolve().name
        self._comparison = ReferenceComparison(name, identity_of(reference), table)
        alone = len(table.only_here) + len(table.only_there) + len(table.unlike)
        rest = f" {places(alone, 'weight')} had no counterpart." if alone else ""
        rest += self._reference_hashes
        self._texts[AGAINST] = f"{len(table):,} weights compared with {name}, {text}.{rest}"

    def audit(self) -> Audit:
        """Return the audit."""
        parts = (
            AuditPart(name, self._texts.get(name) or _WHY_NOT[name], name in self._texts)
            for name in PARTS
        )
        return Audit(
            self._subject,
            tuple(parts),
            tuple(in_order(self._findings)),
            self._table,
            self._loader,
            self._comparison,
            self._content,
        )


def _require_tensors(checkpoint: Checkpoint) -> None:
    """Raise if no tensor of the checkpoint can be read: nothing could be judged."""
    unreadable = (ProblemKind.UNREADABLE_SHARD, ProblemKind.UNREADABLE_INDEX)
    for problem in () if checkpoint.entries else checkpoint.problems.found:
        if problem.kind in unreadable:
            raise problem.error


def _read(nbytes: int, begun: float) -> str:
    """Return how much was read, and how fast, as text."""
    took = max(time.monotonic() - begun, 1e-3)
    return f"{size(nbytes)} read in {duration(took)} ({size(nbytes / took)}/s)"


def _subject(checkpoint: Checkpoint, path: Path) -> AuditedCheckpoint:
    model = checkpoint.model
    layers = len(model.layers) if model else 0
    counted = Counter(
        (layer_of_name(name, layers), kind_of_name(name)) for name in checkpoint.entries
    )
    return AuditedCheckpoint(
        name=path.resolve().name,
        identity=identity_of(checkpoint),
        family=model.family if model else "unknown",
        layout=str(checkpoint.layout),
        layers=layers,
        drafters=len(model.blocks) - layers if model else 0,
        shards=len(checkpoint.shards),
        tensors=len(checkpoint.entries),
        nbytes=sum(entry.nbytes for entry in checkpoint.entries.values()),
        places=counted,
    )


def identity_of(checkpoint: Checkpoint) -> str:
    """Hash a checkpoint's config and every header entry: the key of its page."""
    digest = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True, default=str).encode())
    for name in sorted(checkpoint.entries):
        entry = checkpoint.entries[name]
        digest.update(f"\0{name}\0{entry.dtype}\0{entry.shape}\0{entry.file.name}".encode())
    return f"sha256:{digest.hexdigest()}"
