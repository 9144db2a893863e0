"""Compare the format of every linear with the quantisation configs and with related linears.

It checks each linear against what is stated for it, the two configs against each other, stated
block sizes against those that shapes show, partners and experts among themselves, and the drafter's
experts against the main model's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from degarble.harness.checkpoint.audit import rules
from degarble.harness.checkpoint.audit.findings import NOWHERE, FindingLocation, Findings
from degarble.harness.checkpoint.audit.structure.inventory import NVFP4
from degarble.harness.checkpoint.audit.structure.partners import partners
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.checkpoint.view.quantisation_configs import (
    FP8_BLOCKS,
    Promise,
    family_of,
    statements,
)
from degarble.harness.model.recipes import BF16

if TYPE_CHECKING:
    from degarble.harness.checkpoint.audit.structure.inventory import Found, Inventory
    from degarble.harness.checkpoint.view.quantisation_configs import Statement
    from degarble.harness.checkpoint.view.view import Checkpoint
    from degarble.harness.model.types import Block

# Elements of a block: along K, or rows and columns.
_BLOCKS = {NVFP4: (16,), "MXFP4": (32,), "MXFP8": (32,), FP8_BLOCKS: (128, 128)}


def report_formats(checkpoint: Checkpoint, inventory: Inventory, findings: Findings) -> None:
    """Report every linear whose format contradicts a config or its related linears."""
    stated = statements(checkpoint.quantisation, inventory.config)
    if stated:
        _report_promises(stated, inventory, findings)
        _report_block_sizes(stated, checkpoint, inventory, findings)
    else:
        _report_silence(checkpoint, inventory, findings)
        _report_input_scales(inventory, findings)
    for statement in stated:
        for words in statement.unread:
            findings.add(
                rules.UNREAD_STATEMENT,
                NOWHERE,
                f"Not judged: {shown(words)}.",
                "Nothing, if the tool that wrote it is known to be right.",
            )
    _report_partners(inventory, findings)
    _report_experts(inventory, findings)


def _report_promises(
    stated: tuple[Statement, ...], inventory: Inventory, findings: Findings
) -> None:
    kept: list[str] = []
    siblings = _rows_with_input_scales(inventory)
    for found in inventory.linears:
        path = inventory.path_of(found)
        promises = [each.promise(found.parameter, path) for each in stated]
        engine = promises[0]
        format_found = family_of(found.weight or "")
        if engine.format not in (None, format_found):
            _report_contradiction(found, engine, inventory, findings)
        if any(None is not each.format != engine.format is not None for each in promises[1:]):
            findings.add(
                rules.TWO_STATEMENTS,
                FindingLocation(None, found.module),
                f"{shown(found.module)}: {engine.format} by {shown(engine.told)},"
                f" {promises[1].format} by {shown(promises[1].told)}; the file has {found.weight}.",
                "Make the two files say what the shards hold.",
            )
        # `ignore` names modules that the quantiser left alone, which need not be BF16.
        if stated[0].keeps_source and engine.told.endswith(" alone") and format_found == FP8_BLOCKS:
            kept.append(found.module)
        if found.weight == NVFP4 and not found.check.has_input_scale:
            _judge_input_scale(found, engine, inventory, siblings, findings)
    if kept:
        findings.add(
            rules.IGNORE_KEEPS_SOURCE,
            NOWHERE,
            f"{len(kept)} modules that {stated[0].file} ignores are FP8, such as"
            f" {shown(kept[0])}: left alone, not unquantised.",
            "See that the engine does not take `ignore` for BF16.",
            modules=len(kept),
        )


def _report_contradiction(
    found: Found, promise: Promise, inventory: Inventory, findings: Findings
) -> None:
    findings.add(
        rules.CONTRADICTS,
        FindingLocation(None, found.module, inventory.layer_of(found.parameter)),
        f"{shown(found.module)} is {found.weight}, promised {promise.format}"
        f" ({shown(promise.told)}).",
        "Correct the quantisation config, or convert the module to what it promises.",
        found=found.weight,
        promised=promise.format,
        told=shown(promise.told),
    )


def _rows_with_input_scales(inventory: Inventory) -> set[str]:
    return {each.parameter.row.name for each in inventory.found if each.check.has_input_scale}


def _report_input_scales(inventory: Inventory, findings: Findings) -> None:
    """Report missing input scales by comparison with siblings, where no config says anything."""
    siblings = _rows_with_input_scales(inventory)
    for found in inventory.linears:
        if found.weight == NVFP4 and not found.check.has_input_scale:
            _judge_input_scale(found, None, inventory, siblings, findings)


def _judge_input_scale(
    found: Found,
    promise: Promise | None,
    inventory: Inventory,
    siblings: set[str],
    findings: Findings,
) -> None:
    promised = promise is not None and promise.activations and promise.format == NVFP4
    if not promised and found.parameter.row.name not in siblings:
        return
    why = f"{shown(promise.told)} quantises activations" if promised and promise else "others have"
    findings.add(
        rules.INPUT_SCALE_MISSING,
        FindingLocation(None, found.module, inventory.layer_of(found.parameter)),
        f"{shown(found.module)} is NVFP4 without input_scale; {why}.",
        "Calibrate again, or give it the largest input_scale of its siblings on purpose.",
    )


def _report_silence(checkpoint: Checkpoint, inventory: Inventory, findings: Findings) -> None:
    """Report quantised weights that no config mentions."""
    counts = Counter(each.weight for each in inventory.linears if each.weight != BF16)
    # inference/config.json of the official code says it by `dtype` alone.
    if not counts or checkpoint.config.get("dtype") == "fp8":
        return
    findings.add(
        rules.NO_STATEMENT,
        NOWHERE,
        "Neither config.json nor hf_quant_config.json says that weights are quantised; they are:"
        f" {', '.join(f'{count} {weight}' for weight, count in counts.most_common())}.",
        "Add quantization_config to config.json.",
        found=dict(counts),
    )


def _report_block_sizes(
    stated: tuple[Statement, ...], checkpoint: Checkpoint, inventory: Inventory, findings: Findings
) -> None:
    examples: dict[str, Found] = {}
    for found in inventory.linears:
        examples.setdefault(family_of(found.weight or ""), found)
    claims = [block for statement in stated for block in statement.blocks]
    for name, sizes in _BLOCKS.items():
        said = [claim for claim in claims if claim.format == name]
        if name not in examples or all(claim.sizes == sizes for claim in said):
            continue
        module = examples[name].module
        shapes = {
            str(part): list(entry.shape)
            for part, entry in checkpoint.table.parts(module).items()
            if entry.shape
        }
        # An engine reads the first statement; the others are for people and for ModelOpt's tools.
        builds = any(
            each.builds and each.sizes != sizes for each in said if each in stated[0].blocks
        )
        findings.add(
            rules.BLOCK_SIZE_BUILT if builds else rules.BLOCK_SIZE,
            FindingLocation(None, module),
            f"{name} has blocks of {_told(sizes)} by the shapes of {shown(module)}, but"
            f" {'; '.join(shown(claim.told) for claim in said)}.",
            "Correct the config; an engine that believes it allocates other scales than are stored."
            if builds
            else "Correct the config; readers that believe it cut the scales wrongly.",
            shown=list(sizes),
            stated={claim.told: list(claim.sizes) for claim in said},
            shapes=shapes,
        )


def _told(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))


def _report_partners(inventory: Inventory, findings: Findings) -> None:
    for group in partners(inventory):
        formats = {each.parameter.name: each.weight for each in group.members}
        if len(set(formats.values())) > 1:
            first = group.members[0]
            findings.add(
                rules.PARTNERS_FORMAT if group.always else rules.PARTNERS_FORMAT_FUSABLE,
                FindingLocation(None, first.module, inventory.layer_of(first.parameter)),
                "Partners differ in format: "
                + ", ".join(f"{name} is {weight}" for name, weight in formats.items())
                + ".",
                "Quantise both or neither; an engine keeps them in one tensor.",
                formats=formats,
            )


def _report_experts(inventory: Inventory, findings: Findings) -> None:
    """Report experts of one layer that differ, and drafter experts unlike the main model's."""
    rows: dict[tuple[Block, str], Counter[str]] = defaultdict(Counter)
    for each in inventory.linears:
        block = each.parameter.block
        if each.parameter.expert is not None and block is not None:
            rows[block, each.parameter.row.name][each.weight or ""] += 1
    scopes: dict[bool, set[str]] = {False: set(), True: set()}
    for (block, row), counts in rows.items():
        scopes[block.is_drafter].update(counts)
        if len(counts) > 1:
            told = ", ".join(f"{count} {weight}" for weight, count in counts.most_common())
            layer = block.index + (inventory.config.num_hidden_layers if block.is_drafter else 0)
            findings.add(
                rules.PARTNERS_FORMAT,
                FindingLocation(None, f"{block.prefix}.{row}".replace("{e}", "*"), layer),
                f"Experts of {block.prefix} differ in format: {told}.",
                "Quantise all or none; an engine keeps them in one stack.",
                formats=dict(counts),
            )
    main, drafter = scopes[False], scopes[True]
    if main and drafter and main != drafter:
        findings.add(
            rules.DRAFTER_EXPERTS,
            NOWHERE,
            f"The drafter's experts are {' and '.join(sorted(drafter))}, the main model's"
            f" {' and '.join(sorted(main))}: an engine that builds all experts by one format builds"
            " the drafter's for bytes that are not there.",
            "See that the engine dispatches the drafter by itself, or serve without it.",
            drafter=sorted(drafter),
            main=sorted(main),
        )
