"""Audit a checkpoint's structure: every tensor that the config implies, in its shape and format.

`audit_structure` reads headers and configs, and of the data only scalar scales and a few rows of
indexers. It reports problems of the files, then compares the config's parameters with the stored
modules: missing, unexpected, wrong. Problems are returned as findings, never raised. Modules of an
unknown model are checked one by one. Needs no torch.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from degarble.harness.base.errors import Refused
from degarble.harness.checkpoint.audit import rules
from degarble.harness.checkpoint.audit import rules as rules_files
from degarble.harness.checkpoint.audit.findings import NOWHERE, Finding, FindingLocation, Findings
from degarble.harness.checkpoint.audit.structure.counts import report_counts
from degarble.harness.checkpoint.audit.structure.formats import report_formats
from degarble.harness.checkpoint.audit.structure.indexer import report_indexer_bytes
from degarble.harness.checkpoint.audit.structure.inventory import Inventory, take_inventory
from degarble.harness.checkpoint.audit.structure.lost import Lost, lost_modules, without_lost
from degarble.harness.checkpoint.audit.structure.names import report_unread_names
from degarble.harness.checkpoint.audit.structure.scalars import report_scalars
from degarble.harness.checkpoint.read.types import ProblemKind, shown
from degarble.harness.checkpoint.view.modules import has_coarse_scales, suffix_of
from degarble.harness.checkpoint.view.quantisation_configs import OTHER_METHODS
from degarble.harness.model.config.config import V4Config
from degarble.harness.model.config.json_file import ARCHITECTURES
from degarble.harness.model.layouts import (
    FUSED_COMPRESSOR,
    Spelling,
    with_fused_compressors,
)
from degarble.harness.model.parameters import parameter_named, parameters
from degarble.harness.model.storage import Part

if TYPE_CHECKING:
    from collections.abc import Iterable

    from degarble.harness.checkpoint.audit.structure.module_checks import Issue
    from degarble.harness.checkpoint.view.modules import ModuleTable
    from degarble.harness.checkpoint.view.view import Checkpoint, LogicalNames
    from degarble.harness.model.parameters import Parameter

_INDEXER_COMPRESSOR = "attn.indexer.compressor."
_KNOWN_EXTRAS = re.compile(r"\.(rotary_emb\.inv_freq|[kvq]_scale|[kv]_proj\.output_scale)$")


def is_known_extra(module: str) -> bool:
    """Return whether a module is an engine's buffer and not a parameter of a model."""
    return _KNOWN_EXTRAS.search(module) is not None


def audit_structure(checkpoint: Checkpoint) -> list[Finding]:
    """Return the structure findings; open the checkpoint by survey(), as open() may raise."""
    findings = Findings()
    lost = lost_modules(checkpoint)
    _report_problems(checkpoint, lost, findings)
    names = checkpoint.names
    report_counts(checkpoint, findings)
    formats = _report_scale_names(checkpoint.table, findings)
    _report_method(checkpoint, formats, findings)
    if checkpoint.model is None:
        _report_no_model(checkpoint, findings)
        _report_forms(checkpoint.table, checkpoint.table.suffixes, findings)
    elif names is None:
        _report_spelling(checkpoint, lost, findings)
    else:
        whole = take_inventory(_as_fused(names))
        inventory = without_lost(whole, lost)
        _report_missing(inventory, findings)
        _report_issues(checkpoint.table, inventory, findings)
        _report_unexpected(checkpoint.table, whole, findings)
        _report_engine_form(inventory, findings)
        report_unread_names(inventory, findings)
        report_indexer_bytes(checkpoint, inventory, findings)
        report_formats(checkpoint, inventory, findings)
        report_scalars(checkpoint, inventory, findings)
    return findings.sorted()


def _report_problems(checkpoint: Checkpoint, lost: Lost, findings: Findings) -> None:
    for problem in checkpoint.problems.found:
        gone = lost.tensors.get(problem.file, 0)
        more = f" The index places {gone:,} tensors there; none of them is judged." if gone else ""
        findings.add(
            rules_files.BY_KIND[problem.kind],
            FindingLocation(problem.tensor),
            f"{shown(problem.file)}: {problem.kind}: {problem.error.shown_value}, expected"
            f" {problem.error.expectation}.{more}",
            problem.error.remedy,
            file=shown(problem.file),
            place=problem.error.name,
            found_in_all=checkpoint.problems.counts[problem.kind],
        )


