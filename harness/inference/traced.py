"""Open a checkpoint of any model that transformers can build, as a traced reference.

Names, shapes and operations between files and parameters are transformers' own. A checkpoint's code
is never run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import (
    MissingDependency,
    NotBuilt,
    ShapeMismatch,
    UnreadableFile,
)
from degarble.harness.checkpoint.read.types import unknown_name
from degarble.harness.checkpoint.view.converted import (
    ConvertedWeights,
    NamingRules,
    RenamedTensor,
)
from degarble.harness.checkpoint.view.quantisation_configs import CONFIG, InputFormats, cache_format
from degarble.harness.formats.number_formats import BLOCK_FORMATS
from degarble.harness.formats.weight import Weight
from degarble.harness.inference.weights import WINDOW
from degarble.harness.model.parameters import parameters
from degarble.harness.model.recipes import Recipe, Rule
from degarble.harness.model.types import Kind
from degarble.references.traced.family import (
    TracedConfig,
    cached_heads,
    logical_name,
    transformers_config,
)
from degarble.references.traced.trace import built

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn

    from degarble.harness.checkpoint.view.converted import StoredModule
    from degarble.harness.checkpoint.view.view import Checkpoint


def traced_config(checkpoint: Checkpoint) -> TracedConfig:
    """Return the config of a checkpoint whose family has no reference of its own."""
    if not checkpoint.config:
        raise UnreadableFile(
            "config.json",
            f"{'unreadable' if (checkpoint.root / CONFIG).exists() else 'none'} in"
            f" {checkpoint.root.name}",
            "the model's config.json",
            "Copy config.json from the model's own repository into the folder of its shards.",
        )  # fmt: skip
    try:
        with _quiet():
            import transformers.modeling_utils  # noqa: F401, PLC0415  heavy, and optional
    except ImportError as error:
        raise MissingDependency(
            "transformers", "absent", "the package that builds this model",
            "pip install 'degarble[models]'",
        ) from error  # fmt: skip
    config = TracedConfig.of(checkpoint.config)
    # Of latent attention engines cache the latents, which the traced model never holds.
    latent = "kv_lora_rank" in config.raw
    return (
        config if latent else replace(config, cache=cache_format(checkpoint.quantisation.values()))
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep warnings of what transformers imports from the terminal: they are of no use here."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def meta_model(config: TracedConfig) -> nn.Module:
    """Build transformers' model on the meta device, without memory for its weights."""
    return built(transformers_config(config.text), config.torch_dtype)


def naming_rules(config: TracedConfig) -> NamingRules:
    """Return how transformers names the parameters of a model in files."""
    model: Any = meta_model(config)
    held = config.graph.trace.parameters
    wanted = {name: tensor.shape for name, tensor in held.items()}
    ignored = model._keys_to_ignore_on_load_unexpected or ()  # noqa: SLF001  no other way to ask
    # transformers moved these into the model, and passes over them in older files.
    moved = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")
    tied = {
        name: source
        for name, source in model.all_tied_weights_keys.items()
        if name not in wanted and source in wanted
    }
    return NamingRules(wanted, _renaming(model), tied, (*ignored, *moved), model)


