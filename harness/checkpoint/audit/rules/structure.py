"""Define the rules for structure: which tensors a checkpoint has, in what shapes and formats.

None of them needs a tensor's values, apart from the scalar scales that fused partners share.
"""

from __future__ import annotations

from degarble.harness.checkpoint.audit.rules.rule import Level, Rule, rules_in

_ANATOMY = "harness/model: parameters of the config"

UNKNOWN_MODEL = Rule(
    "structure.unknown_model",
    Level.NOTE,
    "config.json describes a model of a known family; otherwise each module is judged by itself",
    _ANATOMY,
)
NO_CONFIG = Rule(
    "structure.no_config",
    Level.ERROR,
    "a checkpoint's folder has a config.json: no engine loads it without, and nothing is implied",
    "transformers and vLLM 0.33 choose the model's class by its architectures",
)
UNKNOWN_SPELLING = Rule(
    "structure.unknown_spelling",
    Level.ERROR,
    "at least half of the config's parameters are found by the names of one known spelling",
    "harness/model/layouts.py",
)
MISSING_PARAMETER = Rule(
    "structure.missing_parameter",
    Level.ERROR,
    "every parameter that the config implies has its tensor",
    "faults B058, B064, B151: loaders fill in zeros, ones, or nothing at all",
)
MISSING_EXPERT = Rule(
    "structure.missing_expert",
    Level.ERROR,
    "every routed expert that the config counts is there",
    "fault B060: the slots of absent experts stay uninitialised",
)
MISSING_BLOCK = Rule(
    "structure.missing_block",
    Level.ERROR,
    "every layer that the config counts is there",
    _ANATOMY,
)
UNCOUNTED = Rule(
    "structure.uncounted",
    Level.ERROR,
    "the config counts every layer and every expert that has tensors",
    "engines build as many as the config counts, and skip the tensors of the others",
)
DRAFTER_ABSENT = Rule(
    "structure.drafter_absent",
    Level.NOTE,
    "the drafter that the config counts is there; the main model runs without it",
    "transformers drops mtp.* when it loads and saves",
)
WRONG_SHAPE = Rule(
    "structure.shape",
    Level.ERROR,
    "a tensor has the shape that the config implies",
    _ANATOMY,
)
WRONG_DTYPE = Rule(
    "structure.dtype",
    Level.ERROR,
    "an unquantised parameter is stored in a float type, an index in an integer type",
    _ANATOMY,
)
NARROWED = Rule(
    "structure.narrowed",
    Level.WARNING,
    "a parameter that is published in fp32 or bf16 keeps mantissa and range",
    "DeepSeek-V4-Pro shard headers: ape, hc_*, attn_sink and gate.bias are F32",
)
UNEXPECTED = Rule(
    "structure.unexpected",
    Level.WARNING,
    "every tensor belongs to a parameter of the config",
    "fault B062: scales under other names are skipped by loaders in silence",
)
KNOWN_EXTRA = Rule(
    "structure.known_extra",
    Level.NOTE,
    "buffers of an engine (inverse frequencies, cache scales) are no parameters of the model",
    "transformers' rotary_emb.inv_freq; ModelOpt's k_scale and v_scale",
)
ENGINE_FORM = Rule(
    "structure.engine_form",
    Level.NOTE,
    "modules are as released; those in the form of one engine or kernel are judged as that form",
    "vLLM's fused_wkv_wgate; DeepGEMM's wo_a [g, r, d] with its own scales",
)
UNREADABLE_MODULE = Rule(
    "structure.unreadable_module",
    Level.ERROR,
    "the tensors of a module together are one weight in a known format",
    "harness/checkpoint/view/modules.py",
)
COARSE_SCALES = Rule(
    "structure.coarse_scales",
    Level.NOTE,
    "FP8 has one scale a block; with one a tensor or a row its values are not judged",
    "ModelOpt's FP8 and FP8_PER_CHANNEL_PER_TOKEN; compressed-tensors' float-quantized",
)
ROUTER_QUANTISED = Rule(
    "structure.router_quantised",
    Level.ERROR,
    "the router of the experts is not quantised",
    "fault B152: 4-bit noise on router logits exceeds the margin of the top-k",
)
INDEXER_PREFIX = Rule(
    "structure.indexer_prefix",
    Level.ERROR,
    "the indexer's compressor has its own shape and its own bytes, not the main compressor's",
    "field report A, fault 4: four times too many rows, or the same tensor in silence",
)

