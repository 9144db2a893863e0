"""Define the rules for loading: which bytes of a checkpoint reach which parameter of an engine.

They judge a checkpoint together with a loader map (`--loader MAP`), not the checkpoint alone.
"""

from __future__ import annotations

from degarble.harness.checkpoint.audit.rules.rule import Level, Rule, rules_in

_DEFAULT_LOADER = "field report A: the default loader skips in silence what it cannot place"
_COVERAGE = "faults B056, B060, B069: load coverage a parameter element, not a parameter"

UNWRITTEN = Rule(
    "loader.unwritten",
    Level.ERROR,
    "every element of every parameter is written from the checkpoint",
    _COVERAGE,
)
SLOT_UNWRITTEN = Rule(
    "loader.slot_unwritten",
    Level.ERROR,
    "every slot of a fused parameter is written, not the first one alone",
    "fault B056: the scale of a fused parameter written to slot 0 only",
)
WRITTEN_TWICE = Rule(
    "loader.written_twice",
    Level.ERROR,
    "no element is written by two tensors; the order of files would decide",
    _COVERAGE,
)
UNREAD = Rule(
    "loader.unread",
    Level.ERROR,
    "every element of a tensor that has a place reaches it on some rank",
    "fault B161: rows cut by another number of ranks than they were written for",
)

SKIPPED = Rule(
    "loader.skipped",
    Level.ERROR,
    "no skip pattern covers a tensor of the model",
    _DEFAULT_LOADER,
)
SKIPPED_SCALE = Rule(
    "loader.skipped_scale",
    Level.ERROR,
    "no skip pattern covers the scales of a weight whose codes are loaded",
    "field report A, fault 7: a pattern for fused parameters took the scales of q_b, o_a and o_b",
)
DROPPED = Rule(
    "loader.dropped",
    Level.ERROR,
    "every tensor of the model has a parameter under the name that the rules give it",
    _DEFAULT_LOADER,
)
DROPPED_SCALE = Rule(
    "loader.dropped_scale",
    Level.ERROR,
    "every scale of a weight whose codes are loaded has its own parameter",
    "faults B061, B062: block scales dropped while the codes are read as values",
)
EXTRA_DROPPED = Rule(
    "loader.extra_dropped",
    Level.NOTE,
    "what is dropped is no tensor of the model",
    _DEFAULT_LOADER,
)
ELSEWHERE = Rule(
    "loader.elsewhere",
    Level.NOTE,
    "tensors that another loader reads are declared as such, with the reason",
    "vLLM 0.33: drafters are models of their own",
)

SHAPE = Rule(
    "loader.shape",
    Level.ERROR,
    "a tensor has the extents of the slot that it is written to",
    "field report A, fault 4: a mismatch by a factor of 4",
)
SCALE_RANK = Rule(
    "loader.scale_rank",
    Level.ERROR,
    "a block scale has the rank that the consumer formats",
    "field report A, fault 1: a 1-D scale where the consumer wants one a block",
)
FORMAT = Rule(
    "loader.format",
    Level.ERROR,
    "the engine builds each weight in the format that is stored, or a conversion makes it so",
    "field report A: 305 and 91 NVFP4 modules had to be turned back; faults B061, B066",
)
DRAFTER_FORMAT = Rule(
    "loader.drafter_format",
    Level.WARNING,
    "the engine builds the drafter's experts in the format that is stored; where it does not,"
    " drafts are lost, the text is not",
    "vLLM 0.33 models/deepseek_v4/quant_config.py: every layer of experts follows moe_quant_algo",
)
DTYPE = Rule(
    "loader.dtype",
    Level.ERROR,
    "codes are written to parameters of codes, values to parameters of values",
    "fault B062: codes under a name that the loader takes for values",
)
SCALE_DTYPE = Rule(
    "loader.scale_dtype",
    Level.ERROR,
    "scales are written to parameters of their own number format",
    "field report A, fault 2: E4M3 block scales where fp32 or UE8M0 is expected",
)
NARROWED = Rule(
    "loader.narrowed",
    Level.WARNING,
    "values keep their precision and range on the way",
    "faults B009, B082: fp32 read or kept as bf16",
)

INPUT_SCALE_IN_WEIGHT = Rule(
    "loader.input_scale_in_weight",
    Level.ERROR,
    "input_scale reaches no parameter of the weight, and no conversion of it",
    "field report A, fault 6: weights about 5000 times too small",
)
WRONG_PART = Rule(
    "loader.wrong_part",
    Level.ERROR,
    "codes, block scales and tensor scales are written to parameters of their kind",
    "fault B001: one scale taken for another",
)
PREFIX = Rule(
    "loader.prefix",
    Level.ERROR,
    "the indexer's compressor is read from the indexer's prefix, the main one's from its own",
    "field report A, fault 4",
)
SWAPPED_PARTNERS = Rule(
    "loader.swapped_partners",
    Level.ERROR,
    "partners lie in a fused parameter in the engine's order",
    "faults B045, B046: gate and up swapped",
)
WRONG_PARAMETER = Rule(
    "loader.wrong_parameter",
    Level.ERROR,
    "a tensor is written to the parameter of its own layer, expert and projection",
    "fault B151: a tensor looked up under another name",
)
WRONG_ROWS = Rule(
    "loader.wrong_rows",
    Level.ERROR,
    "a rank gets the rows or columns that its heads, groups or experts have",
    "faults B077, B161: right shape, wrong rows",
)

CONSTANT_SCALE = Rule(
    "loader.constant_scale",
    Level.ERROR,
    "a scale is read from the checkpoint, not filled with a constant",
    "field report A, fault 5: block scales of all ones in place of the FP8 scale",
)
SCALE_UNREAD = Rule(
    "loader.scale_unread",
    Level.ERROR,
    "a conversion reads the codes and every scale of the weight",
    "fault B063: the second scale left out, a gain of 1/s",
)
BLOCK_UNSTATED = Rule(
    "loader.block_unstated",
    Level.ERROR,
    "a conversion to FP8 blocks states the shape of its blocks",
    "field report A, fault 3: the block shape missing among the arguments",
)
PARTNERS_DIFFER = Rule(
    "loader.partners_differ",
    Level.ERROR,
    "what the engine fuses has one format, and is not cut through a scale block",
    "fault B066; vLLM 0.33 packed_modules_mapping",
)
CAVEAT = Rule(
    "loader.caveat",
    Level.WARNING,
    "the map is the engine's own in every respect",
    "vLLM 0.33 models/deepseek_v4/nvidia/model.py: its mapper knows DeepSeek's names alone",
)
DEAD_RULE = Rule(
    "loader.dead_rule",
    Level.NOTE,
    "every rule of the map matches something",
    "a fix that never runs: a wrong attribute name, a path that is dead on this build",
)

RULES = rules_in(globals())
