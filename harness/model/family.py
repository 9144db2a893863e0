"""A model family as an object: whatever the rest of degarble has to know of it, in one place.

`ModelFamily` refuses, by name, whatever a family does not define. What belongs to higher floors
(references, kernels, chat encoders) is imported inside its methods, so that a family costs nothing
before it is used, and an audit of structure loads no torch.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from degarble.harness.base.errors import InvalidArgument, NotBuilt, Undecided, UnknownName
from degarble.harness.model.components import wired_components
from degarble.harness.model.config.config import REMEDY
from degarble.harness.model.parameters import tabled_parameters
from degarble.harness.model.registry import entries, registered, registered_for
from degarble.harness.model.site_forms import tabled_forms

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.formats.number_formats import BlockFormat
    from degarble.harness.model.components import Component, Wiring
    from degarble.harness.model.layouts import Layout, Spelling
    from degarble.harness.model.parameters import Parameter, ParameterTable
    from degarble.harness.model.recipes import Recipe, Rule
    from degarble.harness.model.sharding import ShardCut
    from degarble.harness.model.site_forms import ComponentForms, FormTable
    from degarble.harness.model.types import Block, Yarn

VIEW = "view_"  # begins an input's `via` where it is a view of its producer's output
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class ModelFamily:
    """One family of models. A config is what its `read` returns, with `family` as its name.

    Methods that raise here are what a family may lack; the others have a default that holds for a
    decoder without streams, windows, compressed entries and drafters.
    """

    name: ClassVar[str]

    def lacks(self, what: str, remedy: str) -> NotBuilt:
        """Return the refusal of something that this family does not have."""
        return NotBuilt(f"{what} of a model family", self.name, "a family that has it", remedy)

    # ---- config.json -----------------------------------------------------------------------------

    model_types: ClassVar[tuple[str, ...]] = ()  # of config.json
    # Spellings of tensor names that come with transformers' config.json, not with the released one.
    transformers_config: ClassVar[Collection[Spelling]] = ()

    def recognises(self, raw: Mapping[str, Any]) -> bool:
        """Return whether a config.json is of this family."""
        return raw.get("model_type") in self.model_types

    def read(self, raw: Mapping[str, Any]) -> Any:
        """Return the config that a config.json states."""
        del raw
        raise self.lacks("a reader of config.json", "Audit the checkpoint: it needs none.")

    def write(self, config: Any, spelling: str) -> dict[str, Any]:
        """Return a config as config.json, `released`, `transformers` or `inference`."""
        del config, spelling
        raise self.lacks("a writer of config.json", "Copy the config.json of the source.")

    def without_drafters(self, config: Any) -> Any:
        """Return the main model: drafters speed engines up and change no token."""
        return config

    # ---- structure -------------------------------------------------------------------------------

    def parameters(self, config: Any) -> tuple[Parameter, ...]:
        """List every parameter, block by block, the ends around them."""
        del config
        raise self.lacks("parameters", "Define ModelFamily.parameters, or TabledFamily's rows.")

    def components(self, config: Any, recipe: Recipe) -> tuple[Component, ...]:
        """List the components under a recipe, in the order in which they run."""
        del config, recipe
        raise self.lacks("components", "Define ModelFamily.components, or TabledFamily's wiring.")

    def forms(self, config: Any, recipe: Recipe) -> Mapping[str, ComponentForms]:
        """Return the forms of sites by component; a component that is missing may have any."""
        del config, recipe
        return _NOTHING

    def letters(self, config: Any) -> dict[str, int]:
        """Return the numbers of the shape letters that are the same in every block."""
        del config
        raise self.lacks("shape letters", "Ask for the shape of a parameter or a tensor.")

    # ---- checkpoints -----------------------------------------------------------------------------

    layouts: Mapping[str, Layout] = _NOTHING  # by name
    # By style of an engine, then by row of the parameters: how ranks cut it.
    sharding: Mapping[str, Mapping[str, ShardCut]] = _NOTHING
    # The spelling of names that vLLM's own mapper reads; None: vLLM has no model of this family.
    spelling_in_vllm: Spelling | None = None
    # Whether all experts of a layer share one input scale.
    input_scale_of_layer: ClassVar[bool] = False

    def rules(self, recipe: str, config: Any) -> tuple[Rule, ...]:
        """Return the rules of a built-in recipe; what was released counts as unquantised."""
        del config
        if recipe == "official":
            return ()
        raise self.lacks(f"the recipe {recipe}", "Write the rules as a custom recipe in YAML.")

    def is_drafters_own(self, parameter: Parameter) -> bool:
        """Return whether a parameter is one of drafters alone, which no other block has."""
        del parameter
        return False

    def with_engine_fusions(self, layout: Layout) -> Layout | None:
        """Return a layout with what exporters fuse as engines do; None where they fuse nothing."""
        del layout
        return None

    def head_groups(self, config: Any) -> tuple[int, str]:
        """Return into how many parts attention can be cut, and what they are called."""
        return config.num_attention_heads, "heads"

    def recipe_in_vllm(
        self,
        config: Any,
        linears: Sequence[tuple[Parameter, str | None]],
        stored: Recipe,
        suffixes: str,
    ) -> tuple[Recipe, tuple[str, ...]]:
        """Return the formats that vLLM builds, and patterns of names that it decodes on loading.

        `linears` come with the format of their weight, `suffixes` are those of their scales.
        """
        del config, linears, suffixes
        return stored, ()

    def format_in_vllm(self, parameter: Parameter, weight: str) -> str:
        """Return the format in vLLM's memory of a linear that is stored in another one."""
        del parameter
        return weight

    def modelopt_fields(
        self, groups: Mapping[str, Any], ignored: list[str], fused: list[str]
    ) -> dict[str, Any]:
        """Return what a config of pure NVFP4 says of linears; `fused`: vLLM's names of ignored."""
        del groups
        return {"ignore": [*ignored, *fused]}

    def fp8_scales(self, parameter: Parameter, chosen: BlockFormat) -> BlockFormat:
        """Return the FP8 format of blocks that engines read, for one that was chosen."""
        del parameter
        return chosen

    def stated_experts(self, weights: Collection[str]) -> Mapping[str, str]:
        """Return what config.json states of decoder experts of these formats, by its field."""
        del weights
        return _NOTHING

    def omitted_drafter(self, recipe: str) -> str:
        """Return why a built-in recipe leaves drafters out; empty where it does not."""
        del recipe
        return ""

    # ---- references ------------------------------------------------------------------------------

    def bound_model(self) -> type | None:
        """Return the class of bound models; None: BoundModel, over the table of `reference`."""
        return None

    def reference(self) -> Any:
        """Return the functions of its components, as a references.facts.ReferenceTable."""
        raise self.lacks("a reference by roles", "Bind the model with references.binding.bind.")

    def forward(self, bound: Any, *, absorbed: bool = True) -> Any:
        """Return the forward pass over a bound model; `absorbed`: MLA attends to latents."""
        del bound, absorbed
        raise self.lacks("a reference", "Judge its checkpoint by degarble audit.")

    # ---- facts for judging -----------------------------------------------------------------------

    def earlier_window(self, config: Any) -> int | None:
        """Return how many earlier rows a sliding window reaches; None where there is none."""
        del config
        return None

    def rows_needed(self, config: Any, component: Component, earlier: int) -> int | None:
        """Return how many of a sequence's earlier rows a memory has to keep; None for all."""
        del config, component, earlier
        return None

    def arrived(self, config: Any, via: str, made: Tensor) -> Tensor | None:
        """Return an output in the form in which it enters the next component; None if unknown."""
        del config, via, made
        return None

    def named_positions(self, config: Any, component: Component) -> dict[int, str]:
        """Return the positions at which a constant of the config begins to count, with its name."""
        del config, component
        return {}

    def rope_bases(self, config: Any) -> tuple[float, ...]:
        """Return every base of a rotation that the config states."""
        return (config.rope_theta,)

    def logit_yarn(self, config: Any) -> Yarn | None:
        """Return the YaRN that scales attention's logits; None where none does."""
        del config
        return None

    def head_widths(self, config: Any) -> tuple[int, set[int]]:
        """Return the width by which logits are scaled, and others that a kernel may confuse."""
        return config.head_dim, set()

    def cached_latent(self, config: Any) -> tuple[int, int]:
        """Return the columns of a cached row that have scales, and how many share one."""
        del config
        raise self.lacks("a latent cache", "Compare caches of another family.")

    def budget_rules(self) -> Mapping[str, Any]:
        """Return how budgets of components of its own are derived, as in engine/budget/roles.py."""
        return _NOTHING

    def attention_error(self, call: Any, laws: Any) -> tuple[Tensor, bool, tuple[str, ...]]:
        """Return how far rounding may move attention, of an engine.budget.rules.JudgeableCall.

        Add what the shares of its tokens are to `laws`, an engine.budget.attention.ShareStatistics.
        The other results are whether shares are rounded relative to a peak of the kernel's choice,
        and more sentences of the derivation.
        """
        del call, laws
        raise Undecided(
            "budget of attn.attend", self.name, "a family that derives it",
            "Define ModelFamily.attention_error, or give the component a role of its own.",
        )  # fmt: skip

    # Whether the official code stores the indexer's scores and weights in BF16.
    stores_indexer: ClassVar[bool] = False
    # Whether the norms before attention and experts return the sum that they add as well.
    norms_add_residual: ClassVar[bool] = False
    # Whether its parameters say what model it is; else fields of the config do.
    known_by_parameters: ClassVar[bool] = False

    def expert_groups(self, config: Any) -> tuple[int, int] | None:
        """Return how many groups of experts there are, and how many are chosen; None without."""
        del config
        return None

    # ---- runs ------------------------------------------------------------------------------------

    # Components that run on each sequence's last token only.
    last_token_roles: ClassVar[frozenset[str]] = frozenset({"head"})

    def value_counts(self, config: Any) -> Mapping[str, Any]:
        """Return how many values a role returns for a token: the ValueCounts of a capture."""
        del config
        return _NOTHING

    def remembered(self, config: Any, block: Block, role: str, step: Collection[Any]) -> int:
        """Return how many working values of a call grow with what its sequences had before."""
        del config, block, role, step
        return 0

    def cached_values(self, config: Any, tokens: int, piece: int) -> int:
        """Return how many values the caches of one sequence hold; prompts come in pieces."""
        del config, tokens, piece
        raise self.lacks("an estimate of caches", "Serve a model of another family.")

    # Whether conversations are rendered by the checkpoint's own chat template.
    has_chat_template: ClassVar[bool] = False
    # Whether transformers' own model of it can run in place of the reference.
    runs_in_transformers: ClassVar[bool] = False

    def chat_encoder(self) -> Any:
        """Return the module that encodes conversations."""
        raise self.lacks("a chat encoding", "Send a prompt as text, without --chat.")

    def module_places(self, config: Any) -> list[Any]:
        """Return the map from the modules of transformers to components."""
        del config
        raise self.lacks("a map of transformers' modules", "Pass a map of your own.")

    def vllm_maps(self, config: Any, ranks: int) -> list[Any]:
        """Return the maps from the modules of vLLM to components."""
        del config, ranks
        raise self.lacks(
            "a map of vLLM's modules",
            "Capture this model through our own references: leave --backend vllm out.",
        )

    def kernel_pairings(self) -> Mapping[str, Any]:
        """Return the kernels of roles that this family computes in a form of its own."""
        return _NOTHING

    def graph_decoder(self, kernels: Any, bound: Any, recipe: Recipe, size: Any) -> Any:
        """Return whole layers of kernels, for a number of lanes and of positions."""
        del kernels, bound, recipe, size
        raise self.lacks("whole layers of kernels", "Leave --graph out.")