SCALE_MISSING = Rule(
    "scales.missing",
    Level.ERROR,
    "codes have every scale of their format",
    "faults B063, B069: scales that are not there stay uninitialised, or count as 1",
)
SCALE_NAME = Rule(
    "scales.name",
    Level.ERROR,
    "scales have the names by which loaders of their format look for them, all modules alike",
    "ModelOpt 0.47 and compressed-tensors 0.20; fault B062: others are skipped in silence",
)
SCALE_LEFT_OVER = Rule(
    "scales.left_over",
    Level.ERROR,
    "no scale lies beside values that need none",
    "a loader that applies it multiplies the weight a second time",
)
SCALE_RANK = Rule(
    "scales.rank",
    Level.ERROR,
    "block scales have one entry a block, in the rank of their weight; a tensor scale has one",
    "field report A, fault 1: a 1-D scale where formatted block scales are expected",
)
SCALE_DTYPE = Rule(
    "scales.dtype",
    Level.ERROR,
    "scales have the dtype of their format",
    "field report A, fault 2; faults B009, B024: bits of one type read as another",
)
SCALE_BLOCK = Rule(
    "scales.block",
    Level.ERROR,
    "codes and scales together show the block size of a known format",
    "inferred from shapes, never from what a config claims",
)
SCALE_FROM_PACKED = Rule(
    "scales.from_packed",
    Level.ERROR,
    "NVFP4 block scales count 16 codes each, not 16 bytes",
    "fault B068: an export took the packed shape for the logical one",
)
INPUT_SCALE_MISSING = Rule(
    "scales.input_missing",
    Level.ERROR,
    "an NVFP4 module whose activations are quantised has its input_scale, every expert its own",
    "faults B006, B020: a missing input_scale is zero or garbage, and a maximum spreads it",
)
INPUT_SCALE_INSIDE = Rule(
    "scales.input_scale_inside",
    Level.ERROR,
    "weight_scale_2 does not contain the module's input_scale as a factor",
    "field report A, fault 6: weights about 5000 times too small",
)
PARTNERS_SCALE = Rule(
    "partners.tensor_scale",
    Level.ERROR,
    "gate and up of an expert or MLP share one weight_scale_2",
    "faults B002, B003, B004: engines keep one of the two for both halves",
)
PARTNERS_SCALE_FUSABLE = Rule(
    "partners.tensor_scale_fusable",
    Level.WARNING,
    "NVFP4 partners that an engine fuses (q_a and kv, kv and gate) share one weight_scale_2",
    "vLLM 0.33 packed_modules_mapping; harmless where they are dequantised one by one",
)
PARTNERS_INPUT_SCALE = Rule(
    "partners.input_scale",
    Level.WARNING,
    "fused partners share their input_scale, because they read the same activations",
    "facts of ModelOpt's V4 export: w1 and w3 take the larger of both",
)
PARTNERS_FORMAT = Rule(
    "partners.format",
    Level.ERROR,
    "gate and up, and the experts of a layer, have one format",
    "fault B066; an engine stacks them in one tensor",
)
PARTNERS_FORMAT_FUSABLE = Rule(
    "partners.format_fusable",
    Level.WARNING,
    "partners that an engine fuses have one format",
    "fault B066: one of them inherits its neighbour's format",
)

NO_STATEMENT = Rule(
    "config.no_statement",
    Level.ERROR,
    "a checkpoint with quantised weights says so in config.json or hf_quant_config.json",
    "an engine builds unquantised parameters otherwise",
)
CONTRADICTS = Rule(
    "config.contradicts",
    Level.ERROR,
    "each module has the format that the quantisation config states for it",
    "faults B062, B066: the loader builds what the config says, not what the file holds",
)
BLOCK_SIZE = Rule(
    "config.block_size",
    Level.WARNING,
    "every stated block or group size is the one that the shapes show",
    "field report A: 128 in one place and 16 in another",
)
BLOCK_SIZE_BUILT = Rule(
    "config.block_size_built",
    Level.ERROR,
    "the group or block size by which engines allocate scales is the one that the shapes show",
    "vLLM's methods for ModelOpt and FP8: as many scales as columns / group_size are expected",
)
TWO_STATEMENTS = Rule(
    "config.two_statements",
    Level.WARNING,
    "config.json and hf_quant_config.json say the same",
    "engines read one of them, ModelOpt's own tools the other",
)
IGNORE_KEEPS_SOURCE = Rule(
    "config.ignore_keeps_source",
    Level.NOTE,
    "`ignore` beside quant_method fp8 means: as in the source, FP8, and not unquantised",
    "NVIDIA's V4 exports; vLLM 0.33's FP8 config reads ignored_layers instead",
)
DRAFTER_EXPERTS = Rule(
    "config.drafter_experts",
    Level.WARNING,
    "the drafter's experts have the format of the main model's",
    "vLLM 0.33's V4 class sends MXFP4 drafter experts to the NVFP4 method: acceptance near 0 %",
)
UNREAD_STATEMENT = Rule(
    "config.unread_statement",
    Level.NOTE,
    "every word of the quantisation config is one that this audit can judge",
    "ModelOpt 0.47 and compressed-tensors 0.20",
)

RULES = rules_in(globals())
