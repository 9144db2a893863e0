"""Audit a checkpoint's structure: every tensor that the config implies, in its shape and format.

`audit_structure` reads headers and configs, and of the data only scalar scales and a few rows of
indexers; it needs no torch. Problems are returned as findings, never raised.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.base.errors import Refused
from degarble.harness.checkpoint.audit import rules
from degarble.harness.checkpoint.audit import rules as rules_files
from degarble.harness.checkpoint.audit.findings import NOWHERE, Finding, FindingLocation, Findings
from degarble.harness.checkpoint.audit.structure.formats import report_formats, report_scalars
from degarble.harness.checkpoint.audit.structure.integers import report_stated_integers
from degarble.harness.checkpoint.audit.structure.inventory import Inventory, take_inventory
from degarble.harness.checkpoint.read.types import ProblemKind, shown
from degarble.harness.checkpoint.view.consumers import LOADERS
from degarble.harness.checkpoint.view.modules import suffix_of
from degarble.harness.checkpoint.view.quantisation_configs import OTHER_METHODS
from degarble.harness.model.family import family_of, model_types
from degarble.harness.model.layouts import FUSED_COMPRESSOR, Spelling
from degarble.harness.model.parameters import parameter_named, parameters, routed_experts
from degarble.harness.model.tensors import PartKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from degarble.harness.checkpoint.audit.structure.inventory import ModuleIssue, StoredParameter
    from degarble.harness.checkpoint.read.types import TensorEntry
    from degarble.harness.checkpoint.view.modules import ModuleTable
    from degarble.harness.checkpoint.view.view import Checkpoint, LogicalNames
    from degarble.harness.model.layouts import Layout
    from degarble.harness.model.parameters import Parameter


# --------------------------------------------------------------------------------------------------
# Modules in shards that cannot be read, so that none is also reported as missing. The index says
# which shard holds a tensor; the unreadable shard has a finding of its own. Without an index
# nothing is known to be lost, and each absent parameter is reported by name.


class LostModules(NamedTuple):
    """Modules with a tensor in an unreadable shard, and the tensors of each such shard."""

    modules: frozenset[str]
    tensors: Mapping[str, int]


def lost_modules(checkpoint: Checkpoint) -> LostModules:
    """Return what the index places in shards that were not read."""
    index = checkpoint.index
    read = {shard.file.name for shard in checkpoint.shards}
    modules: set[str] = set()
    tensors: dict[str, int] = {}
    for name, shard in (index.weight_map if index is not None else {}).items():
        if shard in read:
            continue
        tensors[shard] = tensors.get(shard, 0) + 1
        # A parameter is a tensor of its own, or a module whose parts end in a word of their own.
        modules.update((name, name.rpartition(".")[0], name.removesuffix("_weight")))
    return LostModules(frozenset(modules), tensors)


def without_lost(inventory: Inventory, lost: LostModules) -> Inventory:
    """Return the inventory without the lost modules."""
    if not lost.modules:
        return inventory
    return replace(
        inventory,
        stored=[
            parameter for parameter in inventory.stored if parameter.module not in lost.modules
        ],
        missing=[each for each in inventory.missing if each[1] not in lost.modules],
        fused={name: all_ for name, all_ in inventory.fused.items() if name not in lost.modules},
    )


# --------------------------------------------------------------------------------------------------
# Parameters whose names no known loader reads. A layout is compared as a whole: if some loader
# knows the checkpoint's spelling there is no finding here, and absent or surplus tensors are
# reported as missing or unexpected.

_EXAMPLES = 8


def report_unread_names(inventory: Inventory, findings: Findings) -> None:
    """Report all parameters that no known loader reads as one finding, by their spelling."""
    config = inventory.config
    if any(loader.knows(inventory.layout, config) for loader in LOADERS):
        return
    known = [layout for loader in LOADERS for layout in loader.layouts(config)]
    # Of the nearest one: names that several loaders know between them are read by none.
    unread = min((_unread(inventory, layout) for layout in known), key=len)
    if not unread:
        return
    formats = {linear.weight for linear in inventory.linears}
    # A silent loader leaves unknown names at random instead of failing.
    silent = [
        consumer for consumer in LOADERS if consumer.is_silent and formats <= consumer.formats
    ]
    first, count = unread[0].module, len({parameter.module for parameter in unread})
    findings.add(
        rules.NAME_UNREAD if silent else rules.NAME_UNREAD_QUANTISED,
        FindingLocation(None, first),
        f"No known loader reads {shown(first)}"
        + (f" and {count - 1} modules more" if count > 1 else "")
        + (f"; {silent[0].name} leaves them at random." if silent else "."),
        "Write the names of the release: `degarble convert CKPT OUT --to bf16 --prove` does, for"
        " quantised sources; else rename them.",
        modules=count,
        loaders=[consumer.what for consumer in LOADERS if consumer.layouts(config)],
        examples=[shown(parameter.module) for parameter in unread[:_EXAMPLES]],
    )


def _unread(inventory: Inventory, layout: Layout) -> list[StoredParameter]:
    """Return the parameters whose module differs from the one in a layout."""
    config = inventory.config
    # A fused row lies in its fusion's tensor, not under its own path.
    fused = {row: fusion.target for fusion in layout.fusions for row in fusion.members}
    return [
        parameter
        for parameter in inventory.stored
        if parameter.module
        != layout.path_of(parameter.parameter, config, fused.get(parameter.parameter.row.name, ""))
    ]


# --------------------------------------------------------------------------------------------------
# Layers and experts that the config counts, and those in the tensors' names. An engine never runs a
# layer beyond the config's count. Drafter layers are numbered after the decoder's; they are
# recognised by tensors that only drafters have.

_LAYER = re.compile(r"^(.*?\b)layers\.(\d{1,6})\.")
_EXPERT = re.compile(r"\bexperts\.(\d{1,6})\.")
# Prefixes of stacks that num_hidden_layers does not count.
_OTHER_TOWERS = re.compile(r"vision|visual|audio|encoder|decoder|tower|mtp|draft|perceiver")
# Modules that only drafter layers have (DeepSeek's multi-token prediction).
_DRAFTER = re.compile(r"\.(eh_proj|e_proj|h_proj|enorm|hnorm|shared_head|embed_tokens|mtp\w*)\.")
# Spellings of the number of layers, and of experts, in configs of different families.
_LAYERS = ("num_hidden_layers", "n_layers", "num_layers", "n_layer")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Where the config of a multimodal model nests that of its language model.
_TEXT = ("text_config", "llm_config", "language_config")


def report_counts(checkpoint: Checkpoint, findings: Findings) -> None:
    """Report layers beyond the config's count, and in unknown families absent layers too."""
    config = next(
        (checkpoint.config[key] for key in _TEXT if isinstance(checkpoint.config.get(key), dict)),
        checkpoint.config,
    )
    stacks: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in checkpoint.entries:
        found = _LAYER.match(name)
        if found and not _OTHER_TOWERS.search(found[1]):
            stacks[found[1]][int(found[2])].append(name)
    if not stacks:
        return
    # The decoder is the stack with the most tensors.
    prefix = max(stacks, key=lambda each: sum(map(len, stacks[each].values())))
    layers, count = stacks[prefix], _count(config, _LAYERS)
    if count is not None:
        _report_uncounted(layers, count, prefix, findings)
    if checkpoint.model is None and not checkpoint.problems.found:
        _report_absent(layers, count, prefix, findings)
        _report_experts(layers, _count(config, _EXPERTS), findings)


