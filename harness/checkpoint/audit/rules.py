"""Define audit rules, and those that need no tensor's values: files, structure, names, loading.

The level belongs to the rule, never to the place where it is broken: whoever knows the rule knows
the exit status. findings.py joins these rules and those of value_rules.py into one table, which
docs/audit.md lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

from degarble.harness.checkpoint.read.types import ProblemKind

if TYPE_CHECKING:
    from collections.abc import Mapping


class Level(StrEnum):
    """Severity of a broken rule."""

    ERROR = "error"  # some engine computes wrong numbers from it, or cannot load it
    WARNING = "warning"  # right only if the reader knows; or a statement that is not so
    NOTE = "note"  # worth knowing; nothing is wrong

    @property
    def weight(self) -> int:
        """Rank of the level, the worst one first."""
        return list(Level).index(self)


@dataclass(frozen=True)
class AuditRule:
    """A statement that must hold. `source`: who says so, or what happened where it did not hold."""

    id: str
    level: Level
    statement: str
    source: str


def rules_in(names: Mapping[str, object]) -> tuple[AuditRule, ...]:
    """Return every rule in a module's globals(), so that a table cannot miss one."""
    return tuple(name for name in names.values() if isinstance(name, AuditRule))


# --------------------------------------------------------------------------------------------------
# Files of a checkpoint: shards, index and configs. There is one rule for each kind of problem that
# view.Checkpoint.survey reports: fatal kinds are errors, tolerated kinds are warnings.

_SAFETENSORS_FORMAT = "safetensors 0.8, format and tensor.rs"
_MISSING_SHARD = "fault B058: a missing shard loads without error"
_STATEMENTS = {
    ProblemKind.UNFINISHED: (
        "unfinished",
        "nothing writes to the checkpoint any more: the writer's mark is gone",
        "harness/checkpoint/write/manifest.py",
    ),
    ProblemKind.UNREADABLE_SHARD: (
        "unreadable_shard",
        "every shard is there, is a regular file, and keeps to the safetensors format",
        _SAFETENSORS_FORMAT,
    ),
    ProblemKind.UNREADABLE_INDEX: (
        "unreadable_index",
        "the index can be read",
        _SAFETENSORS_FORMAT,
    ),
    ProblemKind.UNREADABLE_CONFIG: (
        "unreadable_config",
        "config.json and hf_quant_config.json are JSON and describe a model that can be",
        "harness/model/config/json_file.py",
    ),
    ProblemKind.UNKNOWN_METHOD: (
        "unknown_method",
        "the stated quant_method is known here, where all weights are plain",
        "config.json of a checkpoint that some engine quantises while it loads",
    ),
    ProblemKind.UNSAFE_NAME: (
        "unsafe_name",
        "the index names plain files in the checkpoint's own folder",
        "a name with `../` reads or writes elsewhere",
    ),
    ProblemKind.IN_TWO_SHARDS: (
        "tensor_in_two_shards",
        "a tensor is in one shard; of two, the reader's order decides which one counts",
        _SAFETENSORS_FORMAT,
    ),
    ProblemKind.NOT_IN_INDEX: (
        "not_in_index",
        "the index names every tensor of every shard; engines skip what it leaves out",
        _MISSING_SHARD,
    ),
    ProblemKind.NOT_IN_HEADER: (
        "not_in_header",
        "the shard that the index names has the tensor",
        _MISSING_SHARD,
    ),
    ProblemKind.IN_OTHER_SHARD: (
        "in_other_shard",
        "a tensor is in the shard that the index names",
        _MISSING_SHARD,
    ),
    ProblemKind.STRAY_SHARD: (
        "stray_shard",
        "the index names every shard of the folder; some engines read all that they find",
        "shards of two revisions in one folder",
    ),
    ProblemKind.FOREIGN_LINK: (
        "foreign_link",
        "links stay inside the checkpoint, or inside the hub's own cache",
        "huggingface_hub: snapshots link to blobs",
    ),
    ProblemKind.UNPICKLED: (
        "pickled",
        "no file has to be unpickled; some engines prefer such files when both are there",
        "unpickling runs code",
    ),
    ProblemKind.TOTAL_SIZE: (
        "total_size",
        "total_size in the index is the sum of all tensors",
        "huggingface_hub: metadata of an index",
    ),
}

BY_KIND: Mapping[ProblemKind, AuditRule] = MappingProxyType(
    {
        kind: AuditRule(
            f"files.{name}", Level.ERROR if kind.is_fatal else Level.WARNING, statement, source
        )
        for kind, (name, statement, source) in _STATEMENTS.items()
    }
)
MANIFEST = AuditRule(
    "files.manifest",
    Level.ERROR,
    "files have the content hashes of manifest.json, where the checkpoint has one of ours",
    "harness/checkpoint/write/manifest.py; `convert` refuses the same file",
)


