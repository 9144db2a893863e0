"""Define the audit rules for values: scales, codes and numbers, alone and against a reference.

Thresholds are stated here in words; the numbers stand next to the checks.
"""

from __future__ import annotations

from degarble.harness.checkpoint.audit.rules import AuditRule, Level, rules_in

# --------------------------------------------------------------------------------------------------
# Scales, codes and values, each alone and compared with its siblings. An error means that some
# engine computes wrong numbers from what is stored. What healthy checkpoints can contain (dead
# experts, rows of zeros, experts that no token reached) is a warning at most.

_REPORT = "field report A"
_ENGINE = "vLLM 0.33: every 1/scale and every maximum over experts spreads it"


def _number_rule(name: str, level: Level, statement: str, source: str) -> AuditRule:
    return AuditRule(f"numbers.{name}", level, statement, source)


# Scales, each by itself
SCALE_NOT_FINITE = _number_rule(
    "scale_not_finite", Level.ERROR, "every scale is a finite number", "faults B007, B008, B056"
)
SCALE_NOT_POSITIVE = _number_rule(
    "scale_not_positive",
    Level.ERROR,
    "no scale is negative, and no tensor or input scale is zero",
    f"faults B006, B062, B069; {_ENGINE}",
)
SCALE_TINY = _number_rule(
    "scale_tiny",
    Level.WARNING,
    "tensor and input scales are above 2^-60, where kernels that flush or square them lose them",
    "fault B167: scales about 1e-23 of dead experts became NaN in one kernel",
)
SCALE_CONSTANT = _number_rule(
    "scale_constant",
    Level.ERROR,
    "block scales differ from block to block",
    f"{_REPORT}, fault 5: a scale of all ones in place of the real one",
)
SCALE_SCATTERED = _number_rule(
    "scale_scattered",
    Level.ERROR,
    "at most 5 % of a matrix's block scales are a factor of 2^20 or more from their median",
    "faults B024, B039, B069: uninitialised memory, or bits of another type, read as scales",
)
SCALE_VANISHED = _number_rule(
    "scale_vanished",
    Level.ERROR,
    "at most 5 % of the blocks that hold codes have a scale of zero",
    "faults B062, B069: scales that were never written",
)
SCALE_UNDERFLOWN = _number_rule(
    "scale_underflown",
    Level.WARNING,
    "blocks that hold codes have a scale that is not zero",
    "fault B017: values below the smallest scale are lost",
)
SCALE_SUBNORMAL = _number_rule(
    "scale_subnormal",
    Level.WARNING,
    "at most 1 % of the block scales are subnormal",
    "faults B010, B036: kernels that decode subnormal E4M3 wrongly; three bits are lost there",
)
AMAX_CLIPPED = _number_rule(
    "amax_clipped",
    Level.WARNING,
    "block scales do not pile up at their format's largest number",
    "a tensor scale from too small an amax cuts off the largest weights",
)
AMAX_UNUSED = _number_rule(
    "amax_unused",
    Level.NOTE,
    "the largest block scale is within a factor of 16 of the format's largest",
    "a tensor scale from another tensor's amax wastes range",
)

# Scales compared with siblings
SCALE_DIRECTION = _number_rule(
    "scale_direction",
    Level.ERROR,
    "a tensor scale multiplies where its name says multiply, and divides where it says divide",
    "faults B001, B011, B014: the magnitude is off by the square of the scale",
)
SCALE_IS_ONE = _number_rule(
    "scale_is_one",
    Level.ERROR,
    "a scale of exactly 1 suits the magnitude of the weight",
    f"faults B012, B063; {_REPORT}, fault 5: a scale that was dropped, and 1 put in its place",
)
SCALE_TWICE = _number_rule(
    "scale_twice",
    Level.ERROR,
    "no tensor scale is the square of what its siblings have",
    "faults B012, B063: the scale was applied when it was stored, and is applied again",
)
MAGNITUDE = _number_rule(
    "magnitude",
    Level.ERROR,
    "a matrix is within a factor of 1000 of its siblings, in root mean square",
    f"fault families M02, M05; {_REPORT}, fault 6",
)
MAGNITUDE_FAR = _number_rule(
    "magnitude_far",
    Level.WARNING,
    "a matrix is within a factor of 64 of its siblings, in root mean square",
    "fault families M02, M05",
)
DEAD_EXPERT = _number_rule(
    "dead_expert",
    Level.WARNING,
    "the matrices of an expert are of the magnitude of other experts'",
    "fault B167: experts that training gave up are tiny; not a fault by itself",
)
INPUT_DIRECTION = _number_rule(
    "input_scale_direction",
    Level.ERROR,
    "an input scale multiplies where its name says multiply, and divides where it says divide",
    "faults B001, B011",
)
INPUT_FALLBACK = _number_rule(
    "input_scale_fallback",
    Level.WARNING,
    "no expert has the largest input scale of all experts, to the last bit, as others have too",
    "ModelOpt gives experts that no calibration token reached the largest scale of the others",
)
INPUT_IS_ONE = _number_rule(
    "input_scale_is_one",
    Level.WARNING,
    "the input scales of a role are not all exactly 1",
    "faults B012, B063: a scale that was never measured, and 1 put in its place",
)
INPUT_OUTLIER = _number_rule(
    "input_scale_outlier",
    Level.WARNING,
    "an input scale is within a factor of 64 of its siblings'",
    "faults B008, B020: too few calibration tokens, or memory that was never written",
)
INPUT_ABSENT = _number_rule(
    "input_scale_absent",
    Level.ERROR,
    "modules of one role all have an input scale, or none has",
    "fault B006; where the config is known, the rule scales.input_missing says it",
)

