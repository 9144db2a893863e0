"""vLLM's plugin loader makes our method and model known, only where asked; the load is guarded."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, LayoutMismatch
from degarble.harness.vllm.proof import StartProof, StoredTensorFacts
from degarble.suites.hang_guard import HANG_SECONDS

pytestmark = pytest.mark.vllm

LOOK = """
from vllm.plugins import load_general_plugins
load_general_plugins()
load_general_plugins()
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
from vllm.model_executor.models.registry import ModelRegistry
known = "degarble" in QUANTIZATION_METHODS
model = ModelRegistry.models["DeepseekV4ForCausalLM"]
print(known, get_quantization_config("degarble").__name__ if known else "-", model.class_name)
"""


def loaded(plugins: str | None) -> list[str]:
    import os  # noqa: PLC0415  a process of its own, with an environment of its own

    environment = {key: value for key, value in os.environ.items() if key != "VLLM_PLUGINS"}
    if plugins is not None:
        environment["VLLM_PLUGINS"] = plugins
    done = subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, text=True, check=True, env=environment,
        timeout=HANG_SECONDS,
    )  # fmt: skip
    return done.stdout.split()[-3:]


def test_named_vllm_knows_us() -> None:
    assert loaded("degarble") == ["True", "DegarbleConfig", "DegarbleDeepseekV4"]


def test_unnamed_vllm_does_not() -> None:
    assert loaded(None) == ["False", "-", "DeepseekV4ForCausalLM"]


@pytest.fixture
def module() -> Any:
    return import_module("degarble.harness.vllm.bound.model")


def test_another_quantisation_method_is_refused(module: Any) -> None:
    config = SimpleNamespace(quant_config=SimpleNamespace())
    with pytest.raises(InvalidArgument, match="--quantization degarble"):
        module.DegarbleDeepseekV4(vllm_config=config)


class Told:
    """A start that counts how often it told."""

    def __init__(self) -> None:
        stored = {
            name: StoredTensorFacts((1,), 4, expert=False, drafter=False) for name in ("a", "b")
        }
        self.proven = StartProof("", "", "", {}, stored)
        self.told = 0

    def tell(self) -> None:
        self.told += 1


@pytest.mark.parametrize(
    ("comes", "parameters", "words"),
    [
        (("a", "b"), ("a", "b"), None),
        (("a",), ("a",), "never came"),
        (("a", "b", "c"), ("a",), "not in the checkpoint's index"),
        (("a", "b"), ("a", "b", "left"), "nothing was written to"),
    ],
)
def test_the_load_is_guarded(
    module: Any, monkeypatch: pytest.MonkeyPatch, comes: tuple[str, ...],
    parameters: tuple[str, ...], words: str | None,
) -> None:  # fmt: skip
    monkeypatch.setattr(
        module.DeepseekV4ForCausalLM, "load_weights", lambda _, stream: {name for name, _ in stream}
    )
    made = module.DegarbleDeepseekV4.__new__(module.DegarbleDeepseekV4)
    torch.nn.Module.__init__(made)
    for name in parameters:
        made.register_parameter(name, torch.nn.Parameter(torch.zeros(1)))
    begun = Told()
    made.degarble_config, made.degarble_spread = SimpleNamespace(start=begun), False
    made.degarble_ranks, made.degarble_mixes = (1, 1, 1), False
    made.model = SimpleNamespace(start_layer=0, end_layer=0)
    monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: 0)
    stream = ((name, torch.zeros(1)) for name in comes)
    if words is None:
        assert made.load_weights(stream) == {"a", "b"}
    else:
        with pytest.raises(LayoutMismatch, match=words):
            made.load_weights(stream)
    assert begun.told == (words is None)
