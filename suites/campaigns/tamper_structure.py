"""Tampers of names, shapes, dtypes, configs, quantisation configs, index, manifest and files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from degarble.suites.campaigns.tamper_values import TAMPERS, tamper

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from degarble.suites.campaigns.tamper_world import World

__all__ = ("TAMPERS",)

MISSING = ("structure.missing_parameter", "against.missing")
CONFIG = "against.config"
SHAPE = ("structure.shape", "against.shape")
UNREADABLE = "structure.unreadable_module"

# Tensors and names


def _drop(name: str, choose: Callable[[World], list[str]], *rules: str) -> None:
    @tamper(f"dropped: {name}", *rules)
    def plant(world: World) -> list[str]:
        gone = choose(world)
        if not gone:
            raise LookupError
        for each in gone:
            del world.tensors[each]
        return gone


def _part(suffix: str) -> Callable[[World], list[str]]:
    return lambda world: [world.pick(world.named(suffix))]


def _layer(world: World) -> list[str]:
    return [name for name in world.tensors if "layers.1." in name]


_drop("a norm", lambda w: [w.pick(w.norms)], *MISSING)
_drop("the final norm", lambda w: [n for n in ("norm.weight", "model.norm.weight")
                                   if n in w.tensors], *MISSING)  # fmt: skip
_drop("the head", _part("head.weight"), *MISSING)
_drop("the embedding", lambda w: w.named("embed_tokens.weight", "embed.weight"), *MISSING)
_drop("a linear", lambda w: w.parts(w.pick(w.linears).rpartition(".")[0]), *MISSING)
_drop("a router", _part(".gate.weight"), *MISSING)
_drop("a router's bias", lambda w: [w.pick(w.named("correction_bias", ".gate.bias"))], *MISSING)
_drop("one projection of an expert", lambda w: w.parts(w.pick(w.experts)), *MISSING)
_drop(
    "an expert",
    lambda w: [n for n in w.tensors if w.pick(w.experts[:1]).rpartition(".")[0] + "." in n],
    "structure.missing_expert", *MISSING,
)  # fmt: skip
_drop("a layer", _layer, "structure.missing_block", *MISSING)
_drop("block scales", lambda w: [w.pick(w.named(".weight_scale", ".weight_scale_inv"))],
      "scales.missing")  # fmt: skip
_drop("DeepSeek's scale", lambda w: [w.pick([n for n in w.named(".scale") if "hc" not in n])],
      "scales.missing")  # fmt: skip
_drop("a tensor scale", _part(".weight_scale_2"), "scales.missing")
_drop("an input scale", _part(".input_scale"), "scales.input_missing")


def _rename(name: str, old: str, new: str, *rules: str) -> None:
    @tamper(f"renamed: {name}", *rules)
    def plant(world: World) -> list[str]:
        chosen = world.pick([tensor for tensor in world.tensors if old in tensor])
        world.rename(chosen, chosen.replace(old, new))
        return [chosen]


NAMED = ("scales.missing", "scales.name", UNREADABLE)
_rename("weight_scale to weight_scale_inv", ".weight_scale", ".weight_scale_inv", *NAMED)
_rename("weight_scale_2 to weight_global_scale", ".weight_scale_2", ".weight_global_scale", *NAMED)
_rename("input_scale to input_global_scale", ".input_scale", ".input_global_scale",
        "scales.input_missing", "scales.name", UNREADABLE)  # fmt: skip
_rename("weight_scale_inv to weight_scale", ".weight_scale_inv", ".weight_scale", *NAMED)
_rename("a norm misspelt", "_norm.weight", "_nrom.weight", *MISSING)
_rename("a layer norm misspelt", "layernorm.weight", "layer_norm.weight", *MISSING)
_rename("codes to weight_packed", ".gate_proj.weight", ".gate_proj.weight_packed", *NAMED, *MISSING)
_rename("w1 to w2b", ".w1.weight", ".w1b.weight", *NAMED, *MISSING)
_rename("a prefix left out", "model.norm.", "norm.", *MISSING)


@tamper("renamed: experts from 1", "structure.missing_expert", *MISSING)
def _from_one(world: World) -> list[str]:
    front = world.pick(world.experts).partition(".experts.")[0] + ".experts."
    found = {}
    for name, tensor in world.tensors.items():
        if name.startswith(front):
            number, _, rest = name.removeprefix(front).partition(".")
            found[f"{front}{int(number) + 1}.{rest}"] = tensor
        else:
            found[name] = tensor
    world.tensors = found
    return [f"{front}0"]


@tamper("renamed: a layer's number", "structure.missing_block", *MISSING)
def _renumbered(world: World) -> list[str]:
    world.tensors = {n.replace("layers.1.", "layers.17."): t for n, t in world.tensors.items()}
    return ["layers.1"]


@tamper("renamed: two layers exchanged", "against.other_tensor", *SHAPE)
def _exchanged(world: World) -> list[str]:
    a, b = "layers.0.", "layers.1."
    world.tensors = {
        n.replace(a, "#").replace(b, a).replace("#", b) if "norm" in n else n: t
        for n, t in world.tensors.items()
    }
    return ["layers.1"]


# Dtypes and shapes


def _retyped(name: str, choose: Callable[[World], str], dtype: str, *rules: str) -> None:
    @tamper(f"dtype: {name}", *rules)
    def plant(world: World) -> list[str]:
        chosen = choose(world)
        world.tensors[chosen].dtype = dtype
        return [chosen]


def _codes(kind: str) -> Callable[[World], str]:
    return lambda world: f"{world.pick(getattr(world, kind))}.weight"


_DTYPE = ("scales.dtype", "structure.dtype", UNREADABLE)
_retyped("NVFP4 scales as U8", lambda w: w.pick(w.named(".weight_scale")), "U8", *_DTYPE)
_retyped("NVFP4 scales as E8M0", lambda w: w.pick(w.named(".weight_scale")), "F8_E8M0", *_DTYPE)
_retyped("NVFP4 codes as FP8", _codes("nvfp4"), "F8_E4M3", *_DTYPE, *SHAPE, "scales.block")
_retyped("FP8 codes as U8", _codes("fp8"), "U8", *_DTYPE, *SHAPE, "scales.block")
_retyped("FP8 codes as E5M2", _codes("fp8"), "F8_E5M2", *_DTYPE)
_retyped("a linear as F16", lambda w: w.pick(w.linears), "F16", "structure.dtype",
         "structure.narrowed", "against.values", "numbers.magnitude", "against.gain",
         "numbers.value_scattered")  # fmt: skip
_retyped("a norm as I32", lambda w: w.pick([n for n in w.norms if w.tensors[n].dtype == "F32"]),
         "I32", "structure.dtype", "against.dtype")  # fmt: skip


def _reshaped(name: str, choose: Callable[[World], str], *rules: str) -> None:
    @tamper(f"shape: {name}", *rules)
    def plant(world: World) -> list[str]:
        chosen = choose(world)
        before = list(world.tensors[chosen].shape)
        world.tensors[chosen].shape = before[::-1]
        if before == before[::-1]:
            raise LookupError
        return [chosen]


_reshaped("a linear transposed", lambda w: w.pick(w.linears), *SHAPE)
_reshaped("packed codes transposed", _codes("nvfp4"), *SHAPE)
_reshaped("NVFP4 scales transposed", lambda w: w.pick(w.named(".weight_scale")),
          "scales.block", "scales.rank", UNREADABLE)  # fmt: skip
_reshaped("FP8 codes transposed", _codes("fp8"), *SHAPE, UNREADABLE)


def _cut(name: str, choose: Callable[[World], str], *rules: str) -> None:
    @tamper(f"shape: {name}", *rules)
    def plant(world: World) -> list[str]:
        chosen = choose(world)
        tensor = world.tensors[chosen]
        row = len(tensor.data) // tensor.shape[0]
        tensor.shape[0] -= 1
        del tensor.data[-row:]
        return [chosen]


_cut("a linear less its last row", lambda w: w.pick(w.linears), *SHAPE)
_cut("a norm less its last value", lambda w: w.pick(w.norms), *SHAPE)
_cut("NVFP4 scales less a row", lambda w: w.pick(w.named(".weight_scale")),
     "scales.block", "scales.rank", UNREADABLE)  # fmt: skip
_cut("the embedding less a token",
     lambda w: w.pick(w.named("embed_tokens.weight", "embed.weight")), *SHAPE)  # fmt: skip


@tamper("stacked: a tensor beside values that need none", "scales.left_over", UNREADABLE)
def _left_over(world: World) -> list[str]:
    module = world.pick(world.nvfp4)
    target = world.pick(world.linears).removesuffix(".weight")
    world.tensors[f"{target}.weight_scale"] = world.tensors[f"{module}.weight_scale"].copy()
    return [f"{target}.weight_scale"]


# config.json


def _set(config: dict[str, Any], path: str, value: object) -> None:
    *front, last = path.split(".")
    if value is None and "rope_parameters" in config:
        raise LookupError  # stated there once more: nothing is lost
    for key in front:
        config = config[key]
    if last not in config or config[last] == value:
        raise LookupError
    if value is None:
        del config[last]
    else:
        config[last] = value


def _config(path: str, value: object, *rules: str, effect: bool = True) -> None:
    @tamper(f"config: {path} = {value}", CONFIG, *rules, effect=effect)
    def plant(world: World) -> list[str]:
        _set(world.config, path, value)
        return []


for _path, _value in (
    ("rope_theta", 50000.0),
    ("compress_rope_theta", 10000.0),
    ("rms_norm_eps", 1e-5),
    ("num_experts_per_tok", 3),
    ("routed_scaling_factor", 1.0),
    ("scoring_func", "softmax"),
    ("index_topk", 16),
    ("sliding_window", 64),
    ("swiglu_limit", 7.0),
    ("hc_sinkhorn_iters", 10),
    ("hc_eps", 1e-5),
    ("n_group", 2),
    ("topk_group", 4),
    ("rope_scaling.factor", 4),
    ("rope_scaling.beta_fast", 16),
    ("rope_scaling.mscale_all_dim", 0.707),
    ("rope_scaling", None),
):
    _config(_path, _value)
# V4 states a length that its positions must not exceed, so the config may contradict itself.
_config("rope_scaling.original_max_position_embeddings", 2048, "files.unreadable_config")
_UNMET = ("files.unreadable_config", *SHAPE, *MISSING)
_config("rope_scaling.type", "linear", "files.unreadable_config")
_config("norm_topk_prob", False, "files.unreadable_config")
_config("hidden_act", "gelu", "files.unreadable_config")
_config("tie_word_embeddings", True, "files.unreadable_config", "structure.unexpected")
_config("num_attention_heads", 16, *_UNMET)
_config("num_hidden_layers", 1, "structure.uncounted", *_UNMET)
_config("num_hidden_layers", 3, "structure.missing_block", *_UNMET)
_config("n_routed_experts", 16, "structure.missing_expert", *_UNMET)
_config("n_routed_experts", 4, "structure.uncounted", *_UNMET)
_config("hidden_size", 256, *_UNMET)
_config("vocab_size", 500, *_UNMET)
_config("head_dim", 256, *_UNMET)
_config("kv_lora_rank", 256, *_UNMET)
_config("first_k_dense_replace", 0, *_UNMET)
_config("num_hash_layers", 0, *_UNMET)
_config("compress_ratios", [4, 4, 128, 4], *_UNMET)
_config("architectures", ["LlamaForCausalLM"], "files.unreadable_config")
_config("model_type", "llama", "structure.unknown_model", "files.unreadable_config")
_config("transformers_version", "9.9", effect=False)


@tamper("config: missing", "structure.no_config")
def _no_config(world: World) -> list[str]:
    world.edits.append(lambda folder: (folder / "config.json").unlink())
    return []


@tamper("config: cut", "files.unreadable_config")
def _cut_config(world: World) -> list[str]:
    world.edits.append(lambda folder: (folder / "config.json").write_text("{"))
    return []


@tamper("config: a number as text", "files.unreadable_config")
def _text_config(world: World) -> list[str]:
    _set(world.config, "num_attention_heads", "eight")
    return []


# Quantisation configs


def _stated(world: World) -> list[dict[str, Any]]:
    """Return every quantisation config that the checkpoint has."""
    found = [world.config.get("quantization_config"), world.beside.get("quantization")]
    stated = [each for each in found if isinstance(each, dict)]
    if not stated:
        raise LookupError
    return stated


_CONTRADICTS = "config.contradicts"


def _algorithm(value: str, *rules: str) -> None:
    @tamper(f"quantisation: quant_algo {value}", _CONTRADICTS, *rules)
    def plant(world: World) -> list[str]:
        changed = 0
        for stated in _stated(world):
            if stated.get("quant_algo") == "NVFP4":
                stated["quant_algo"] = value
                changed += 1
            stated.pop("config_groups", None)
        if not changed:
            raise LookupError
        return []


for _value in ("FP8", "MXFP4", "INT4_AWQ", "FP8_PB_WO", "MXFP8"):
    _algorithm(_value)


def _excluded(stated: dict[str, Any]) -> tuple[str, list[str]]:
    for key in ("ignore", "exclude_modules", "modules_to_not_convert"):
        if stated.get(key):
            return key, stated[key]
    raise LookupError


def _exclusion(name: str, change: Callable[[World, list[str]], list[str]]) -> None:
    @tamper(f"quantisation: {name}", _CONTRADICTS)
    def plant(world: World) -> list[str]:
        for stated in _stated(world):
            key, listed = _excluded(stated)
            changed = change(world, list(listed))
            if changed == listed:
                raise LookupError
            stated[key] = changed
        return []


def _less(ending: str) -> Callable[[World, list[str]], list[str]]:
    return lambda _world, listed: [name for name in listed if not name.endswith(ending)]


_exclusion("the head not excluded", _less("head"))
_exclusion("an output projection not excluded", _less("1.attn.wo_a"))
_exclusion("an NVFP4 module excluded", lambda w, listed: [*listed, w.nvfp4[0]])
_exclusion("everything excluded", lambda _w, listed: [*listed, "*"])


@tamper("quantisation: all of it gone", "config.no_statement")
def _silent(world: World) -> list[str]:
    _stated(world)
    world.config.pop("quantization_config", None)
    world.beside = {}
    world.edits.append(lambda f: (f / "hf_quant_config.json").unlink(missing_ok=True))
    return []


@tamper("quantisation: groups of 32", "config.block_size_built", "config.block_size", _CONTRADICTS)
def _groups(world: World) -> list[str]:
    changed = 0
    for stated in _stated(world):
        if stated.get("group_size") == 16:
            stated["group_size"] = 32
            changed += 1
    if not changed:
        raise LookupError
    return []


@tamper("quantisation: blocks of 64", "config.block_size_built")
def _blocks(world: World) -> list[str]:
    stated = _stated(world)[0]
    if "weight_block_size" not in stated or not world.fp8:
        raise LookupError
    stated["weight_block_size"] = [64, 64]
    return []


@tamper("quantisation: an entry of quantized_layers gone", _CONTRADICTS)
def _entry(world: World) -> list[str]:
    changed = 0
    for stated in _stated(world):
        layers = stated.get("quantized_layers")
        if layers:
            del layers[next(iter(layers))]
            stated.pop("moe_quant_algo", None)
            changed += 1
    if not changed:
        raise LookupError
    return []


@tamper("quantisation: quant_method compressed-tensors", _CONTRADICTS, "config.unread_method")
def _method(world: World) -> list[str]:
    stated = world.config.get("quantization_config")
    if not stated or stated.get("quant_method") != "modelopt":
        raise LookupError
    stated["quant_method"] = "bitsandbytes"
    return []


# Index, files, manifest


def _index(name: str, change: Callable[[dict[str, Any]], None], *rules: str) -> None:
    @tamper(f"index: {name}", *rules)
    def plant(world: World) -> list[str]:
        world.index_edits.append(change)
        return []


_index("an entry missing", lambda i: i["weight_map"].popitem(), "files.not_in_index")
_index(
    "an entry of nothing",
    lambda i: i["weight_map"].__setitem__("layers.1.ghost", next(iter(i["weight_map"].values()))),
    "files.not_in_header",
)
_index(
    "an entry in a missing shard",
    lambda i: i["weight_map"].__setitem__(next(iter(i["weight_map"])), "model-00002.safetensors"),
    "files.unreadable_shard", "files.in_other_shard",
)  # fmt: skip
_index("cut", lambda i: i.clear(), "files.unreadable_index", "files.not_in_index")


def _shard(folder: Path) -> Path:
    (found,) = folder.glob("*.safetensors")
    return found


# Of the one shard nothing is left to judge: the refusal names file, tensor and offsets.
@tamper("file: cut", "files.unreadable_shard", "refused")
def _file_cut(world: World) -> list[str]:
    def edit(folder: Path) -> None:
        shard = _shard(folder)
        shard.write_bytes(shard.read_bytes()[:-100])

    world.edits.append(edit)
    return []


@tamper("file: a tensor in two shards", "files.tensor_in_two_shards", "files.stray_shard")
def _twice(world: World) -> list[str]:
    def edit(folder: Path) -> None:
        shard = _shard(folder)
        (folder / "model-00002-of-00002.safetensors").write_bytes(shard.read_bytes())
        (folder / "model.safetensors.index.json").unlink()

    world.edits.append(edit)
    return []


def _with_manifest(name: str, edit: Callable[[Path], object]) -> None:
    @tamper(f"manifest: {name}", "files.manifest")
    def plant(world: World) -> list[str]:
        world.keeps_manifest = True

        def restore(folder: Path) -> None:
            for file in world.source.iterdir():
                (folder / file.name).write_bytes(file.read_bytes())
            edit(folder)

        world.edits.append(restore)
        return []


def _flip_byte(folder: Path) -> None:
    data = bytearray(_shard(folder).read_bytes())
    data[-101] ^= 0x10
    _shard(folder).write_bytes(data)


def _stated_hash(folder: Path) -> None:
    path = folder / "manifest.json"
    raw = json.loads(path.read_text())
    record = next(iter(raw["shards"].values()))
    record["sha256"] = "0" * 64
    path.write_text(json.dumps(raw))


def _other_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 20000.0'))


_with_manifest("a bit of a shard flipped", _flip_byte)
_with_manifest("a hash changed", _stated_hash)
_with_manifest("a config changed", _other_config)