# --------------------------------------------------------------------------------------------------
# Structure: which tensors a checkpoint has, in what shapes and formats. No rule needs a tensor's
# values, apart from the scalar scales that fused partners share.

_ANATOMY = "harness/model: parameters of the config"

UNKNOWN_MODEL = AuditRule(
    "structure.unknown_model",
    Level.NOTE,
    "config.json describes a model of a known family; otherwise each module is judged by itself",
    _ANATOMY,
)
NO_CONFIG = AuditRule(
    "structure.no_config",
    Level.ERROR,
    "a checkpoint's folder has a config.json: no engine loads it without, and nothing is implied",
    "transformers and vLLM 0.33 choose the model's class by its architectures",
)
UNKNOWN_SPELLING = AuditRule(
    "structure.unknown_spelling",
    Level.ERROR,
    "at least half of the config's parameters are found by the names of one known spelling",
    "harness/model/layouts.py",
)
MISSING_PARAMETER = AuditRule(
    "structure.missing_parameter",
    Level.ERROR,
    "every parameter that the config implies has its tensor",
    "faults B058, B064, B151: loaders fill in zeros, ones, or nothing at all",
)
MISSING_EXPERT = AuditRule(
    "structure.missing_expert",
    Level.ERROR,
    "every routed expert that the config counts is there",
    "fault B060: the slots of absent experts stay uninitialised",
)
MISSING_BLOCK = AuditRule(
    "structure.missing_block",
    Level.ERROR,
    "every layer that the config counts is there",
    _ANATOMY,
)
UNCOUNTED = AuditRule(
    "structure.uncounted",
    Level.ERROR,
    "the config counts every layer and every expert that has tensors",
    "engines build as many as the config counts, and skip the tensors of the others",
)
DRAFTER_ABSENT = AuditRule(
    "structure.drafter_absent",
    Level.NOTE,
    "the drafter that the config counts is there; the main model runs without it",
    "transformers drops mtp.* when it loads and saves",
)
WRONG_SHAPE = AuditRule(
    "structure.shape",
    Level.ERROR,
    "a tensor has the shape that the config implies",
    _ANATOMY,
)
WRONG_DTYPE = AuditRule(
    "structure.dtype",
    Level.ERROR,
    "an unquantised parameter is stored in a float type, an index in an integer type",
    _ANATOMY,
)
NARROWED = AuditRule(
    "structure.narrowed",
    Level.WARNING,
    "a parameter that is published in fp32 or bf16 keeps mantissa and range",
    "DeepSeek-V4-Pro shard headers: ape, hc_*, attn_sink and gate.bias are F32",
)
UNEXPECTED = AuditRule(
    "structure.unexpected",
    Level.WARNING,
    "every tensor belongs to a parameter of the config",
    "fault B062: scales under other names are skipped by loaders in silence",
)
KNOWN_EXTRA = AuditRule(
    "structure.known_extra",
    Level.NOTE,
    "buffers of an engine (inverse frequencies, cache scales) are no parameters of the model",
    "transformers' rotary_emb.inv_freq; ModelOpt's k_scale and v_scale",
)
ENGINE_FORM = AuditRule(
    "structure.engine_form",
    Level.NOTE,
    "modules are as released; those in the form of one engine or kernel are judged as that form",
    "vLLM's fused_wkv_wgate; DeepGEMM's wo_a [g, r, d] with its own scales",
)
UNREADABLE_MODULE = AuditRule(
    "structure.unreadable_module",
    Level.ERROR,
    "the tensors of a module together are one weight in a known format",
    "harness/checkpoint/view/modules.py",
)
ROUTER_QUANTISED = AuditRule(
    "structure.router_quantised",
    Level.ERROR,
    "the router of the experts is not quantised",
    "fault B152: 4-bit noise on router logits exceeds the margin of the top-k",
)
INDEXER_PREFIX = AuditRule(
    "structure.indexer_prefix",
    Level.ERROR,
    "the indexer's compressor has its own shape and its own bytes, not the main compressor's",
    "field report A, fault 4: four times too many rows, or the same tensor in silence",
)

