"""A compressor hands its kernels a batch's tokens, vLLM's states and pages, and refuses others."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, LayoutMismatch
from degarble.kernels.primitives.kv_problem import KEY, Pages, WriteProblem
from degarble.suites.kernels import cache_checks
from degarble.suites.kernels.cache import compressor_checks, paged_pool_checks
from degarble.suites.kernels.latent_checks import table_of_turns

pytestmark = pytest.mark.vllm

SERVED = [(4, 512), (128, 512), (4, 128)]
ENTRIES, PADDED = 64, 4  # entries of a page; tokens of padding behind a batch
OFFSET, BETWEEN = 1152, 4608  # of a layer's page in a block, and bytes of other layers behind it


@pytest.fixture
def module() -> Any:
    return import_module("degarble.harness.vllm.bound.attention")


def bare(module: Any, ratio: int, width: int) -> Any:
    """A compressor as vLLM leaves it, without its construction, which needs a GPU."""
    made = module.DeepseekCompressor.__new__(module.DeepseekCompressor)
    torch.nn.Module.__init__(made)
    for name, value in {
        "prefix": "c", "k_cache_prefix": "k", "head_dim": width, "compress_ratio": ratio,
        "use_fp4_cache": False, "rms_norm_eps": 1e-6,
        "norm": SimpleNamespace(weight=torch.nn.Parameter(torch.ones(width).bfloat16())),
    }.items():  # fmt: skip
        object.__setattr__(made, name, value)
    return made


def packed(pages: int, used: int) -> torch.Tensor:
    """Pages of a layer that lie in blocks beside other layers' [N, used]."""
    block = OFFSET + used + BETWEEN
    whole = torch.full((pages * block,), 0x55, dtype=torch.uint8)
    return whole.as_strided((pages, used), (block, 1), OFFSET)


class Stood:
    """Definitions that stand in for the kernels, on what the kernels would be handed."""

    def __init__(self, views: list[Any]) -> None:
        self.views, self.written = views, 0

    def pooled(self, given: Any, states: Any, problem: Any) -> Any:
        """What simt_paged_pool does."""
        assert all(each.is_contiguous() for each in given)
        kinds = [str(each.dtype).removeprefix("torch.") for each in given]
        assert kinds == ["float32"] * 2 + ["int32"] + ["int64"] * 2 + ["int32", "int64"]
        assert {len(given[at]) for at in (0, 2, 3, 4, 6)} == {problem.tokens}
        pages = self.bytes_of(states)
        assert pages.shape == (problem.pages.count, problem.pages.stride)
        made = paged_pool_checks.by_stated_order(paged_pool_checks.Call(problem, given, pages))
        self.put(states, made.states)
        return made[:3]

    def write(self, rows: Any, view: Any, problem: Any) -> None:
        """What simt_kv_write does."""
        pages = self.bytes_of(view)
        assert pages.shape == (problem.pages.count, problem.pages.stride)
        self.put(view, filled(pages, rows, problem))
        self.written += int((rows[-1] >= 0).sum())

    def of(self, view: Any) -> torch.Tensor:
        """The tensor that a view of pages is of."""
        found: list[torch.Tensor] = [x for x in self.views if x.data_ptr() == view.data_ptr()]
        assert len(found) == 1
        return found[0]

    def bytes_of(self, view: Any) -> torch.Tensor:
        """A view's pages with what lies behind each, as the kernel addresses them."""
        found = self.of(view)
        assert (view.shape[0], view.stride()) == (len(found), (found.stride(0), 1))
        pages = torch.full(view.shape, 0x55, dtype=torch.uint8)
        pages[:, : found.shape[1]] = found
        return pages

    def put(self, view: Any, pages: torch.Tensor) -> None:
        """Write back what a layer may write; the rest has to be as it was."""
        found = self.of(view)
        assert bool((pages[:, found.shape[1] :] == 0x55).all())
        found.copy_(pages[:, : found.shape[1]])


def filled(pages: torch.Tensor, rows: Any, problem: Any) -> torch.Tensor:
    """Pages with what rows leave there: values, weight, turns, positions, slots."""
    case = cache_checks.Case(problem)
    names = ("values", "weight", "turns", "positions", "slots")
    case.__dict__.update(zip(names, rows, strict=True))
    case.__dict__["cache"] = pages.clone
    return cache_checks.by_definition(case)


