"""Options are read strictly: what goes unheard would be a wrong start."""

from __future__ import annotations

import pytest

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.vllm.parts import OURS, PARTS, PluginOptions, read_options


def test_no_option_is_degarble_everywhere() -> None:
    options = read_options({"another plugin": 1})
    assert options == PluginOptions()
    assert {options.side(part) for part in PARTS} == {OURS}


def test_options_are_read() -> None:
    said = {"parts": {"attend": "vllm"}, "nvfp4_activations": "bf16", "ledger": "l.yaml"}
    options = read_options({"degarble": said})
    assert (options.side("attend"), options.side("rows")) == ("vllm", "degarble")
    assert (options.nvfp4_activations, options.ledger, options.told) == ("bf16", "l.yaml", None)


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        ([], InvalidArgument, "expected a mapping"),
        ({"degarble": 3}, InvalidArgument, "expected a mapping"),
        ({"degarble": {"part": {}}}, UnknownName, "Did you mean parts"),
        ({"degarble": {"parts": []}}, InvalidArgument, "a mapping of parts"),
        ({"degarble": {"parts": {"atend": "vllm"}}}, UnknownName, "Did you mean attend"),
        ({"degarble": {"parts": {"attend": "torch"}}}, UnknownName, "degarble or vllm"),
        ({"degarble": {"nvfp4_activations": "fp8"}}, UnknownName, "bf16 or quantised"),
        ({"degarble": {"ledger": 3}}, InvalidArgument, "expected a path"),
    ],
)
def test_the_rest_is_refused_by_name(said: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read_options(said)
