"""Run V3.2's MLA by our kernels: cache rows, and absorbed attention over pages built for a call.

Absorbed attention has three steps: queries times each head's key rows of wkv_b, attention over
latents, the result times the head's value rows. The first and the last are grouped GEMMs with one
group a head. A weight that BF16 cannot represent (NVFP4 times its tensor scale) becomes a sum of up
to three BF16 matrices, concatenated along K: each product is exact, and the sum is float32.

Shape letters: T tokens, H heads, n nope width, v value width, C latent width (512), K chosen keys
in attention or inner extent of a matrix, N its outputs.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.backends.cutedsl.attention import memories, paged
from degarble.harness.backends.cutedsl.parts import NoKernelError, own
from degarble.harness.backends.cutedsl.rows import NORM_WEIGHTS, norm_weight, through_pages
from degarble.kernels.attention.problem import AttentionProblem, KeyList
from degarble.kernels.gemm.grouped_problem import GroupedProblem
from degarble.kernels.primitives.kv_problem import ROTATED, WIDTH, WITH_KEY, Pages, WriteProblem
from degarble.kernels.runtime.targets import SM90A
from degarble.references.facts import spans_of
from degarble.references.latent_attention import softmax_scale

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.backends.cutedsl.kernels import Kernels
    from degarble.harness.backends.cutedsl.parts import Compute, Outputs, Part, Work
    from degarble.harness.formats.weight import Weight
    from degarble.harness.model.config.config import V32Config

_ENTRY_OF_CACHE = {"exact": "bf16", "fp8": "fp8-v32-ue8m0", "fp8_f32": "fp8-v32"}
_PAGE = 64  # entries
_MOST_PARTS = 3  # BF16 numbers of eight bits each that add up to any float32 number's 24


def _require_rows(part: Part) -> None:
    c = part.config
    if (c.kv_lora_rank, c.qk_rope_head_dim) != (WIDTH, ROTATED):
        raise NoKernelError(
            f"rows of {c.kv_lora_rank} and {c.qk_rope_head_dim}; kernels have {WIDTH} and {ROTATED}"
        )


def cache_row(part: Part) -> Compute:
    """Write and read back rows, in the cache format that the model's arithmetic names."""
    _require_rows(part)
    switches = part.facts.numerics.switches
    kind = str(switches.kv_cache)
    if part.facts.numerics.exact or kind not in _ENTRY_OF_CACHE or switches.cache_scale_floored:
        raise NoKernelError(f"no kernel writes such {kind} entries of rows of {WITH_KEY}")
    entry = _ENTRY_OF_CACHE[kind]
    WriteProblem(1, Pages(entry, _PAGE, 1, width=WITH_KEY), source="row")

    def compute(work: Work) -> Outputs:
        rows = torch.cat((work.bf16("latent"), work.bf16("key")), dim=-1)
        return {"out": through_pages(work, own(rows), entry, {"source": "row"}, {})}

    return compute


def latent_norm(part: Part) -> Compute:
    """Norm the latent with the row-writing kernel, padded with a key of zeros."""
    _require_rows(part)
    kind, epsilon = norm_weight(part, part.name), part.facts.norm_epsilon(part.name)
    told = {"positions": 1, "epsilon": epsilon, "weight": kind, "source": "latent"}

    def compute(work: Work) -> Outputs:
        # The kernel writes rows of 576; the appended key of zeros is cut off again.
        x = work.bf16()
        rows = own(torch.nn.functional.pad(x, (0, ROTATED)))
        more = {
            "weight": work.weights.plain(part.name, NORM_WEIGHTS[kind]),
            "turns": torch.zeros(1, ROTATED, device=x.device),
            "positions": torch.zeros(len(x), dtype=torch.int64, device=x.device),
        }
        return {"out": own(through_pages(work, rows, "bf16", told, more)[:, :WIDTH])}

    return compute