def context_of(call: paged_pool_checks.Call) -> Any:
    """What vLLM says of a batch: padding behind its slots, each list as its own builder cuts it."""
    _, _, requests, _, slots, table, entries = call.tensors
    padded = torch.cat((slots, torch.full((PADDED,), -1)))
    own = SimpleNamespace(slot_mapping=padded, token_to_req_indices=requests, block_table=table)
    return SimpleNamespace(attn_metadata={"s": own, "k": SimpleNamespace(slot_mapping=entries)})


@pytest.mark.parametrize(("ratio", "width"), SERVED)
def test_entries_are_the_definitions_call_by_call(
    module: Any, monkeypatch: pytest.MonkeyPatch, ratio: int, width: int
) -> None:
    """Two sequences, a prompt in chunks and steps of decoding, on packed pages."""
    case = compressor_checks.Case(ratio, width, ((ratio + 2, 0), (ratio - 3, 5), (1, 1)), seed=2)
    pages, _ = paged_pool_checks.pages_of(case)
    of_states = packed(pages.count, pages.rows * pages.row_bytes)
    of_states.fill_(0xFF)
    rows = of_states.view(torch.float32).unflatten(1, (pages.rows, -1))
    entry, nbytes = module.ENTRIES[width]
    held = Pages(entry, ENTRIES, 4, width=width)
    whole = packed(4, held.stride)
    cache = whole[:, : ENTRIES * nbytes].unflatten(1, (ENTRIES, nbytes))
    compressor = bare(module, ratio, width)
    for name, value in {
        "ape": torch.nn.Parameter(case.ape),
        "state_cache": SimpleNamespace(prefix="s", kv_cache=rows),
        "_static_forward_context": {"k": SimpleNamespace(kv_cache=cache)},
    }.items():
        object.__setattr__(compressor, name, value)
    module.adopt_compressor(compressor)
    assert type(compressor) is module.DegarbleCompressor
    stood = Stood([of_states, whole])
    monkeypatch.setattr(module, "pooled", stood.pooled)
    monkeypatch.setattr(module, "written", stood.write)
    rotary = SimpleNamespace(cos_sin_cache=table_of_turns(2 * ratio + 9))
    states = paged_pool_checks.empty_states(case)
    wanted = torch.full((4, held.stride), 0x55, dtype=torch.uint8)
    for part in compressor_checks.calls(case):
        call = paged_pool_checks.call_of(case, part, states)
        made = paged_pool_checks.by_stated_order(call)
        states = made.states
        told = (rotary.cos_sin_cache, made.positions, made.slots)
        problem = WriteProblem(len(made.slots), held, len(told[0]))
        wanted = filled(wanted, (made.values, torch.ones(width).bfloat16(), *told), problem)
        context = context_of(call)
        monkeypatch.setattr(module, "get_forward_context", lambda context=context: context)
        projected, positions = call.tensors[0], call.tensors[3]
        padding = torch.full((PADDED, projected.shape[1]), torch.nan)
        compressor.forward(
            torch.cat((projected, padding)), torch.cat((positions, positions[:1])), rotary
        )
        assert torch.equal(whole, wanted)
    assert stood.written == sum(length // ratio for length in case.lengths) > 0
    used = states[:, : of_states.shape[1]]
    assert torch.equal(of_states, used)


def test_nothing_runs_while_vllm_measures_its_memory(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compressor = bare(module, 4, 512)
    module.adopt_compressor(compressor)
    context = SimpleNamespace(attn_metadata=None)
    monkeypatch.setattr(module, "get_forward_context", lambda: context)
    compressor.forward(torch.zeros(3, 4096), torch.arange(3), None)


def test_what_is_not_written_is_refused(module: Any) -> None:
    for name, value in (("use_fp4_cache", True), ("head_dim", 64)):
        compressor = bare(module, 4, 128)
        object.__setattr__(compressor, name, value)
        with pytest.raises(InvalidArgument, match=r"parts\.compressor = vllm"):
            module.adopt_compressor(compressor)
    with pytest.raises(InvalidArgument, match="class of a compressor"):
        module.adopt_compressor(SimpleNamespace())
    for cache in (torch.zeros(2, 64, 584), torch.zeros(2, 64, 132, dtype=torch.uint8)):
        with pytest.raises(LayoutMismatch, match="kv-cache-dtype fp8"):
            module.require_entries(bare(module, 4, 512), cache)
    assert module.ENTRIES[128][0] == KEY