SCALE_MISSING = AuditRule(
    "scales.missing",
    Level.ERROR,
    "codes have every scale of their format",
    "faults B063, B069: scales that are not there stay uninitialised, or count as 1",
)
SCALE_NAME = AuditRule(
    "scales.name",
    Level.ERROR,
    "scales have the names by which loaders of their format look for them, all modules alike",
    "ModelOpt 0.47 and compressed-tensors 0.20; fault B062: others are skipped in silence",
)
SCALE_LEFT_OVER = AuditRule(
    "scales.left_over",
    Level.ERROR,
    "values that need no scale have none",
    "a loader that applies it multiplies the weight a second time",
)
SCALE_RANK = AuditRule(
    "scales.rank",
    Level.ERROR,
    "block scales have one entry a block, in the rank of their weight; a tensor scale has one",
    "field report A, fault 1: a 1-D scale where formatted block scales are expected",
)
SCALE_DTYPE = AuditRule(
    "scales.dtype",
    Level.ERROR,
    "scales have the dtype of their format",
    "field report A, fault 2; faults B009, B024: bits of one type read as another",
)
SCALE_BLOCK = AuditRule(
    "scales.block",
    Level.ERROR,
    "codes and scales together show the block size of a known format",
    "inferred from shapes, never from what a config claims",
)
SCALE_FROM_PACKED = AuditRule(
    "scales.from_packed",
    Level.ERROR,
    "NVFP4 block scales count 16 codes each, not 16 bytes",
    "fault B068: an export took the packed shape for the logical one",
)
INPUT_SCALE_MISSING = AuditRule(
    "scales.input_missing",
    Level.ERROR,
    "an NVFP4 module whose activations are quantised has its input_scale, every expert its own",
    "faults B006, B020: a missing input_scale is zero or garbage, and a maximum spreads it",
)
INPUT_SCALE_INSIDE = AuditRule(
    "scales.input_scale_inside",
    Level.ERROR,
    "weight_scale_2 does not contain the module's input_scale as a factor",
    "field report A, fault 6: weights about 5000 times too small",
)
PARTNERS_SCALE = AuditRule(
    "partners.tensor_scale",
    Level.ERROR,
    "gate and up of an expert or MLP share one weight_scale_2",
    "faults B002, B003, B004: engines keep one of the two for both halves",
)
PARTNERS_SCALE_FUSABLE = AuditRule(
    "partners.tensor_scale_fusable",
    Level.WARNING,
    "NVFP4 partners that an engine fuses (q_a and kv, kv and gate) share one weight_scale_2",
    "vLLM 0.33 packed_modules_mapping; harmless where they are dequantised one by one",
)
PARTNERS_INPUT_SCALE = AuditRule(
    "partners.input_scale",
    Level.WARNING,
    "fused partners share their input_scale, because they read the same activations",
    "facts of ModelOpt's V4 export: w1 and w3 take the larger of both",
)
PARTNERS_FORMAT = AuditRule(
    "partners.format",
    Level.ERROR,
    "gate and up, and the experts of a layer, have one format",
    "fault B066; an engine stacks them in one tensor",
)
PARTNERS_FORMAT_FUSABLE = AuditRule(
    "partners.format_fusable",
    Level.WARNING,
    "partners that an engine fuses have one format",
    "fault B066: one of them inherits its neighbour's format",
)

NO_STATEMENT = AuditRule(
    "config.no_statement",
    Level.ERROR,
    "a checkpoint with quantised weights says so in config.json or hf_quant_config.json",
    "an engine builds unquantised parameters otherwise",
)
CONTRADICTS = AuditRule(
    "config.contradicts",
    Level.ERROR,
    "each module has the format that the quantisation config states for it",
    "faults B062, B066: the loader builds what the config says, not what the file holds",
)
BLOCK_SIZE = AuditRule(
    "config.block_size",
    Level.WARNING,
    "every stated block or group size is the one that the shapes show",
    "field report A: 128 in one place and 16 in another",
)
BLOCK_SIZE_BUILT = AuditRule(
    "config.block_size_built",
    Level.ERROR,
    "the group or block size by which engines allocate scales is the one that the shapes show",
    "vLLM's methods for ModelOpt and FP8: as many scales as columns / group_size are expected",
)
TWO_STATEMENTS = AuditRule(
    "config.two_statements",
    Level.WARNING,
    "config.json and hf_quant_config.json say the same",
    "engines read one of them, ModelOpt's own tools the other",
)
IGNORE_KEEPS_SOURCE = AuditRule(
    "config.ignore_keeps_source",
    Level.NOTE,
    "`ignore` with quant_method fp8 means: as in the source, FP8, and not unquantised",
    "NVIDIA's V4 exports; vLLM 0.33's FP8 config reads ignored_layers instead",
)
DRAFTER_EXPERTS = AuditRule(
    "config.drafter_experts",
    Level.WARNING,
    "the drafter's experts have the format of the main model's",
    "vLLM 0.33's V4 class sends MXFP4 drafter experts to the NVFP4 method: acceptance near 0 %",
)
UNREAD_STATEMENT = AuditRule(
    "config.unread_statement",
    Level.NOTE,
    "every word of the quantisation config is one that this audit can judge",
    "ModelOpt 0.47 and compressed-tensors 0.20",
)


