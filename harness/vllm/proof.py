"""Prove that vLLM loads a checkpoint correctly, before and while it does.

`prove_start` predicts what vLLM's loader does with every byte of the checkpoint
(harness/checkpoint); a finding of level error stops the start. A guard compares every tensor of the
weight stream with the checkpoint's own index. After loading, a parameter that still has its
allocated content is an error, because vLLM's loader silently skips what it cannot place.

Each of vLLM's fused modules is built in its stored format, so fused partners of two formats are
rejected.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import (
    InvalidArgument,
    LayoutMismatch,
    PartnersMismatch,
    ShapeMismatch,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.checkpoint.audit.findings import Finding
    from degarble.harness.checkpoint.audit.loader.maps import LoaderMap
    from degarble.harness.checkpoint.audit.structure.inventory import Inventory
    from degarble.harness.checkpoint.view.view import Checkpoint

_FEW = 3  # findings, names that a refusal repeats
# Names are those of harness/checkpoint's rules: vLLM's own module around experts is left out there.
EXPERTS_INSIDE = ".routed_experts"
# vLLM 0.33 models/deepseek_v4 gives these no quantisation config.
PLAIN = (".compressor.fused_wkv_wgate", ".indexer.weights_proj", ".ffn.gate")
NO_DRAFTER = "the plugin serves no drafter"


@dataclass(frozen=True)
class StoredTensorFacts:
    """Record of one tensor in the checkpoint."""

    shape: tuple[int, ...]
    nbytes: int
    expert: bool
    drafter: bool


@dataclass(frozen=True)
class StartProof:
    """Facts proven about a checkpoint before vLLM loads it."""

    manifest: str
    recipe: str
    summary: str
    formats: Mapping[str, str]  # of vLLM's modules
    stored: Mapping[str, StoredTensorFacts]
    config: Any = None  # of the model, as harness/model reads it


def prove_start(folder: Path, ranks: tuple[int, int, int] = (1, 1, 1)) -> StartProof:
    """Prove that vLLM's loader fills every parameter of every rank (tp, ep, pp), or refuse."""
    from degarble.harness.checkpoint.audit.loader.proof import prove  # noqa: PLC0415
    from degarble.harness.checkpoint.audit.structure.inventory import take_inventory  # noqa: PLC0415  heavy
    from degarble.harness.checkpoint.view.view import Checkpoint  # noqa: PLC0415

    with Checkpoint.open(folder) as checkpoint:
        names = checkpoint.names
        if names is None:
            raise InvalidArgument(
                "checkpoint", folder.name, "a config and names of DeepSeek-V4",
                "See `degarble audit` for what is known of it.",
            )  # fmt: skip
        inventory = take_inventory(names)
        loader_map = as_stored(inventory, ranks)
        proof = prove(checkpoint, loader_map)
        require_no_errors(proof.findings)
        counts, formats = proof.summary(), formats_of(inventory, loader_map)
        require_plain(formats)
        return StartProof(
            manifest=manifest_of(checkpoint, folder),
            recipe=recipe_told(formats),
            summary=f"{len(proof.ranks)} ranks, {counts['tensors placed']} tensors placed,"
            f" {counts['elements unwritten']} elements unwritten",
            formats=formats,
            stored={
                name: StoredTensorFacts(
                    tuple(entry.shape), entry.nbytes, ".experts." in name, name.startswith("mtp.")
                )
                for name, entry in checkpoint.entries.items()
            },
            config=inventory.config,
        )


def as_stored(inventory: Inventory, ranks: tuple[int, int, int]) -> LoaderMap:
    """Make vLLM's map, with each module in the format in which it is stored."""
    from degarble.harness.checkpoint.audit.loader.engine_maps import Ranks, engine_map  # noqa: PLC0415
    from degarble.harness.checkpoint.audit.loader.maps import Elsewhere, EngineLayout  # noqa: PLC0415
    from degarble.harness.checkpoint.audit.structure.inventory import stored_recipe  # noqa: PLC0415

    # Trap: vLLM's own formats may not be cut over these ranks where the stored ones can be.
    loader_map = engine_map(inventory, "vllm", Ranks(*ranks), stored_recipe(inventory))
    engine = loader_map.parameters
    assert isinstance(engine, EngineLayout), "an engine's map has its layout"
    assert not isinstance(engine.layout, str), "an engine's map has its layout as a record"
    layout = replace(engine.layout, no_drafter=NO_DRAFTER)
    return replace(
        loader_map,
        name=f"{loader_map.name}, with degarble's linears",
        parameters=replace(engine, layout=layout, recipe=layout.recipe),
        convert=(),
        elsewhere=(Elsewhere(r"^mtp\.", NO_DRAFTER), *loader_map.elsewhere),
    )


