"""A model's family chooses the encoding, and its checkpoint the wordings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.chat.chat import chat_of
from degarble.harness.chat.conversation import THINKING, Style
from degarble.harness.chat.dsml import ToolCall
from degarble.harness.model.presets import small_v4, small_v32
from degarble.suites.chat.talk_cases import ENCODER, TOOL, TOOLS_TEXT, system, user

if TYPE_CHECKING:
    from pathlib import Path


def test_each_family_has_its_own(tmp_path: Path) -> None:
    (tmp_path / "encoding_dsv4.py").write_text(ENCODER)
    asked = [system("S", tools=[TOOL]), user("A")]
    v4 = chat_of(small_v4(), tmp_path, Style(THINKING))
    assert TOOLS_TEXT in v4.encode(asked)
    v32 = chat_of(small_v32(), tmp_path, Style())
    assert v32.style.wordings.source is None  # that encoder is V4's
    block = '>\n<｜DSML｜invoke name="f">\n\n</｜DSML｜invoke>\n</｜DSML｜'
    said = f"\n\n<｜DSML｜function_calls{block}function_calls>"
    assert v32.parse(said).calls == (ToolCall("f", "{}"),)
    with pytest.raises(InvalidArgument, match="knows no effort"):
        chat_of(small_v32(), tmp_path, Style(THINKING, "high"))
    said = f"why</think>\n\n<｜DSML｜tool_calls{block}tool_calls>"
    assert v4.parse(said).reasoning == "why"