# --------------------------------------------------------------------------------------------------
# Names: a known loader reads every parameter under its stored name. Two levels for one question:
# transformers leaves a parameter that it does not find at random values and goes on, so where it
# takes all formats of a checkpoint, an unread name gives silently wrong numbers: an error. A
# quantised export that no known loader reads fails at load, and its maker may have an engine of
# their own: a warning.

_NAME_SOURCE = "harness/checkpoint/view/consumers.py; transformers 5.20 conversion_mapping.py"

NAME_UNREAD = AuditRule(
    "names.unread",
    Level.ERROR,
    "a known loader reads every parameter of a BF16 or FP8 checkpoint by its name; transformers"
    " leaves the others at random",
    _NAME_SOURCE,
)
NAME_UNREAD_QUANTISED = AuditRule(
    "names.unread_quantised",
    Level.WARNING,
    "a known loader reads every parameter of a quantised checkpoint by its name",
    _NAME_SOURCE,
)


# --------------------------------------------------------------------------------------------------
# Loading: which bytes of a checkpoint reach which parameter of an engine. These rules judge a
# checkpoint together with a loader map (`--loader MAP`), not the checkpoint alone.

_DEFAULT_LOADER = "field report A: the default loader skips in silence what it cannot place"
_COVERAGE = "faults B056, B060, B069: load coverage a parameter element, not a parameter"

UNWRITTEN = AuditRule(
    "loader.unwritten",
    Level.ERROR,
    "every element of every parameter is written from the checkpoint",
    _COVERAGE,
)
SLOT_UNWRITTEN = AuditRule(
    "loader.slot_unwritten",
    Level.ERROR,
    "every slot of a fused parameter is written, not the first one alone",
    "fault B056: the scale of a fused parameter written to slot 0 only",
)
WRITTEN_TWICE = AuditRule(
    "loader.written_twice",
    Level.ERROR,
    "no element is written by two tensors; the order of files would decide",
    _COVERAGE,
)
LOADER_UNREAD = AuditRule(
    "loader.unread",
    Level.ERROR,
    "every element of a tensor that has a place reaches it on some rank",
    "fault B161: rows cut by another number of ranks than they were written for",
)

SKIPPED = AuditRule(
    "loader.skipped",
    Level.ERROR,
    "no skip pattern covers a tensor of the model",
    _DEFAULT_LOADER,
)
SKIPPED_SCALE = AuditRule(
    "loader.skipped_scale",
    Level.ERROR,
    "no skip pattern covers the scales of a weight whose codes are loaded",
    "field report A, fault 7: a pattern for fused parameters took the scales of q_b, o_a and o_b",
)
DROPPED = AuditRule(
    "loader.dropped",
    Level.ERROR,
    "every tensor of the model has a parameter under the name that the rules give it",
    _DEFAULT_LOADER,
)
DROPPED_SCALE = AuditRule(
    "loader.dropped_scale",
    Level.ERROR,
    "every scale of a weight whose codes are loaded has its own parameter",
    "faults B061, B062: block scales dropped while the codes are read as values",
)
EXTRA_DROPPED = AuditRule(
    "loader.extra_dropped",
    Level.NOTE,
    "what is dropped is no tensor of the model",
    _DEFAULT_LOADER,
)
ELSEWHERE = AuditRule(
    "loader.elsewhere",
    Level.NOTE,
    "tensors that another loader reads are declared as such, with the reason",
    "vLLM 0.33: drafters are models of their own",
)

