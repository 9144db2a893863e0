"""Families are found by their entry points, and refuse by name what they lack."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.backends.graph.decoder import Decoder
from degarble.harness.base.errors import InvalidArgument, NotBuilt, UnknownName
from degarble.harness.capture.engine.maps import vllm_component_maps
from degarble.harness.capture.modules import places_of
from degarble.harness.chat.chat import chat_of
from degarble.harness.chat.conversation import Style
from degarble.harness.checkpoint.view.consumers import consumer_of
from degarble.harness.model import registry
from degarble.harness.model.config.json_file import config_from_dict
from degarble.harness.model.family import ModelFamily, families, family_of, is_config, recognised
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.recipes import recipe_named
from degarble.harness.model.sharding import plan
from degarble.kernels.runtime.targets import SM90A
from degarble.references.traced.family import TracedConfig
from degarble.suites.model.configs import TINY_V4, TINY_V32

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TRACED: Any = TracedConfig("{}")


def test_configs_name_their_families() -> None:
    assert [family.name for family in families()] == ["deepseek_v4", "deepseek_v32", "traced"]
    for config in (TINY_V4, TINY_V32, TRACED):
        assert family_of(config).name == config.family
        assert is_config(config)
    assert not is_config(object())
    with pytest.raises(UnknownName, match="model family = 'object'"):
        family_of(object())


@pytest.mark.parametrize(
    ("raw", "family"),
    [
        ({"model_type": "deepseek_v4"}, "deepseek_v4"),
        ({"model_type": "deepseek_v32"}, "deepseek_v32"),
        ({"compress_ratios": [], "kv_lora_rank": 1, "index_topk": 1}, "deepseek_v4"),
        ({"kv_lora_rank": 1, "index_topk": 1}, "deepseek_v32"),
    ],
)
def test_config_files_are_recognised(raw: dict[str, Any], family: str) -> None:
    assert recognised(raw).name == family


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        ({"model_type": "traced"}, UnknownName),
        ({"model_type": ["deepseek_v4"]}, UnknownName),
        ({"kv_lora_rank": 1}, InvalidArgument),
    ],
)
def test_other_config_files_are_refused(raw: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="model_type"):
        config_from_dict(raw)


LACKING: dict[str, tuple[Callable[[], object], str]] = {
    "layout": (lambda: layout_named("official", TRACED), "a checkpoint layout"),
    "sharding": (lambda: plan(TRACED, tp=2), "a sharding plan"),
    "recipe": (lambda: recipe_named("nvfp4-full", TRACED), "the recipe nvfp4-full"),
    "consumer": (lambda: consumer_of("bf16", "traced"), "a checkpoint for bf16"),
    "vllm": (lambda: vllm_component_maps(TRACED), "a map of vLLM's modules"),
    "modules": (lambda: places_of(TRACED), "a map of transformers' modules"),
    "caches": (lambda: family_of(TRACED).cached_values(TRACED, 1, 1), "an estimate of caches"),
    "reference": (lambda: family_of(TRACED).reference(), "a reference by roles"),
    "vllm of V3.2": (lambda: vllm_component_maps(TINY_V32), "a map of vLLM's modules"),
}


@pytest.mark.parametrize("name", LACKING)
def test_what_a_family_lacks_is_refused_by_name(name: str) -> None:
    call, what = LACKING[name]
    with pytest.raises(NotBuilt, match=f"{what} of a model family") as refusal:
        call()
    assert refusal.value.value == ("deepseek_v32" if "V3.2" in name else "traced")
    assert refusal.value.remedy


def test_a_chat_without_encoding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotBuilt, match="a chat encoding"):
        chat_of(TRACED, tmp_path, Style())


def test_layers_of_kernels_are_refused() -> None:
    kernels, bound = SimpleNamespace(target=SM90A.name), SimpleNamespace(config=TRACED)
    with pytest.raises(NotBuilt, match="whole layers of kernels"):
        Decoder.from_model(kernels, bound, recipe_named("bf16", TRACED), 1, 1)  # type: ignore[arg-type]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A family of another distribution, and one of an older installation of this tree."""
    points = [
        SimpleNamespace(name="other", value="collections:OrderedDict"),
        SimpleNamespace(name="deepseek_v4", value="os:path"),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda **_: points)
    registry.entries.cache_clear()
    yield
    registry.entries.cache_clear()
    registry.registered.cache_clear()


@pytest.mark.usefixtures("elsewhere")
def test_families_of_other_distributions_are_found() -> None:
    assert "other" in registry.entries()
    assert registry.registered("other").__name__ == "OrderedDict"
    assert family_of(TINY_V4).name == "deepseek_v4"  # the tree's own entry comes first


def test_a_bare_family_refuses_to_read_and_write() -> None:
    class Bare(ModelFamily):
        name = "bare"

    for call in (lambda: Bare().read({}), lambda: Bare().write(None, "released")):
        with pytest.raises(NotBuilt, match=r"config\.json"):
            call()
