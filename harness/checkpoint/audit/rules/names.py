"""Define the rules for names: a known loader reads every parameter under its stored name.

Two levels for one question. transformers leaves a parameter that it does not find at random values
and goes on, so where it takes all formats of a checkpoint, an unread name gives silently wrong
numbers: an error. A quantised export that no known loader reads fails at load, and its maker may
have an engine of their own: a warning.
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
