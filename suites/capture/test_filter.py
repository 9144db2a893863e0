from __future__ import annotations

import pytest

from degarble.harness.base.errors import InvalidArgument, Refused, UnknownName
from degarble.harness.capture.options import CaptureFilter, whole_sites
from degarble.harness.model.components import component_named, components
from degarble.suites.checkpoint.reading_cases import TINY_V4, TINY_V32

NAMES = tuple(each.name for each in components(TINY_V4))


def taken(**words: str) -> set[str]:
    wanted = CaptureFilter.of(**words)
    wanted.require_choosing(NAMES)
    return {name for name in NAMES if wanted.takes(name)}


def test_words_choose() -> None:
    assert taken() == set(NAMES)
    assert taken(layers="ends") == {n for n in NAMES if not n.startswith(("layers.", "mtp."))}
    two = taken(layers="0-1")
    assert two == {n for n in NAMES if n.startswith(("layers.0.", "layers.1."))}
    assert taken(layers="layers.1, 0") == two
    assert taken(layers="1", components="attn.w*") == {
        f"layers.1.attn.{name}" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")
    }
    assert taken(components="layers.0.ffn.gate,hc_h?ad", layers="0,ends") == {
        "layers.0.ffn.gate",
        "hc_head",
    }


def test_rows_are_those_of_the_positions() -> None:
    wanted = CaptureFilter.of(tokens="1-2,7")
    assert wanted.rows([0, 1, 2, 3, 0, 1]) == (1, 2, 5)
    assert wanted.rows([8]) == ()
    assert CaptureFilter.of().rows([8]) is None
    assert wanted.document() == {"layers": None, "components": None, "tokens": ["1-2", "7-7"]}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"layers": "x"}, "--layers"),
        ({"layers": "3-1"}, "smaller number first"),
        ({"layers": "1,"}, "Remove a comma"),
        ({"layers": "99"}, r"--layers = 'layers\.99'"),
        ({"components": "attn.wq"}, r"--components = 'attn\.wq'.*Did you mean"),
        ({"layers": "0", "components": "head"}, "a component that both choose"),
        ({"tokens": "-1"}, "--tokens"),
        ({"tokens": "1-"}, "--tokens"),
    ],
)
def test_words_that_choose_nothing_are_refused(words: dict[str, str], told: str) -> None:
    with pytest.raises(Refused, match=told) as caught:
        taken(**words)
    assert isinstance(caught.value, (InvalidArgument, UnknownName))


def test_what_has_no_row_a_token_stays_whole() -> None:
    """Shapes alone would mislead: three entries beside three tokens are not their rows."""
    attend = next(n for n in NAMES if n.endswith("attn.attend") and _compresses(n))
    whole = whole_sites(component_named(TINY_V4, attend))
    assert {"state_window", "state_compressed", "compressed", "token_offsets"} <= whole
    assert not {"q", "window", "positions", "out"} & whole
    pool = component_named(TINY_V4, attend.replace("attend", "compressor.pool"))
    assert {"out", "state_latent", "state_gate"} <= whole_sites(pool)
    assert not {"latent", "gate", "positions"} & whole_sites(pool)
    rows = component_named(TINY_V32, "layers.0.attn.attend")
    assert whole_sites(rows) & {each.name for each in rows.inputs} == {
        "state_rows", "state_expanded", "token_offsets",
    }  # fmt: skip


def _compresses(attend: str) -> bool:
    inputs = component_named(TINY_V4, attend).inputs
    return any(each.name == "compressed" for each in inputs)