# Codes and values
CODES_RANDOM = _number_rule(
    "codes_random",
    Level.ERROR,
    "packed codes are less random than noise: quantised weights leave traces",
    "fault B069: uninitialised or foreign bytes",
)
CODES_CONSTANT = _number_rule(
    "codes_constant",
    Level.ERROR,
    "codes that are not zero differ from each other",
    "memory filled with one byte",
)
BLOCK_MAXIMUM = _number_rule(
    "block_maximum",
    Level.WARNING,
    "blocks of NVFP4 reach 4 or 6, because their scale follows from their largest value",
    "fault B068: scales that belong to other blocks, or that another rule made",
)
SCALE_LAYOUT = _number_rule(
    "scale_layout",
    Level.ERROR,
    "block scales lie in row-major order: scale and code energy of a block go together",
    "faults B001, B041, B047, B048: swizzled or permuted scales on disk",
)
SCALE_LAYOUT_STATED = _number_rule(
    "scale_layout_stated",
    Level.NOTE,
    "block scales of stacked experts lie in row-major order, which every loader expects",
    "harness/checkpoint/transform/convert/vllm_parameters.py: "
    "a conversion for one backend's kernels",
)
SCALE_UNRELATED = _number_rule(
    "scale_unrelated",
    Level.ERROR,
    "block scales belong to the codes that they are stored with",
    "fault families M11, M12: the scales of another matrix, or in an unknown order",
)
SCALE_UNDECIDED = _number_rule(
    "scale_undecided",
    Level.NOTE,
    "it can be decided whether block scales belong to their codes",
    "docs/design-notes/audit_statistics.md",
)
NIBBLE_ORDER = _number_rule(
    "nibble_order",
    Level.ERROR,
    "the low half of a byte holds the even column, as matrices on the same input show",
    "fault B032: one checkpoint family packs the other way round",
)
NIBBLE_ORDER_LIKELY = _number_rule(
    "nibble_order_likely",
    Level.WARNING,
    "nothing suggests a packing order other than low half first",
    "fault B032, inferred from norms, from rows, or from packed siblings alone",
)
NIBBLE_ORDER_UNDECIDED = _number_rule(
    "nibble_order_undecided",
    Level.NOTE,
    "the packing order can be inferred from what reads the same input",
    "docs/design-notes/audit_statistics.md",
)
DIALECT = _number_rule(
    "dialect",
    Level.NOTE,
    "the bytes say which producers may have written them",
    "harness/formats/dialects.py: zero blocks, smallest scales, and how tensor scales are rounded",
)
DIALECT_OTHER = _number_rule(
    "dialect_other",
    Level.WARNING,
    "the bytes are what the producer writes whose names they have",
    "fault B001: values of one tool under the names of another one",
)
VALUE_NOT_FINITE = _number_rule(
    "value_not_finite", Level.ERROR, "every weight is a finite number", "NaN spreads to every token"
)
VALUE_SCATTERED = _number_rule(
    "value_scattered",
    Level.ERROR,
    "at most 1 % of a tensor's values are a factor of 2^40 or more from their median",
    "faults B009, B144: bits of one type read as another; memory that was never written",
)
ID_OUT_OF_RANGE = _number_rule(
    "id_out_of_range", Level.ERROR, "every expert id is the number of an expert", "fault M26"
)

