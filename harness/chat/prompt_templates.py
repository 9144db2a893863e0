"""Prompt sentences that models were trained on, read from the encoder file of a checkpoint.

The official repositories ship `encoding/encoding_dsv4.py` (or `_dsv32.py`) with the weights. The
sentences are theirs, so they are read from there and not repeated here. The file is parsed, never
run: only assignments of plain strings count. Texts are compared with known fingerprints; another
text is used all the same, and reported by `unknown`.

Without such a file, tools, response formats and efforts are errors: a paraphrase would be another
prompt.
"""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.base.files import read_small_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PLACES = ("encoding", ".", "inference")  # folders of a checkpoint, in this order
LARGEST_FILE = 1 << 20
# A wording, and the names by which the encoders of the two families know it.
NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "tools": ("TOOLS_TEMPLATE", "TOOLS_SYSTEM_TEMPLATE"),
        "response format": ("response_format_template",),
        "effort max": ("REASONING_EFFORT_MAX",),
        "effort high": ("REASONING_EFFORT_HIGH",),
    }
)
# sha256 of the texts that were read in public copies of the official encoders.
FINGERPRINTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "tools": ("09b7269daaddbeaf11a3ed55c07b1846c35162b841d8b4301bbe0449879d1fd8",),
        "effort max": (
            "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7",  # first release
            "53fb31b8392ec5b4a926481943efc67636748f137c1a49d493a7af4d4fa55d2c",  # 0731 and 0813
        ),
    }
)


@dataclass(frozen=True)
class Wordings:
    """The sentences of one encoder; `source` is its file, None where a checkpoint has none."""

    texts: Mapping[str, str]
    source: Path | None

    def text(self, name: str) -> str:
        """Return one sentence."""
        if name not in self.texts:
            found = "no encoder beside the checkpoint" if self.source is None else str(self.source)
            raise UnreadableFile(
                f"wording of {name}",
                found,
                f"{' or '.join(NAMES[name])} in encoding/encoding_dsv4.py or encoding_dsv32.py",
                "Copy the folder `encoding` of the official repository into the checkpoint.",
            )
        return self.texts[name]

    @property
    def unknown(self) -> list[str]:
        """Name the sentences that differ from those of the public copies."""
        return [
            name
            for name, text in self.texts.items()
            if name in FINGERPRINTS
            and hashlib.sha256(text.encode()).hexdigest() not in FINGERPRINTS[name]
        ]


NOWHERE = Wordings(MappingProxyType({}), None)


def wordings_beside(folder: Path, stem: str) -> Wordings:
    """Find the encoder `stem` in a checkpoint's folder, and read its sentences."""
    for place in PLACES:
        path = folder / place / f"{stem}.py"
        if path.is_file():
            return Wordings(MappingProxyType(_texts(path)), path)
    return NOWHERE


def _texts(path: Path) -> dict[str, str]:
    raw = read_small_file(path, LARGEST_FILE)
    try:
        constants = _constants(ast.parse(raw.decode()))
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise UnreadableFile(
            "encoder", f"{path}: {error}", "a Python file with its texts as constants",
            "Copy it from the official repository again, or remove it.",
        ) from error  # fmt: skip
    return {
        name: constants[known]
        for name, spellings in NAMES.items()
        for known in spellings
        if known in constants
    }


def _constants(module: ast.Module) -> dict[str, str]:
    """Collect the module-level names of a file to which a plain string is assigned."""
    found = {}
    for statement in module.body:
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        value = getattr(statement, "value", None)
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            found.update({t.id: value.value for t in targets if isinstance(t, ast.Name)})
    return found