def attend(part: Part) -> Compute:
    """Return the compute function of V3.2's attention over chosen latents, in its absorbed form."""
    _require_rows(part)
    c, name = part.config, part.name
    if part.facts.numerics.switches.attention_in_storage_dtype is not False:
        raise NoKernelError("the kernel's softmax is float32")
    if part.target != SM90A.name:
        raise NoKernelError(f"the kernel is written for {SM90A.name}")
    heads, nope, value = c.num_attention_heads, c.qk_nope_head_dim, c.v_head_dim
    scale, of_one = softmax_scale(c), Pages("bf16", _PAGE, 1, width=WITH_KEY)
    AttentionProblem(1, heads, KeyList(1, of_one), scale=scale)
    GroupedProblem(1, heads, WIDTH, nope)
    GroupedProblem(1, heads, value, WIDTH)

    def compute(work: Work) -> Outputs:
        assert "expanded" not in work.inputs, "a model by kernels is bound in its absorbed form"
        q, spans = work.bf16("q"), spans_of(work.inputs)
        key, of_value = work.weights.made(
            name, "absorbed",
            lambda weight: tuple(map(work.weights.there, absorbed(weight, c))),
        )  # fmt: skip
        latent = by_head(work.kernels, q[..., :nope], key).reshape(len(q), heads, WIDTH)
        query = own(torch.cat((latent, q[..., nope:]), dim=-1))
        rows = memories(work, spans, "state_rows", "rows", 1)
        # Rows of all sequences are concatenated; `chosen` counts within each sequence.
        begins = [0, *accumulate(len(each) for each in rows)]
        first = [at for at, span in zip(begins, spans, strict=False) for _ in range(span.count)]
        chosen = work.inputs["chosen"]
        start = torch.tensor(first, device=chosen.device)[:, None]
        slots = own(torch.where(chosen >= 0, start + chosen, -1).to(torch.int32))
        cache, pages = paged(work, torch.cat(rows))
        mode = "decode" if len(q) == len(spans) else "prefill"
        keys = KeyList(slots.shape[1], pages)
        problem = AttentionProblem(len(q), heads, keys, mode=mode, scale=scale)
        given: dict[str, Any] = {"window_slots": slots, "window_cache": cache}
        out = work.run("sm90_sparse_attention", problem, q=query, sink=None, **given)[0]
        return {"out": by_head(work.kernels, out, of_value)}

    return compute


def absorbed(weight: Weight, config: V32Config) -> tuple[Tensor, Tensor]:
    """Return each head's key rows of wkv_b, transposed, and its value rows, as BF16 matrices."""
    nope, value = config.qk_nope_head_dim, config.v_head_dim
    shape = (config.num_attention_heads, nope + value, WIDTH)
    per_head = weight.values(torch.float32).reshape(shape)
    return side_by_side(per_head[:, :nope].mT), side_by_side(per_head[:, nope:])


def side_by_side(weight_HNK: Tensor) -> Tensor:
    """Split float32 into the fewest BF16 parts that sum to it, concatenated along K."""
    parts: list[Tensor] = []
    rest = weight_HNK.float()
    while not parts or (len(parts) < _MOST_PARTS and bool((rest != 0).any())):
        parts.append(rest.to(torch.bfloat16))
        # Exact: the remainder of a rounding to BF16 fits in float32.
        rest = rest - parts[-1].float()
    return torch.cat(parts, dim=-1).flatten(0, 1).contiguous()


def by_head(kernels: Kernels, x_THK: Tensor, weight: Tensor) -> Tensor:
    """Multiply each head's values by its own matrix, BF16 [T, H N]."""
    tokens, heads, inner = x_THK.shape
    parts = weight.shape[1] // inner
    wide = x_THK if parts == 1 else x_THK.repeat(1, 1, parts)
    problem = GroupedProblem(tokens, heads, weight.shape[0] // heads, weight.shape[1])
    return kernels.run("sm90_gemm_grouped", problem, a=own(wide.flatten(1)), b=weight)[0]