def formats_of(inventory: Inventory, loader_map: LoaderMap) -> dict[str, str]:
    """Return the stored format of each of vLLM's modules; refuse partners of two formats."""
    from degarble.harness.checkpoint.audit.loader.maps import NameOutcome, NameRules  # noqa: PLC0415
    from degarble.harness.model.tensors import tensors_of  # noqa: PLC0415

    engine: Any = loader_map.parameters
    layout = engine.layout
    known = {tensor.name for tensor in tensors_of(inventory.config, layout)}
    rules = NameRules(loader_map, known)
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for linear in inventory.linears:
        resolved = rules.resolve(f"{linear.module}.weight")
        if resolved.outcome is NameOutcome.PLACED:
            found[module_of(resolved.target)][str(linear.weight)] += 1
    for module, formats in found.items():
        if len(formats) > 1:
            raise PartnersMismatch(
                f"formats in {module}", dict(formats), "one format for all that vLLM fuses",
                "degarble convert brings partners into one format.",
            )  # fmt: skip
    return {module: next(iter(formats)) for module, formats in found.items()}


def require_plain(formats: Mapping[str, str]) -> None:
    """Refuse stored formats of modules that vLLM builds in BF16 whatever a method says."""
    for module, stored in formats.items():
        if module.endswith(PLAIN) and stored != "BF16":
            raise LayoutMismatch(
                f"stored format of {module}", stored, "BF16: vLLM 0.33 builds it unquantised",
                "degarble convert --to vllm decodes it.",
            )  # fmt: skip


def recipe_told(formats: Mapping[str, str]) -> str:
    """Summarise in a line how many of vLLM's modules have which format."""
    counts = sorted(Counter(formats.values()).items())
    return ", ".join(f"{count} modules {name}" for name, count in counts)


def module_of(parameter: str) -> str:
    """Name the module of one of vLLM's parameters; all experts of a layer are one."""
    return parameter.rpartition(".")[0]


def require_no_errors(findings: Iterable[Finding]) -> None:
    """Refuse to load what the proof found wrong."""
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        text = "; ".join(f"{error.rule}: {error.message}" for error in errors[:_FEW])
        more = f" and {len(errors) - _FEW} more" if len(errors) > _FEW else ""
        raise LayoutMismatch(
            "loader proof", f"{text}{more}", "a checkpoint that vLLM's loader places whole",
            "degarble audit CKPT --loader vllm lists all of it.",
        )  # fmt: skip


def manifest_of(checkpoint: Checkpoint, folder: Path) -> str:
    """Name the checkpoint's bytes: its manifest's hash, or a fingerprint by samples."""
    from degarble.harness.checkpoint.view.view import fingerprint  # noqa: PLC0415
    from degarble.harness.checkpoint.write.manifest import MANIFEST, Manifest  # noqa: PLC0415

    if (folder / MANIFEST).exists():
        return f"manifest {Manifest.read(folder).hash}"
    return f"without manifest, by samples {fingerprint(checkpoint)}"


def guarded(
    weights: Iterable[tuple[str, Tensor]], proven: StartProof, *, spread: bool
) -> Iterator[tuple[str, Tensor]]:
    """Hand weights on, each compared with the index; `spread`: experts of other ranks may lack."""
    seen: set[str] = set()
    for name, tensor in weights:
        stored = proven.stored.get(name)
        if stored is None or name in seen:
            what = "a second time" if name in seen else "not in the checkpoint's index"
            raise LayoutMismatch(
                f"weight {name}", what, "each tensor of the proven checkpoint once",
                "Point vLLM and the proof to the same folder; do not patch weights on the way.",
            )  # fmt: skip
        if tuple(tensor.shape) != stored.shape or tensor.nbytes != stored.nbytes:
            raise ShapeMismatch(
                f"weight {name}", f"{tuple(tensor.shape)} in {tensor.nbytes} bytes",
                f"{stored.shape} in {stored.nbytes} bytes, as the file's head says",
                "Something between file and loader changed it.",
            )  # fmt: skip
        seen.add(name)
        yield name, tensor
    missing = [
        name
        for name, stored in proven.stored.items()
        if name not in seen and not stored.drafter and not (spread and stored.expert)
    ]
    if missing:
        raise LayoutMismatch(
            "weights that never came", f"{len(missing)}, as {', '.join(missing[:_FEW])}",
            "every tensor of the checkpoint",
            "Look for an ignore pattern or a shard that vLLM did not open.",
        )  # fmt: skip


def require_filled(parameters: Collection[str], loaded: Collection[str]) -> None:
    """Refuse parameters that nothing was written to: they hold whatever the memory held."""
    empty = sorted(set(parameters) - set(loaded))
    if empty:
        raise LayoutMismatch(
            "parameters that nothing was written to",
            f"{len(empty)}, as {', '.join(empty[:_FEW])}",
            "every parameter of the model loaded",
            "The loader proof names the tensors: degarble audit CKPT --loader vllm.",
        )