class TabledFamily(ModelFamily):
    """A family whose structure is written down as tables, and computed by functions of its own."""

    rows: ParameterTable
    wiring: Wiring
    form_table: FormTable

    def parameters(self, config: Any) -> tuple[Parameter, ...]:
        """Return the parameters of the rows."""
        return tabled_parameters(config, self.rows)

    def components(self, config: Any, recipe: Recipe) -> tuple[Component, ...]:
        """Return the components of the wiring."""
        return wired_components(config, recipe, self.wiring)

    def forms(self, config: Any, recipe: Recipe) -> Mapping[str, ComponentForms]:
        """Return the forms of the rows."""
        return tabled_forms(config, recipe, self.form_table)

    def is_drafters_own(self, parameter: Parameter) -> bool:
        """Return whether the parameter is of the rows that only a drafter has."""
        drafts = parameter.block is not None and parameter.block.is_drafter
        return drafts and parameter.row in self.rows.drafter


# --------------------------------------------------------------------------------------------------
# The registered families


def family_of(config: Any) -> ModelFamily:
    """Return the family of a config."""
    family: ModelFamily = registered_for(config)
    return family


def is_config(value: object) -> bool:
    """Return whether a value is the config of a registered family."""
    return getattr(value, "family", None) in entries()


def family_named(name: str) -> ModelFamily:
    """Return a family by its name."""
    family: ModelFamily = registered(name)
    return family


def families() -> tuple[ModelFamily, ...]:
    """Return all registered families."""
    return tuple(family_named(name) for name in entries())


def model_types() -> tuple[str, ...]:
    """Return the `model_type` of every config.json that a family reads."""
    return tuple(kind for family in families() for kind in family.model_types)


def recognised(raw: Mapping[str, Any]) -> ModelFamily:
    """Return the family of a config.json."""
    stated = raw.get("model_type")
    if isinstance(stated, str) and stated in entries() and family_named(stated).recognises(raw):
        return family_named(stated)
    found = next((family for family in families() if family.recognises(raw)), None)
    if found is not None:
        return found
    if stated is None:
        raise InvalidArgument(
            "model_type", "missing",
            "a model_type, or the keys of an official inference config", REMEDY,
        )  # fmt: skip
    raise UnknownName.among("model_type", stated, model_types())
