"""Verify the content hashes of a checkpoint that has a manifest.json of ours.

Every byte is read once more and hashed, at about 1 GB/s a thread. A shard whose hash differs is
hashed tensor by tensor, so that the finding names what was changed. Other tools' manifests, and
sparse shards without a hash, are not verified.

A difference is a finding in the audited checkpoint, and an error in a reference: otherwise the
reference's own damage would be reported as the checkpoint's. A check hashes its reference while it
judges, and tells nothing before all is hashed.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from shlex import quote
from typing import TYPE_CHECKING, Self

from degarble.harness.base.errors import Refused, UnreadableFile
from degarble.harness.checkpoint.audit import rules
from degarble.harness.checkpoint.audit.findings import FindingLocation, Findings
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.checkpoint.view.quantisation_configs import CONFIG, HF_QUANT_CONFIG
from degarble.harness.checkpoint.write.manifest import MANIFEST, Manifest, hash_of_file, read_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from concurrent.futures import Future

    from degarble.harness.checkpoint.audit.findings import Finding
    from degarble.harness.checkpoint.view.view import Checkpoint

_COMPARED = frozenset({CONFIG, HF_QUANT_CONFIG})  # files other than shards that a comparison reads
_REMEDY = "Write or copy the checkpoint again; remove manifest.json where the change was meant."


def manifest_of(checkpoint: Checkpoint) -> Manifest | None:
    """Read the manifest of a checkpoint that we wrote; None without one."""
    path = checkpoint.root / MANIFEST
    if not checkpoint.is_folder or not path.is_file():
        return None
    tool = read_object(path).get("tool")
    ours = isinstance(tool, dict) and tool.get("name") == "degarble"
    return Manifest.read(checkpoint.root) if ours else None


def bytes_hashed(checkpoint: Checkpoint) -> int:
    """Return how many bytes `judge_manifest` reads, for a progress bar."""
    try:
        manifest = manifest_of(checkpoint)
    except Refused:
        return 0
    records = manifest.shards.values() if manifest else ()
    return sum(record.nbytes for record in records if record.sha256 is not None)


def judge_manifest(
    checkpoint: Checkpoint, threads: int, progress: Callable[[int], None]
) -> list[Finding] | None:
    """Hash every file of the manifest; return findings, or None without a manifest."""
    findings = Findings()
    try:
        manifest = manifest_of(checkpoint)
    except Refused as error:
        text = f"{shown(MANIFEST)}: {error.shown_value}, expected {error.expectation}."
        findings.add(rules.MANIFEST, FindingLocation(), text, error.remedy, file=MANIFEST)
        return findings.sorted()
    if manifest is None:
        return None
    for name, why in _changed_files(checkpoint, manifest, _stated(manifest), threads, progress):
        _report(checkpoint, manifest, name, why, findings)
    return findings.sorted()


class ReferenceHashes:
    """Shards and configs of a reference, hashed in threads against its manifest; close it.

    Files that no comparison reads are ignored. Without a manifest there is nothing to hash.
    """

    def __init__(
        self, reference: Checkpoint, threads: int, progress: Callable[[int], None] = lambda _: None
    ) -> None:
        self._reference = reference
        self._manifest = _manifest_of_reference(reference)
        self._pool = ThreadPoolExecutor(threads)
        self._told: dict[str, Future[str | None]] = {}
        if self._manifest is not None:
            read = self._manifest.shards.keys() | _COMPARED
            stated = {name: each for name, each in _stated(self._manifest).items() if name in read}
            verify = partial(_difference, reference, self._manifest, stated, progress)
            self._told = {name: self._pool.submit(verify, name) for name in stated}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    @property
    def finished(self) -> bool:
        """Whether every file is hashed, or one is known to differ."""
        if all(told.done() for told in self._told.values()):
            return True
        return any(told.done() and told.result() is not None for told in self._told.values())

    def require(self) -> bool:
        """Wait, and raise if files differ; return whether there was a manifest."""
        if self._manifest is None:
            return False
        whys = {name: told.result() for name, told in self._told.items()}
        changed = [(name, why) for name, why in whys.items() if why is not None]
        if changed:
            raise _changed_reference(self._reference, self._manifest, changed)
        return True


def require_as_written(
    reference: Checkpoint, threads: int, progress: Callable[[int], None]
) -> bool:
    """Raise if shards or configs of a reference differ from its manifest.

    Return whether there was a manifest. Files that no comparison reads are ignored.
    """
    with ReferenceHashes(reference, threads, progress) as hashes:
        return hashes.require()


def _manifest_of_reference(reference: Checkpoint) -> Manifest | None:
    try:
        return manifest_of(reference)
    except Refused as error:
        name = f"{MANIFEST} of the reference {shown(str(reference.root))}"
        raise UnreadableFile(name, error.value, error.expectation, error.remedy) from error


def _changed_reference(
    reference: Checkpoint, manifest: Manifest, changed: list[tuple[str, str]]
) -> UnreadableFile:
    name, why = changed[0]
    differ = _differ(_changed_tensors(reference, manifest, name))
    return UnreadableFile(
        f"the reference's file {shown(str(reference.root / name))}"
        + (f", of {len(changed)} that were changed," if len(changed) > 1 else ""),
        f"{differ}; {why}" if differ else why,
        f"the content that the reference's {MANIFEST} states",
        f"Run `degarble audit {quote(str(reference.root))}`, which detects every change, and write"
        f" or copy the reference again; remove its {MANIFEST} where the change was meant.",
    )


def _differ(tensors: list[str]) -> str:
    """Describe how many tensors changed; empty if none did."""
    if not tensors:
        return ""
    many = f"{len(tensors)} tensors differ" if len(tensors) > 1 else "1 tensor differs"
    return f"{many}, {shown(tensors[0])} first"


def _stated(manifest: Manifest) -> dict[str, tuple[int, str | None]]:
    """Return the stated size and hash of every file."""
    files = {name: (file.nbytes, file.sha256) for name, file in manifest.files.items()}
    return files | {name: (shard.nbytes, shard.sha256) for name, shard in manifest.shards.items()}


def _changed_files(
    checkpoint: Checkpoint,
    manifest: Manifest,
    stated: Mapping[str, tuple[int, str | None]],
    threads: int,
    progress: Callable[[int], None],
) -> Iterator[tuple[str, str]]:
    """Hash files; yield name and difference of each that changed."""
    verify = partial(_difference, checkpoint, manifest, stated, progress)
    with ThreadPoolExecutor(threads) as pool:
        for name, why in zip(stated, pool.map(verify, stated), strict=True):
            if why is not None:
                yield name, why


def _difference(
    checkpoint: Checkpoint,
    manifest: Manifest,
    stated: Mapping[str, tuple[int, str | None]],
    progress: Callable[[int], None],
    name: str,
) -> str | None:
    """Hash one file; return how it differs, or None."""
    path, (nbytes, sha256) = checkpoint.root / name, stated[name]
    try:
        # A wrong size spares the hash.
        if path.stat().st_size != nbytes:
            return f"{path.stat().st_size} bytes, {nbytes} stated"
        if sha256 is None:
            return None
        found = hash_of_file(path)
    except (OSError, Refused) as error:
        return f"not readable ({error})"
    # bytes_hashed counts shards alone, so progress does too.
    if name in manifest.shards:
        progress(nbytes)
    return None if found == sha256 else f"SHA-256 {found[:16]}..., {sha256[:16]}... stated"


def _report(
    checkpoint: Checkpoint, manifest: Manifest, name: str, why: str, findings: Findings
) -> None:
    changed = _changed_tensors(checkpoint, manifest, name)
    where = f": {_differ(changed)}" if changed else ""
    findings.add(
        rules.MANIFEST,
        FindingLocation(changed[0] if changed else None),
        f"{shown(name)} is not what was written ({why}){where}.",
        _REMEDY,
        file=shown(name),
        tensors=[shown(each) for each in changed[:8]],
    )


def _changed_tensors(checkpoint: Checkpoint, manifest: Manifest, name: str) -> list[str]:
    """Return the tensors of a shard whose hash differs from the manifest's."""
    record = manifest.shards.get(name)
    found = []
    for tensor, stated in record.tensors.items() if record is not None else ():
        entry = checkpoint.entries.get(tensor)
        if entry is None or stated is None or entry.file.name != name:
            continue
        digest = hashlib.sha256()
        for chunk in checkpoint.chunks(tensor):
            digest.update(chunk)
        if digest.hexdigest() != stated:
            found.append(tensor)
    return found