LOADER_SHAPE = AuditRule(
    "loader.shape",
    Level.ERROR,
    "a tensor has the extents of the slot that it is written to",
    "field report A, fault 4: a mismatch by a factor of 4",
)
LOADER_SCALE_RANK = AuditRule(
    "loader.scale_rank",
    Level.ERROR,
    "a block scale has the rank that the consumer formats",
    "field report A, fault 1: a 1-D scale where the consumer wants one a block",
)
FORMAT = AuditRule(
    "loader.format",
    Level.ERROR,
    "the engine builds each weight in the format that is stored, or a conversion makes it so",
    "field report A: 305 and 91 NVFP4 modules had to be turned back; faults B061, B066",
)
DRAFTER_FORMAT = AuditRule(
    "loader.drafter_format",
    Level.WARNING,
    "the engine builds the drafter's experts in the format that is stored; where it does not,"
    " drafts are lost, the text is not",
    "vLLM 0.33 models/deepseek_v4/quant_config.py: every layer of experts follows moe_quant_algo",
)
DTYPE = AuditRule(
    "loader.dtype",
    Level.ERROR,
    "codes are written to parameters of codes, values to parameters of values",
    "fault B062: codes under a name that the loader takes for values",
)
LOADER_SCALE_DTYPE = AuditRule(
    "loader.scale_dtype",
    Level.ERROR,
    "scales are written to parameters of their own number format",
    "field report A, fault 2: E4M3 block scales where fp32 or UE8M0 is expected",
)
LOADER_NARROWED = AuditRule(
    "loader.narrowed",
    Level.WARNING,
    "values keep their precision and range on the way",
    "faults B009, B082: fp32 read or kept as bf16",
)

INPUT_SCALE_IN_WEIGHT = AuditRule(
    "loader.input_scale_in_weight",
    Level.ERROR,
    "input_scale reaches no parameter of the weight, and no conversion of it",
    "field report A, fault 6: weights about 5000 times too small",
)
WRONG_PART = AuditRule(
    "loader.wrong_part",
    Level.ERROR,
    "codes, block scales and tensor scales are written to parameters of their kind",
    "fault B001: one scale taken for another",
)
PREFIX = AuditRule(
    "loader.prefix",
    Level.ERROR,
    "the indexer's compressor is read from the indexer's prefix, the main one's from its own",
    "field report A, fault 4",
)
SWAPPED_PARTNERS = AuditRule(
    "loader.swapped_partners",
    Level.ERROR,
    "partners lie in a fused parameter in the engine's order",
    "faults B045, B046: gate and up swapped",
)
WRONG_PARAMETER = AuditRule(
    "loader.wrong_parameter",
    Level.ERROR,
    "a tensor is written to the parameter of its own layer, expert and projection",
    "fault B151: a tensor looked up under another name",
)
WRONG_ROWS = AuditRule(
    "loader.wrong_rows",
    Level.ERROR,
    "a rank gets the rows or columns that its heads, groups or experts have",
    "faults B077, B161: right shape, wrong rows",
)

CONSTANT_SCALE = AuditRule(
    "loader.constant_scale",
    Level.ERROR,
    "a scale is read from the checkpoint, not filled with a constant",
    "field report A, fault 5: block scales of all ones in place of the FP8 scale",
)
SCALE_UNREAD = AuditRule(
    "loader.scale_unread",
    Level.ERROR,
    "a conversion reads the codes and every scale of the weight",
    "fault B063: the second scale left out, a gain of 1/s",
)
BLOCK_UNSTATED = AuditRule(
    "loader.block_unstated",
    Level.ERROR,
    "a conversion to FP8 blocks states the shape of its blocks",
    "field report A, fault 3: the block shape missing among the arguments",
)
PARTNERS_DIFFER = AuditRule(
    "loader.partners_differ",
    Level.ERROR,
    "what the engine fuses has one format, and is not cut through a scale block",
    "fault B066; vLLM 0.33 packed_modules_mapping",
)
UNREAD_NAME = AuditRule(
    "loader.unread_name",
    Level.WARNING,
    "every tensor has the name of a parameter that the model has",
    "transformers 5.20 core_model_loading.py: unexpected keys are listed and passed over",
)
TIED_APART = AuditRule(
    "loader.tied_apart",
    Level.ERROR,
    "tied weights are stored once, or alike",
    "transformers 5.20 tie_weights; vLLM 0.26 skips lm_head where the config ties it",
)
CAVEAT = AuditRule(
    "loader.caveat",
    Level.WARNING,
    "the map is the engine's own in every respect",
    "vLLM 0.33 models/deepseek_v4/nvidia/model.py: its mapper knows DeepSeek's names alone",
)
UNDECIDED = AuditRule(
    "loader.undecided",
    Level.NOTE,
    "the engine's source says plainly where every tensor goes",
    "vLLM 0.26 models: a load_weights that changes names in code of its own",
)
DEAD_RULE = AuditRule(
    "loader.dead_rule",
    Level.NOTE,
    "every rule of the map matches something",
    "a fix that never runs: a wrong attribute name, a path that is dead on this build",
)

STRUCTURE_RULES = (*BY_KIND.values(), *rules_in(globals()))