# Whole matrices
TENSOR_ZERO = _number_rule(
    "tensor_zero",
    Level.ERROR,
    "no matrix or norm that every token meets is all zeros",
    "faults B058, B151: zeros in place of what was not found",
)
ROWS_UNWRITTEN = _number_rule(
    "rows_unwritten",
    Level.ERROR,
    "no eighth of a linear's rows, in one piece before its last row, is zero",
    "fault B060 and fused parameters of which one part was never written",
)
COLUMNS_UNWRITTEN = _number_rule(
    "columns_unwritten",
    Level.ERROR,
    "no eighth of a linear's columns in one piece, nor a quarter up to its last one, is zero",
    "fault B060: the part of one rank, of a linear split by columns, was never written",
)
ZERO_ROWS = _number_rule(
    "zero_rows",
    Level.WARNING,
    "linears have no rows of zeros",
    "padding, pruned neurons, or a part that was never written",
)
IDENTICAL = _number_rule(
    "identical",
    Level.ERROR,
    "two linears are two different matrices",
    "faults B052, B056: every layer or expert got the first one's",
)
IDENTICAL_TIED = _number_rule(
    "identical_tied",
    Level.NOTE,
    "embedding, head and drafter are stored once",
    "V3.2 stores embedding and head again with its drafter",
)
PERMUTED = _number_rule(
    "permuted",
    Level.ERROR,
    "no linear holds the rows of another one in another order",
    "fault families M14, M16, M20: shuffled for an engine, and stored",
)
NOT_READ = _number_rule(
    "not_read",
    Level.WARNING,
    "every tensor's numbers can be read",
    "harness/checkpoint/view/stored.py",
)


# --------------------------------------------------------------------------------------------------
# Values compared with a reference's. An error means that values are wrong: another tensor's, in
# another order, or off by a factor. The rounding error that a format costs is no finding, whichever
# format it is and however often weights were converted.

_DERIVED = "docs/design-notes/audit_statistics.md, part on --against"


def _against_rule(name: str, level: Level, statement: str, source: str) -> AuditRule:
    return AuditRule(f"against.{name}", level, statement, source)


SHAPE = _against_rule(
    "shape", Level.ERROR, "a tensor has the shape that it has in the reference", "fault family M14"
)
OTHER_TENSOR = _against_rule(
    "other_tensor",
    Level.ERROR,
    "a tensor holds the values that the reference has under its name, not under another one",
    "faults B052, B056, and fault families M14, M16: layers, experts or partners mixed up",
)
ORDER = _against_rule(
    "order",
    Level.ERROR,
    "values lie in the order that they have in the reference",
    "faults B032, B041, B047: rows, nibbles or block scales in an engine's own order",
)
SIGN = _against_rule(
    "sign",
    Level.ERROR,
    "values have the signs that they have in the reference",
    "field report A: sign handling among the suspects",
)
GAIN = _against_rule(
    "gain",
    Level.ERROR,
    "no factor applies to the whole: one scale explains all codes, and the least-squares gain is 1",
    "faults B001, B011, B012: a scale in the wrong direction, twice, dropped, or a sibling's",
)
ROWS = _against_rule(
    "rows",
    Level.ERROR,
    "no row is off by half of itself while an ideal conversion is not",
    "fault B060: parts of fused parameters that were never written, or written elsewhere",
)
VALUES = _against_rule(
    "values",
    Level.ERROR,
    "the error that its gain leaves is below a fifth of a tensor, or what its format explains",
    _DERIVED,
)
NOT_FINITE = _against_rule(
    "not_finite", Level.ERROR, "what is finite in the reference is finite", "faults B007, B008"
)
BYTES = _against_rule(
    "bytes",
    Level.ERROR,
    "what is not quantised holds the reference's values, to the byte where both store one dtype",
    "a flipped bit, a rounding too many, a part of another revision",
)
CODES = _against_rule(
    "codes",
    Level.ERROR,
    "each code stands for the nearest value to the reference's under its own scale",
    "any scale rule: half a step of the format at most; docs/design-notes/audit_statistics.md",
)
BLOCK_SCALE = _against_rule(
    "block_scale",
    Level.ERROR,
    "block scales are those that their codes were made with",
    "fault families M11, M12: scales of a neighbour, of another row, or scaled by themselves",
)
INTEGERS = _against_rule(
    "integers", Level.ERROR, "integers are those of the reference, each of them", "fault M26"
)
ABOVE_FORMAT = _against_rule(
    "above_format",
    Level.WARNING,
    "the error is at most 1.25 times what its format, or a coarser one on its way, explains",
    _DERIVED,
)
SLIGHTLY_ABOVE = _against_rule(
    "slightly_above_format",
    Level.NOTE,
    "the error is at most 1.02 times what an ideal conversion to its format leaves",
    _DERIVED,
)
COARSER = _against_rule(
    "coarser_before",
    Level.NOTE,
    "no format on the way was coarser than the one that is stored",
    "a BF16 tensor that was NVFP4 once keeps NVFP4's error",
)
CONFIG = _against_rule(
    "config",
    Level.ERROR,
    "config.json states the reference's numbers and choices, wherever they change what is computed",
    "rotary base, eps, top-k, scaling, windows and counts: nothing in the weights shows them",
)
MISSING = _against_rule(
    "missing",
    Level.ERROR,
    "every tensor of the reference is there, or one that could hold it",
    "faults B058, B064, B151: loaders fill in zeros, ones, or nothing at all",
)
NOT_COMPARED = _against_rule(
    "not_compared", Level.NOTE, "every tensor has its counterpart in the reference", _DERIVED
)

VALUE_RULES = rules_in(globals())