def _count(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    # Not isinstance: a JSON `true` would count as 1.
    found = next((config[key] for key in keys if type(config.get(key)) is int), None)
    return found if found is None or found > 0 else None


def _report_uncounted(
    layers: Mapping[int, list[str]], count: int, prefix: str, findings: Findings
) -> None:
    for number in sorted(layers):
        names = layers[number]
        if number < count or any(_DRAFTER.search(name) for name in names):
            continue
        findings.add(
            rules.UNCOUNTED,
            FindingLocation(names[0], f"{prefix}layers.{number}", None),
            f"{shown(prefix)}layers.{number} has {len(names)} tensors, and config.json counts"
            f" {count} layers: engines leave it out.",
            "Correct num_hidden_layers, or find out why the layer is there.",
            counted=count,
            tensors=len(names),
        )


def _report_absent(
    layers: Mapping[int, list[str]], count: int | None, prefix: str, findings: Findings
) -> None:
    for number in range(count or max(layers) + 1):
        if number not in layers:
            findings.add(
                rules.MISSING_BLOCK,
                FindingLocation(None, f"{prefix}layers.{number}", number),
                f"{shown(prefix)}layers.{number} has no tensors, the config counts {count} layers.",
                "Look for a missing shard.",
            )


def _report_experts(layers: Mapping[int, list[str]], count: int | None, findings: Findings) -> None:
    for number, names in layers.items():
        there = {int(found[1]): name for name in names if (found := _EXPERT.search(name))}
        if not there or count is None:
            continue
        for expert in sorted(there.keys() - set(range(count))):
            findings.add(
                rules.UNCOUNTED,
                FindingLocation(there[expert], None, number),
                f"{shown(there[expert])} is of expert {expert}, the config counts {count}.",
                "Correct the config's number of experts, or find out why it is there.",
                counted=count,
            )
        front = next(iter(there.values())).partition("experts.")[0]
        for expert in sorted(set(range(count)) - there.keys()):
            findings.add(
                rules.MISSING_EXPERT,
                FindingLocation(None, f"{front}experts.{expert}", number),
                f"Expert {expert} of {shown(front)}experts has no tensors; the config counts"
                f" {count} experts.",
                "Look for a missing shard, or for experts that were pruned.",
            )


# --------------------------------------------------------------------------------------------------
# Indexers whose compressor holds the bytes of the main compressor. Shapes cannot show this where
# the two compressors have equal shapes, or where the indexer's rows are the main compressor's first
# rows, so bytes are compared. A few samples come first: a healthy checkpoint costs a few pages a
# layer. Equal samples that are constant (zeros of a sparse file) prove nothing.

# Bytes of a sample, and bytes that the full comparison takes at a time.
_SAMPLE = 256
_STEP = 1 << 20


def report_indexer_bytes(checkpoint: Checkpoint, inventory: Inventory, findings: Findings) -> None:
    """Report indexers whose compressor is a copy of the main one."""
    for name, parameter in inventory.by_name.items():
        if not name.endswith((".attn.indexer.compressor.wkv", ".attn.indexer.compressor.wgate")):
            continue
        main = inventory.by_name.get(name.replace(".indexer.", "."))
        if main is None or parameter.module in inventory.fused or main.module in inventory.fused:
            continue
        pair = _codes(checkpoint, parameter), _codes(checkpoint, main)
        if _same_rows(checkpoint, *pair):
            findings.add(
                rules.INDEXER_PREFIX,
                FindingLocation(
                    pair[0].name, parameter.module, inventory.layer_of(parameter.parameter)
                ),
                f"{shown(pair[0].name)} has the bytes of {shown(pair[1].name)}.",
                "Read the indexer's compressor from its own prefix and write it again.",
                bytes_compared=min(pair[0].nbytes, pair[1].nbytes),
                copied_from=shown(pair[1].name),
            )


def _codes(checkpoint: Checkpoint, parameter: StoredParameter) -> TensorEntry:
    return checkpoint.table.parts(parameter.module)[PartKind.CODES]


def _same_rows(checkpoint: Checkpoint, one: TensorEntry, other: TensorEntry) -> bool:
    """Return whether the shorter tensor is a prefix of the longer one; constant samples: False."""
    if one.dtype != other.dtype or one.shape[1:] != other.shape[1:]:
        return False
    first, second = checkpoint.raw(one.name), checkpoint.raw(other.name)
    length = min(len(first), len(second))
    differs = False
    for begin in (0, length // 2, max(length - _SAMPLE, 0)):
        sample = bytes(first[begin : begin + _SAMPLE])
        if sample != bytes(second[begin : begin + len(sample)]):
            return False
        differs = differs or len(set(sample)) > 1
    # Constant samples (holes of a sparse file) prove nothing.
    if not differs:
        return False
    same = all(
        first[begin : min(begin + _STEP, length)] == second[begin : min(begin + _STEP, length)]
        for begin in range(0, length, _STEP)
    )
    checkpoint.release(one.name)
    checkpoint.release(other.name)
    return same


# --------------------------------------------------------------------------------------------------
# The audit. It reports problems of the files, then compares the config's parameters with the stored
# modules: missing, unexpected, wrong. Modules of an unknown model are checked one by one.

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
    report_stated_integers(checkpoint, findings)
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


def _report_problems(checkpoint: Checkpoint, lost: LostModules, findings: Findings) -> None:
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
            "Put the model's config.json into the folder of the shards, and audit again.",
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
        f"Nothing; those of {' and '.join(model_types())} are judged as a whole.",
    )


def _report_spelling(checkpoint: Checkpoint, lost: LostModules, findings: Findings) -> None:
    assert checkpoint.model is not None, "judged for a known model only"
    _report_forms(checkpoint.table, set(checkpoint.table.suffixes) - lost.modules, findings)
    if lost.modules:
        return  # too few names are left to tell a spelling by, and the shards have their finding
    wanted = [parameter.name for parameter in parameters(checkpoint.model)[:5]]
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
        if table.is_of_stack(module):
            continue
        try:
            table.form(module)
        except Refused as error:
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
            suffix = suffix_of(form.parts[PartKind.BLOCK_SCALE])
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


def _report_missing(inventory: Inventory, findings: Findings) -> None:
    """Report absent parameters: by block, by expert, or one by one."""
    there = {stored_parameter.parameter.block for stored_parameter in inventory.stored}
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
            f" config counts {routed_experts(inventory.config)} experts.",
            "Look for a missing shard, or for pruned experts that the config still counts.",
        )