def _report_no_model(checkpoint: Checkpoint, findings: Findings) -> None:
    unread = checkpoint.problems.counts[ProblemKind.UNREADABLE_CONFIG]
    if checkpoint.is_folder and not checkpoint.config and not unread:
        findings.add(
            rules.NO_CONFIG,
            NOWHERE,
            "There is no config.json: what belongs into the checkpoint cannot be known, and modules"
            " are judged one by one.",
            "Put the model's config.json beside the shards, and audit again.",
        )
        return
    if unread:
        return  # its finding says what is wrong with it
    family = str(checkpoint.config.get("model_type"))
    findings.add(
        rules.UNKNOWN_MODEL,
        NOWHERE,
        f"The parameters of a {shown(family)} model are not known here, so modules are judged one"
        " by one.",
        f"Nothing; those of {' and '.join(ARCHITECTURES)} are judged as a whole.",
    )


def _report_spelling(checkpoint: Checkpoint, lost: Lost, findings: Findings) -> None:
    assert checkpoint.model is not None, "asked for a known model only"
    _report_forms(checkpoint.table, set(checkpoint.table.suffixes) - lost.modules, findings)
    if lost.modules:
        return  # too few names are left to tell a spelling by, and the shards have their finding
    wanted = [each.name for each in parameters(checkpoint.model)[:5]]
    there = sorted(checkpoint.entries)[:5]
    findings.add(
        rules.UNKNOWN_SPELLING,
        NOWHERE,
        f"The names of the {len(checkpoint.entries)} tensors fit no known spelling of the"
        f" {checkpoint.model.family} model in config.json.",
        "Check that config and shards belong together, or rename the tensors.",
        wanted=wanted,
        there=[shown(name) for name in there],
    )


def _report_forms(table: ModuleTable, modules: Iterable[str], findings: Findings) -> None:
    """Report modules that are not a weight in a known format, whatever the model."""
    for module in modules:
        try:
            table.form(module)
        except Refused as error:
            if _is_coarse(table, module):
                findings.add(
                    rules.COARSE_SCALES,
                    FindingLocation(None, module),
                    f"{shown(module)} is FP8 with one scale a tensor, or a row: not judged.",
                    "Nothing, if the engine reads this form.",
                )
                continue
            findings.add(
                rules.UNREADABLE_MODULE,
                FindingLocation(None, module),
                f"{shown(module)} is {error.shown_value}, expected {error.expectation}.",
                error.remedy,
            )


def _report_method(checkpoint: Checkpoint, formats: Iterable[str], findings: Findings) -> None:
    """Report a stated quantisation method whose codes are not among those stored."""
    method = str(checkpoint.quantisation.get("config.json", {}).get("quant_method"))
    stored = sorted(formats)
    if method in OTHER_METHODS and stored:
        findings.add(
            rules.CONTRADICTS,
            NOWHERE,
            f"config.json states quant_method {method}, whose codes are others; modules are"
            f" {', '.join(stored)}.",
            "State the method of the tool that wrote them.",
            stated=method,
            found=stored,
        )


def _report_scale_names(table: ModuleTable, findings: Findings) -> Iterable[str]:
    """Report modules whose block scales have another suffix than most of their format.

    Return the names of the formats present.
    """
    named: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for module, bits in table.suffixes.items():
        if not bits:
            continue
        try:
            form = table.form(module)
        except Refused:
            continue  # reported on its own
        if form.format is not None:
            suffix = suffix_of(form.parts[Part.BLOCK_SCALE])
            named[form.format.name][suffix].append(module)
    for fmt, by_suffix in named.items():
        usual = max(by_suffix, key=lambda each: len(by_suffix[each]))
        for suffix, modules in by_suffix.items():
            for module in modules if suffix != usual else ():
                findings.add(
                    rules.SCALE_NAME,
                    FindingLocation(module + suffix, module),
                    f"{shown(module)} has its block scales under {suffix}, the other"
                    f" {len(by_suffix[usual])} {fmt} modules have {usual}.",
                    f"Rename it to {shown(module)}{usual}.",
                    wanted=usual,
                )
    return named.keys()


def _is_coarse(table: ModuleTable, module: str) -> bool:
    try:
        return has_coarse_scales(table.parts(module))
    except Refused:
        return False


def _report_missing(inventory: Inventory, findings: Findings) -> None:
    """Report absent parameters: by block, by expert, or one by one."""
    there = {each.parameter.block for each in inventory.found}
    by_expert: dict[tuple[object, int], list[tuple[Parameter, str]]] = defaultdict(list)
    blocks = set()
    for parameter, module in inventory.missing:
        block = parameter.block
        if block is not None and block not in there:
            if block not in blocks:
                blocks.add(block)
                _report_block(inventory, parameter, findings)
        elif parameter.expert is not None:
            by_expert[block, parameter.expert].append((parameter, module))
        else:
            _report_parameter(inventory, parameter, module, findings)
    rows = sum("{e}" in row for row in {each.row.name for each in parameters(inventory.config)})
    for absent in by_expert.values():
        parameter, module = absent[0]
        # An expert that lacks some parameters but not all is reported parameter by parameter.
        if len(absent) < rows:
            for each in absent:
                _report_parameter(inventory, *each, findings)
            continue
        expert = parameter.expert
        findings.add(
            rules.MISSING_EXPERT,
            FindingLocation(None, module.rpartition(".")[0], inventory.layer_of(parameter)),
            f"Expert {expert} of {parameter.block and parameter.block.prefix} has no tensors; the"
            f" config counts {inventory.config.n_routed_experts} experts.",
            "Look for a missing shard, or for experts that were pruned behind the config's back.",
        )


