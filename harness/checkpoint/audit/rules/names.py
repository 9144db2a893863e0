"""Rules about names: a loader that is known reads every parameter under the name that it has.

Two levels for one question. transformers leaves what it does not find at random and goes on, so
where it takes all formats of a checkpoint, an unread name is wrong numbers in silence. Quantised
exports that no known loader reads stop every load, and their maker may have an engine of his own.
"""

from __future__ import annotations

from degarble.harness.checkpoint.audit.rules.rule import Level, Rule, rules_in

_SOURCE = "harness/checkpoint/view/consumers.py; transformers 5.20 conversion_mapping.py"

UNREAD = Rule(
    "names.unread",
    Level.ERROR,
    "a known loader reads every parameter of a BF16 or FP8 checkpoint by its name; transformers"
    " leaves the others at random",
    _SOURCE,
)
UNREAD_QUANTISED = Rule(
    "names.unread_quantised",
    Level.WARNING,
    "a known loader reads every parameter of a quantised checkpoint by its name",
    _SOURCE,
)

RULES = rules_in(globals())