def _report_block(inventory: Inventory, parameter: Parameter, findings: Findings) -> None:
    block = parameter.block
    assert block is not None, "parameters outside blocks are reported one by one"
    drafts = block.is_drafter
    findings.add(
        rules.DRAFTER_ABSENT if drafts else rules.MISSING_BLOCK,
        FindingLocation(None, block.prefix, inventory.layer_of(parameter)),
        f"{block.prefix} has no tensors, the config counts"
        f" {len(inventory.config.layers)} layers and {inventory.config.drafters} drafters.",
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
    for parameter, module, check in inventory.stored:
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
                f"{shown(name)} {issue.text}{extra}.",
                issue.remedy,
                **issue.evidence,
            )


def _is_main_compressors(inventory: Inventory, parameter: Parameter, issue: ModuleIssue) -> bool:
    """Return whether an indexer's tensor has the main compressor's expected shape."""
    name = parameter.row.name
    if issue.rule is not rules.WRONG_SHAPE or not name.startswith(_INDEXER_COMPRESSOR):
        return False
    main = parameter.name.replace(".indexer.", ".")
    return list(parameter_named(inventory.config, main).shape) == issue.evidence["shape"]


def _as_fused(names: LogicalNames) -> LogicalNames:
    """Return names under the layout with fused compressors if a module has such a name."""
    fused = family_of(names.config).with_engine_fusions(names.layout)
    if fused is None or names.layout.fusions:
        return names
    is_used = any(module.endswith(FUSED_COMPRESSOR) for module in names.table.suffixes)
    return replace(names, layout=fused) if is_used else names


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
            f" {config.family} model with {len(config.layers)} layers and"
            f" {routed_experts(config)} experts.",
            "Nothing; engines make it anew."
            if extra
            else "Check its name: engines skip in silence what they do not know.",
            dtype=entry.dtype,
            shape=list(entry.shape),
        )