def _report_block(inventory: Inventory, parameter: Parameter, findings: Findings) -> None:
    block = parameter.block
    assert block is not None, "parameters outside blocks are reported one by one"
    drafts = block.is_drafter
    findings.add(
        rules.DRAFTER_ABSENT if drafts else rules.MISSING_BLOCK,
        FindingLocation(None, block.prefix, inventory.layer_of(parameter)),
        f"{block.prefix} has no tensors, the config counts"
        f" {inventory.config.num_hidden_layers} layers and {inventory.config.drafters} drafters.",
        "Nothing, unless the drafter is wanted." if drafts else "Look for a missing shard.",
    )


def _report_parameter(
    inventory: Inventory, parameter: Parameter, module: str, findings: Findings
) -> None:
    findings.add(
        rules.MISSING_PARAMETER,
        FindingLocation(None, module, inventory.layer_of(parameter)),
        f"{module} is missing: {parameter.name}, {list(parameter.shape)}, read by"
        f" {parameter.component}.",
        "Look for it under another name, or in a shard that is missing.",
        parameter=parameter.name,
        shape=list(parameter.shape),
    )


def _report_issues(table: ModuleTable, inventory: Inventory, findings: Findings) -> None:
    told = set()
    for parameter, module, check in inventory.found:
        if not check.issues or module in told:
            continue
        if module in inventory.fused:
            told.add(module)
        parts = {} if module in inventory.fused else table.parts(module)
        for issue in check.issues:
            name = module if issue.part is None else parts[issue.part].name
            rule, extra = issue.rule, ""
            if _is_main_compressors(inventory, parameter, issue):
                rule, extra = rules.INDEXER_PREFIX, ", which is the main compressor's shape"
            # Whole checkpoints are narrowed or in an engine's form: without a layer all these
            # merge.
            layer = (
                None
                if rule in (rules.NARROWED, rules.ENGINE_FORM)
                else inventory.layer_of(parameter)
            )
            findings.add(
                rule,
                FindingLocation(None if issue.part is None else name, module, layer),
                f"{shown(name)} {issue.told}{extra}.",
                issue.remedy,
                **issue.evidence,
            )


def _is_main_compressors(inventory: Inventory, parameter: Parameter, issue: Issue) -> bool:
    """Return whether an indexer's tensor has the main compressor's expected shape."""
    name = parameter.row.name
    if issue.rule is not rules.WRONG_SHAPE or not name.startswith(_INDEXER_COMPRESSOR):
        return False
    main = parameter.name.replace(".indexer.", ".")
    return list(parameter_named(inventory.config, main).shape) == issue.evidence["shape"]


def _as_fused(names: LogicalNames) -> LogicalNames:
    """Return names under the layout with fused compressors if a module has such a name."""
    is_v4 = isinstance(names.config, V4Config) and not names.layout.fusions
    if is_v4 and any(module.endswith(FUSED_COMPRESSOR) for module in names.table.suffixes):
        return replace(names, layout=with_fused_compressors(names.layout))
    return names


def _report_engine_form(inventory: Inventory, findings: Findings) -> None:
    fused = [each for each in inventory.fused if each.endswith(FUSED_COMPRESSOR)]
    if fused and inventory.layout.spelling is not Spelling.VLLM:
        findings.add(
            rules.ENGINE_FORM,
            NOWHERE,
            f"{len(fused)} modules such as {shown(fused[0])} hold two projections of a compressor,"
            " as vLLM's memory does; they are judged as that.",
            "Nothing, if an engine reads this form; others find no compressors.",
            modules=len(fused),
        )


def _report_unexpected(table: ModuleTable, inventory: Inventory, findings: Findings) -> None:
    config = inventory.config
    for module in table.suffixes:
        if module in inventory.modules:
            continue
        entry = next(iter(table.parts(module).values()))
        extra = _KNOWN_EXTRAS.search(module)
        findings.add(
            rules.KNOWN_EXTRA if extra else rules.UNEXPECTED,
            FindingLocation(entry.name, module),
            f"{shown(entry.name)}, {entry.dtype} {list(entry.shape)}, belongs to no parameter of a"
            f" {config.family} model with {config.num_hidden_layers} layers and"
            f" {config.n_routed_experts} experts.",
            "Nothing; engines make it anew."
            if extra
            else "Check its name: engines skip in silence what they do not know.",
            dtype=entry.dtype,
            shape=list(entry.shape),
        )
