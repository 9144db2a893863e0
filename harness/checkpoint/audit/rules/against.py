"""Define the rules for comparing a checkpoint's values with a reference's.

Thresholds as numbers are next to the checks in audit/against. An error means that values are wrong:
another tensor's, in another order, or off by a factor. The rounding error that a format costs is no
finding, whichever format it is and however often weights were converted.
"""

from __future__ import annotations

from degarble.harness.checkpoint.audit.rules.rule import Level, Rule, rules_in

_DERIVED = "docs/design-notes/audit_statistics.md, part on --against"


def _rule(name: str, level: Level, statement: str, source: str) -> Rule:
    return Rule(f"against.{name}", level, statement, source)


SHAPE = _rule(
    "shape", Level.ERROR, "a tensor has the shape that it has in the reference", "fault family M14"
)
OTHER_TENSOR = _rule(
    "other_tensor",
    Level.ERROR,
    "a tensor holds the values that the reference has under its name, not under another one",
    "faults B052, B056, and fault families M14, M16: layers, experts or partners mixed up",
)
ORDER = _rule(
    "order",
    Level.ERROR,
    "values lie in the order that they have in the reference",
    "faults B032, B041, B047: rows, nibbles or block scales in an engine's own order",
)
SIGN = _rule(
    "sign",
    Level.ERROR,
    "values have the signs that they have in the reference",
    "field report A: sign handling among the suspects",
)
GAIN = _rule(
    "gain",
    Level.ERROR,
    "no factor lies on the whole: one scale explains every code, and the least-squares gain is 1",
    "faults B001, B011, B012: a scale in the wrong direction, twice, dropped, or a sibling's",
)
ROWS = _rule(
    "rows",
    Level.ERROR,
    "no row is off by half of itself while an ideal conversion is not",
    "fault B060: parts of fused parameters that were never written, or written elsewhere",
)
VALUES = _rule(
    "values",
    Level.ERROR,
    "what is left of a tensor beside its gain is below a fifth of it, or what its format explains",
    _DERIVED,
)
NOT_FINITE = _rule(
    "not_finite", Level.ERROR, "what is finite in the reference is finite", "faults B007, B008"
)
BYTES = _rule(
    "bytes",
    Level.ERROR,
    "what is not quantised holds the reference's values, to the byte where both store one dtype",
    "a flipped bit, a rounding too many, a part of another revision",
)
CODES = _rule(
    "codes",
    Level.ERROR,
    "each code stands for the nearest value to the reference's under its own scale",
    "any scale rule: half a step of the format at most; docs/design-notes/audit_statistics.md",
)
BLOCK_SCALE = _rule(
    "block_scale",
    Level.ERROR,
    "block scales are those that their codes were made with",
    "fault families M11, M12: scales of a neighbour, of another row, or scaled by themselves",
)
INTEGERS = _rule(
    "integers", Level.ERROR, "integers are those of the reference, each of them", "fault M26"
)
ABOVE_FORMAT = _rule(
    "above_format",
    Level.WARNING,
    "the error is at most 1.25 times what its format, or a coarser one on its way, explains",
    _DERIVED,
)
SLIGHTLY_ABOVE = _rule(
    "slightly_above_format",
    Level.NOTE,
    "the error is at most 1.02 times what an ideal conversion to its format leaves",
    _DERIVED,
)
COARSER = _rule(
    "coarser_before",
    Level.NOTE,
    "no format on the way was coarser than the one that is stored",
    "a BF16 tensor that was NVFP4 once keeps NVFP4's error",
)
CONFIG = _rule(
    "config",
    Level.ERROR,
    "config.json states the reference's numbers and choices, wherever they change what is computed",
    "rotary base, eps, top-k, scaling, windows and counts: nothing in the weights shows them",
)
MISSING = _rule(
    "missing",
    Level.ERROR,
    "every tensor of the reference is there, or one that could hold it",
    "faults B058, B064, B151: loaders fill in zeros, ones, or nothing at all",
)
NOT_COMPARED = _rule(
    "not_compared", Level.NOTE, "every tensor has its counterpart in the reference", _DERIVED
)

RULES = rules_in(globals())