def _renaming(model: Any) -> Callable[[str], RenamedTensor]:
    """Return how transformers' loader renames a stored tensor, as its loop over files does."""
    from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415
    from transformers.core_model_loading import (  # noqa: PLC0415  heavy, as above
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix, known = model.base_model_prefix, model.state_dict()

    def rename(stored: str) -> RenamedTensor:
        name, pattern = rename_source_key(stored, renamings, converters, prefix, known)
        if name not in known and stored in known:
            name, pattern = rename_source_key(stored, [], [], prefix, known)
        if pattern is None:
            return RenamedTensor(name)
        return RenamedTensor(name, pattern, by_pattern[pattern])

    return rename


def traced_recipe(checkpoint: Checkpoint, config: Any, weights: TracedWeights) -> Recipe:
    """Return the formats of the linears, and of their inputs, as the files hold and state them."""
    stated = InputFormats(checkpoint.quantisation.values())
    rules = []
    for parameter in parameters(config):
        held = weights.held(parameter.name) if parameter.kind is Kind.LINEAR else ()
        formats = {each.format for each in held}
        if len(formats) != 1 or "" in formats:
            continue  # values, or experts in several formats
        (weight,) = formats
        inputs = {stated.of(each.name, weight) for each in held}
        form = BLOCK_FORMATS.get(next(iter(inputs)) or "") if len(inputs) == 1 else None
        # Without calibrated scales NVFP4 is one of weights alone, whatever is stated.
        plain = form is None or (form.tensor_scale and not all(one.has_input_scale for one in held))
        width = parameter.shape[-1]
        if form is not None and len(held) > 1 and any(each.has_factors for each in held):
            raise NotBuilt(
                f"inputs of {parameter.name}", f"{form.name} with factors (pre_quant_scale)",
                "quantised inputs of experts without factors, or factors of plain ones",
                "Remove the format of their inputs from config.json to judge a run that leaves"
                " them as they are.",
            )  # fmt: skip
        if form is None or plain or (form.block[1] and width % form.block[1]):
            rules.append(Rule(parameter.name, weight))
        else:
            rules.append(Rule(parameter.name, weight, form.name))
    return Recipe("as stored", tuple(rules))


class TracedWeights(Mapping[str, "Weight"]):
    """The parameters of a traced model by logical name, each read anew at every use."""

    def __init__(self, checkpoint: Checkpoint, config: TracedConfig) -> None:
        self._checkpoint = checkpoint
        self.converted = ConvertedWeights(checkpoint, naming_rules(config))
        self.converted.require_complete()
        self._names = {logical_name(name): name for name in self.converted}
        # A vision tower may have layers of the same names, which no run of texts reads.
        read = {name for traced in config.whole.components for name in traced.parameters}
        self._names |= {logical_name(name): name for name in self.converted if name in read}
        stored = {logical_name(name): at for name, at in self.converted.cache_scales.items()}
        heads = cached_heads(config)
        self._cache = {name: (stored.get(name), count) for name, count in heads.items()}
        self.read = 0  # bytes of all weights that were read
        self._unreleased = 0  # bytes of them whose pages may still lie in memory
        self.on_read: Callable[[int, str], None] | None = None  # with each weight's size and name

    def __getitem__(self, name: str) -> Weight:
        if name in self._cache:
            return self._cache_scale(*self._cache[name])
        if name not in self._names:
            raise KeyError(name) from unknown_name("parameter", name, self._names)
        own = self._names[name]
        if self._unreleased >= WINDOW:
            self._checkpoint.release()
            self._unreleased = 0
        size = self.converted.nbytes(own)
        self.read += size
        self._unreleased += size
        if self.on_read is not None:
            self.on_read(size, name)
        return self.converted[own]

    def __iter__(self) -> Iterator[str]:
        yield from self._names
        yield from self._cache

    def __len__(self) -> int:
        return len(self._names) + len(self._cache)

    def _cache_scale(self, entry: str | None, heads: int) -> Weight:
        """Return the scales of keys or values; engines take 1 where none is stored."""
        scale = torch.ones(()) if entry is None else self._checkpoint.tensor(entry).float()
        if scale.numel() not in {1, heads}:
            raise ShapeMismatch(
                str(entry), list(scale.shape), f"one number, or one for each of {heads} heads",
                "Quantise the cache by one scale a layer or a head.",
            )  # fmt: skip
        return Weight(value=scale.reshape(() if scale.numel() == 1 else -1))

    def single(self, name: str) -> str | None:
        """Return the stored module that holds a parameter alone and as it is; None without one."""
        return self.converted.sources[self._names[name]].single

    def held(self, name: str) -> tuple[StoredModule, ...]:
        """Return the stored modules that a parameter is made of."""
        return self.converted.held(self._names[name])

    def modules(self, name: str) -> list[str]:
        """Return the stored modules that a parameter is made of."""
        return list(self.converted.sources[self._names[name]])

    def by_expert(self, name: str, count: int) -> tuple[tuple[str, ...], ...]:
        """Return the stored modules of each expert; where they are one stack, names made for it."""
        source = self.converted.sources[self._names[name]]
        alone = tuple(source.modules.values())
        if source.single is None and all(len(modules) == count for modules in alone):
            return tuple(zip(*alone, strict=True))
        front, _, leaf = name.rpartition(".")
        return tuple((f"{front}.{number}.{leaf}",) for number in range(count))

    @property
    def stored(self) -> dict[str, str]:
        """Return the parameter of each stored module that holds one alone."""
        sources = self.converted.sources.items()
        names = {each.single: name for name, each in sources if each.single}
        return {
            stored: logical_name(name)
            for stored, name in names.items()
            if self._names[logical_name(name)] == name
        }

    @property
    def total(self) -> int:
        """Bytes of all weights of the model."""
        return sum(map(self.converted.nbytes, self.converted))

    def expect(self, names: Iterable[str]) -> None:
        """Ignore which weights come next: pages are read when they are used."""

    def close(self) -> None:
        """Release the memory of pages that were read."""
        self._checkpoint.release()
