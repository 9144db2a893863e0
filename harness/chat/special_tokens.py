"""DeepSeek's special tokens, the marks that structure a conversation, by what they mean.

Ids come from a checkpoint's own tokenizer. The bars are U+FF5C and the low lines U+2581. Imports no
sibling.

Source: facts of DeepSeek-V4's and V3.2's encodings (sections 12 and 24).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
REMINDER = "<｜latest_reminder｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"

# Tasks of a user message, V4 only; `action` alone comes after ASSISTANT.
TASKS: Mapping[str, str] = MappingProxyType(
    {
        "action": "<｜action｜>",
        "query": "<｜query｜>",
        "authority": "<｜authority｜>",
        "domain": "<｜domain｜>",
        "title": "<｜title｜>",
        "read_url": "<｜read_url｜>",
    }
)
# None of these may stand in what a model says itself.
STRUCTURE = (BOS, EOS, THINK, END_THINK, DSML)
