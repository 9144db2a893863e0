"""Record a run of a transformers model by the components of its trace.

Hooks stand at every boundary of the trace and at the attention function. Each forward pass fills in
the tensors of the trace by number; a component's call is sent as soon as all of its tensors are
known, and a tensor that no later component reads is dropped. What lies between boundaries is seen
without a hook: its inputs are what earlier boundaries returned, its output is what the next one is
given.
"""

from __future__ import annotations

import inspect
from collections import Counter
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.capture.files.records import Phase
from degarble.harness.model.components import components
from degarble.references.traced.attention import MASK, MASKED, admitted_keys
from degarble.references.traced.evaluate import joined, view_of
from degarble.references.traced.family import STATE, is_sequential, transformers_config
from degarble.references.traced.trace import EAGER, BoundaryKind, buffers_as_built

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

    from degarble.harness.capture.recorder import Recorder
    from degarble.references.traced.family import TracedConfig
    from degarble.references.traced.graph import Graph, TracedComponent
    from degarble.references.traced.trace import Boundary, ModuleExit, TracedTensor


_CACHES = ("past_key_values", "cache_params")


class TracedRecorder:
    """Feeds a recorder with the component calls of a transformers model."""

    def __init__(self, config: Any, recorder: Recorder, first_sequence: int = 0) -> None:
        self._first = first_sequence
        self._config = config
        self._graph: Graph = config.graph
        self._recorder = recorder
        self._components = tuple(zip(components(config), self._graph.components, strict=True))
        self._boundaries: dict[str, list[Boundary]] = {}
        for boundary in self._graph.trace.boundaries:
            self._boundaries.setdefault(boundary.path, []).append(boundary)
        self._exits: dict[str, list[ModuleExit]] = {}
        for module in self._graph.trace.modules:
            self._exits.setdefault(module.path, []).append(module)
        # A model may run a module more than once in a pass.
        self._begun: Counter[str] = Counter()
        self._left: Counter[str] = Counter()
        caches = [each for each in self._graph.trace.boundaries if each.kind is BoundaryKind.CACHE]
        self._caches = {(cache.facts["layer"], len(cache.inputs)): cache for cache in caches}
        self._passed = {
            output.number: source.number
            for cache in caches
            for source, output in zip(cache.inputs.values(), cache.outputs, strict=True)
        }
        self._paths: dict[int, str] = {}
        self._values: dict[int, Tensor] = {}
        self._earlier: dict[int, Tensor] = {}
        # Inputs of recurrent components by their names [sequences, time, ...]: of all earlier calls
        self._kept: dict[str, dict[str, Tensor]] = {}
        self._next = 0
        self._shape = (0, 0)
        self._past = 0
        self._positions = torch.arange(0)
        # Which columns of the batch are no padding, those of earlier calls included.
        self._padding: Tensor | None = None
        self._columns = torch.ones(0, 0, dtype=torch.bool)  # the same of the last call
        self._wanted = _counted(self._graph)
        self._waiting: Counter[int] = Counter()

    def install(self, model: nn.Module, stack: ExitStack) -> None:
        """Hook every module, and stand in for the attention function that the model chose."""
        known = dict(model.named_modules())
        missing = [path for path in self._boundaries if path not in known]
        if missing:
            raise InvalidArgument(
                "model", type(model).__name__, f"a model with the module {missing[0]}",
                "Capture the model that the config describes.",
            )  # fmt: skip
        self._require_loaded(model)
        self._paths = {id(module): path for path, module in known.items()}
        begin = model.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True)
        stack.callback(begin.remove)
        for path in {*self._boundaries, *self._exits}:
            self._watch(path, known[path], stack)
        end = model.register_forward_hook(self._end)
        stack.callback(end.remove)
        stack.enter_context(_attention_seen(self))

    def _require_loaded(self, model: nn.Module) -> None:
        """Raise where tables are those of a model that was built in a narrow dtype, not loaded.

        Other tables than a loaded model's are judged.
        """
        held, tables = dict(model.named_buffers()), self._graph.trace.buffers
        odd = [
            name
            for name in tables
            if name in held and not held[name].is_meta and not _equal(held[name], tables[name])
        ]
        if not odd:
            return
        text, dtype = self._config.text, self._config.torch_dtype
        coarse = buffers_as_built(transformers_config(text), dtype)
        if all(_equal(held[name], coarse[name]) for name in odd):
            raise InvalidArgument(
                "model", odd[0], f"a model that was loaded: this table was computed in {dtype}",
                "Save the model and load it: save_pretrained(FOLDER), from_pretrained(FOLDER).",
            )  # fmt: skip

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Record every forward pass of a model; the hooks are removed on exit."""
        with ExitStack() as stack:
            self.install(model, stack)
            yield

    def _begin(self, model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = named.get("input_ids", args[0] if args else None)
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
            raise InvalidArgument(
                "input_ids", type(ids).__name__, "token ids [batch, time]",
                "Call the model with its tokens.",
            )  # fmt: skip
        if torch.is_autocast_enabled(ids.device.type):
            raise InvalidArgument(
                "autocast", str(torch.get_autocast_dtype(ids.device.type)),
                "a model that computes in the dtype of its config",
                "Load the model in that dtype, and run it outside of torch.autocast.",
            )  # fmt: skip
        cache = named.get(cache_argument(model))
        self._past = self._length_of(cache)
        self._shape = batch, time = ids.shape[0], ids.shape[1]
        seen = self._seen_columns(model, named.get("attention_mask"))
        self._padding, self._columns = None if bool(seen.all()) else seen, seen
        positions = (seen.cumsum(1) - 1)[:, self._past :]
        self._require_counted(model, named.get("position_ids"), positions)
        owners = torch.arange(self._first, self._first + batch)[:, None].expand(-1, time)
        self._positions = self._unpadded(positions.flatten())
        phase = Phase.DECODE if self._past and time == 1 else Phase.PREFILL
        tokens = self._unpadded(ids.flatten())
        self._recorder.begin(
            phase, tokens.tolist(), self._positions.tolist(),
            self._unpadded(owners.flatten()).tolist(),
        )  # fmt: skip
        trace = self._graph.trace
        self._values = {
            trace.tokens.number: tokens,
            trace.positions.number: self._positions,
        }
        self._waiting = Counter(self._wanted)
        self._next = 0
        self._begun.clear()
        self._left.clear()

    def _seen_columns(self, model: nn.Module, mask: Any) -> Tensor:
        """Return which columns of the batch, those of earlier calls included, are no padding."""
        batch, time = self._shape
        shape = batch, self._past + time
        masks = list(mask.values()) if isinstance(mask, dict) else [mask]  # of each kind of layer
        if masks == [None] and not isinstance(mask, dict):
            return torch.ones(shape, dtype=torch.bool)
        if isinstance(mask, dict):
            mask = mask.get("full_attention", next(iter(masks), None))
        seen = torch.ones(shape, dtype=torch.bool) if mask is None else mask
        if isinstance(mask, torch.Tensor) and mask.ndim == 4:
            seen = self._seen_by_queries(mask)
        elif isinstance(mask, torch.Tensor) and mask.ndim == 2:
            seen = mask[:, : shape[1]]  # a static cache has room for more
        if not isinstance(seen, torch.Tensor) or seen.shape != shape:
            raise InvalidArgument(
                "attention_mask", list(getattr(mask, "shape", [])),
                f"which tokens are no padding {list(shape)}, the same for all queries",
                "Record the model without a mask of its own.",
            )  # fmt: skip
        self._require_own_masks(model, masks, seen.bool().cpu())
        if not bool(seen.all()) and self._needs_every_row:
            raise InvalidArgument(
                "attention_mask", f"{int((seen == 0).sum())} tokens of padding",
                "no padding for this model, whose layers run along the tokens or compute masks",
                "Record its sequences one after another.",
            )  # fmt: skip
        return seen.bool().cpu()

    def _seen_by_queries(self, mask: Tensor) -> Tensor | None:
        """Return which columns are no padding by a mask of all queries; None by other ones.

        generate() makes such masks where a cache is static. One of a sliding window hides earlier
        tokens, and has columns for as many as the cache keeps.
        """
        batch, time = self._shape
        first = max(0, self._past + time - mask.shape[-1])
        admitted = self._admitted(mask)
        if admitted.shape[:2] != (batch, time):
            return None
        new = admitted[..., self._past - first :].diagonal(dim1=1, dim2=2)
        known = self._columns.shape == (batch, self._past)
        earlier = self._columns if known else admitted[:, -1, : self._past]
        if earlier.shape[1] != self._past:
            return None
        seen = torch.cat([earlier, new], 1)
        known = any(self._is_made_by(by, mask, seen) for by in (None, *self._mask_functions()))
        return seen if known else None

    def _admitted(self, mask: Tensor) -> Tensor:
        """Return which keys each new token sees by a mask, for as many as there are so far."""
        last = self._past + self._shape[1]
        admitted = (mask if mask.dtype is torch.bool else mask >= 0)[:, 0]
        return admitted[..., : min(last, mask.shape[-1])].cpu()

    def _mask_functions(self) -> list[Any]:
        """Return the functions by which the model itself masks attention."""
        found = (
            each.facts.get(MASK)
            for each in self._graph.trace.boundaries
            if each.kind is BoundaryKind.ATTENTION and MASK not in each.inputs
        )
        return list({id(by): by for by in found}.values())

    def _is_made_by(self, by: Any, mask: Tensor | None, seen: Tensor) -> bool:
        """Return whether a mask is that of a function, where no query is padding; None: causal."""
        time, last = self._shape[1], self._past + self._shape[1]
        first = 0 if mask is None else max(0, last - mask.shape[-1])
        begins = seen.int().argmax(1)  # where a sequence counts its positions from
        own = torch.stack(
            [admitted_keys(by, time, last - first, first - begin) for begin in begins.tolist()]
        )
        causal = admitted_keys(None, time, last)[None]
        admitted = causal if mask is None else self._admitted(mask)
        own &= seen[:, None, first:]
        if admitted.shape[1:] != own.shape[1:]:
            return False
        return not bool(((admitted != own) & seen[:, self._past :, None]).any())

    def _require_own_masks(self, model: Any, masks: list[Any], seen: Tensor) -> None:
        """Raise where masks that generate() made for a model are not those that it makes itself.

        Gemma 3 that looks ahead is given causal ones where its cache is static.
        """
        made = [each for each in masks if each is None or each.ndim == 4]
        plain = getattr(model.config, "_attn_implementation", "") in {EAGER, "sdpa"}
        if len(made) < len(masks) or not plain:
            return
        for by in self._mask_functions():
            if not any(self._is_made_by(by, mask, seen) for mask in made):
                raise InvalidArgument(
                    "attention_mask", [list(each.shape) for each in made if each is not None],
                    "the masks that this model makes itself: generate() made others",
                    "Record it with a cache that grows, not a static one.",
                )  # fmt: skip

    @property
    def _needs_every_row(self) -> bool:
        return any(
            each.is_recurrent
            or any(self._graph.trace.tensors[ref.number].columns for ref in each.inputs.values())
            for each in self._graph.components
        )

    def _require_counted(self, model: nn.Module, stated: Any, positions: Tensor) -> None:
        """Raise where the positions of tokens are not those that count the tokens before them."""
        batch, time = self._shape
        real = self._padding
        if isinstance(stated, torch.Tensor):
            given = stated.cpu().expand(*stated.shape[:-2], batch, time)
        elif "position_ids" in inspect.signature(type(model).forward).parameters:
            given = torch.arange(self._past, self._past + time).expand(batch, -1)
        else:
            return  # a model that counts by itself
        off = given != positions
        if real is not None:
            off = off & real[:, self._past :]
        if bool(off.any()):
            raise InvalidArgument(
                "position_ids", int(given[off][0]),
                f"{int(positions.expand_as(given)[off][0])}: how many tokens of its sequence came",
                "Record sequences that begin at 0, unpacked; with padding on the left pass"
                " position_ids, as generate() does.",
            )  # fmt: skip

    def _unpadded(self, rows: Tensor, end: int | None = None) -> Tensor:
        """Leave out the rows of padding; rows are the last columns in front of `end`."""
        batch, time = self._shape
        count, last = len(rows) // batch, self._past + time
        if count > last:  # a static cache has room for more
            rows, count = rows.unflatten(0, (batch, count))[:, :last].flatten(0, 1), last
        if self._padding is None:
            return rows
        end = last if end is None else end
        return rows[self._padding[:, end - count : end].flatten().to(rows.device)]

    def _length_of(self, cache: Any) -> int:
        """Return how many tokens of each sequence came before, and drop what no cache continues."""
        try:
            length = 0 if cache is None else int(cache.get_seq_length())
        except ValueError:  # a cache of recurrent states alone does not count
            known = [rows.shape[1] for kept in self._kept.values() for rows in kept.values()]
            length = known[0] if known and cache.has_previous_state() else 0
        if not length:
            self._kept.clear()
        return length

    def _watch(self, path: str, module: nn.Module, stack: ExitStack) -> None:
        # A run may put another function in the place of `forward`: callers use the class's names.
        signature = inspect.signature(type(module).forward)
        boundaries = [
            boundary for boundary in self._boundaries.get(path, ())
            if boundary.kind not in {BoundaryKind.ATTENTION, BoundaryKind.CACHE}
        ]  # fmt: skip
        exits: Sequence[Boundary | ModuleExit] = boundaries or self._exits.get(path, ())

        def before(_module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            bound = signature.bind(module, *args, **named).arguments
            for boundary in boundaries[self._begun[path] :][:1]:
                for name, ref in boundary.inputs.items():
                    self._take(ref.number, bound[name])
            self._begun[path] += 1
            self._send()
            self._uncached()
            self._send()

        def after(_module: nn.Module, _args: Any, _named: Any, returned: Any) -> None:
            for left in exits[self._left[path] :][:1]:
                for ref, tensor in zip(left.outputs, _tensors(returned), strict=False):
                    self._take(ref.number, tensor)
            self._left[path] += 1
            self._send()

        for hook in (
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        ):
            stack.callback(hook.remove)

    def attended(self, module: nn.Module, given: dict[str, Tensor], out: Tensor) -> None:
        """Take what attention is given and returns."""
        path = self._paths.get(id(module), "")
        calls = [
            each for each in self._boundaries.get(path, ()) if each.kind is BoundaryKind.ATTENTION
        ]
        key = f"{path}.attention"
        for boundary in calls[self._begun[key] :][:1]:
            for name, ref in boundary.inputs.items():
                if name in given:
                    self._take(ref.number, given[name])
            self._take(boundary.outputs[0].number, out)
        self._begun[key] += 1
        self._send()

    def cached(self, layer: int, new: Sequence[Tensor], whole: Sequence[Tensor]) -> None:
        """Take the new rows of a cache, and all rows that it gives back."""
        boundary = self._caches.get((layer, len(new)))
        if boundary is None:
            return
        for ref, tensor in zip(boundary.inputs.values(), new, strict=True):
            self._take(ref.number, tensor)
        for (_, ref), number, held, own in zip(
            boundary.inputs.items(), boundary.outputs, whole, new, strict=True
        ):
            tensor = held[..., : self._past + own.shape[-2], :]  # a static cache has room for more
            count = tensor.shape[-2] - own.shape[-2]
            if count:
                traced = self._graph.trace.tensors[ref.number]
                rows = self._rows(tensor[..., :count, :], traced)
                self._earlier[ref.number] = self._unpadded(rows, self._past)
            self._take(number.number, tensor)
        self._send()

    def _uncached(self) -> None:
        """Let the new rows pass a cache that the run does without."""
        if self._next >= len(self._components):
            return
        _, traced = self._components[self._next]
        if traced.kind is BoundaryKind.CACHE:
            for source, output in zip(traced.inputs.values(), traced.outputs.values(), strict=True):
                if self._is_known(source.number):
                    self._values.setdefault(output.number, self._value(source.number))

    def _take(self, number: int, tensor: Any) -> None:
        edge = self._graph.edges.get(number)
        # Positions are known; a model may hold them once for each of several axes.
        if edge is not None and self._graph.trace.positions in edge.sources:
            return
        if isinstance(tensor, torch.Tensor) and number not in self._values:
            traced = self._graph.trace.tensors[number]
            rows = self._rows(tensor, traced)
            rows = rows if traced.token_axis is None else self._unpadded(rows)
            if traced.storage in self._graph.trace.overwritten:
                rows = rows.clone()
            self._values[number] = rows
            # Without a cache attention is given the new rows themselves.
            passed = self._passed.get(number)
            if passed is not None:
                self._values.setdefault(passed, rows)

    def _rows(self, tensor: Tensor, traced: TracedTensor) -> Tensor:
        """Return a tensor with one row a token of all sequences in front."""
        axis = traced.token_axis
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)  # as numbers, which files can hold
        if axis is None:
            return tensor
        if axis and traced.shape[0] == 1:
            rows = tensor.movedim(axis, 1)
            if rows.shape[0] != self._shape[0]:  # such as angles, alike for every sequence
                rows = rows.expand(self._shape[0], *rows.shape[1:])
            return rows.flatten(0, 1)
        if traced.rows > 1:
            return tensor.reshape(-1, traced.rows, *tensor.shape[1:])
        rows = tensor.movedim(axis, 0)
        batch, time = self._shape
        if rows.shape[0] == time < batch * time:  # positions, alike for every sequence
            rows = rows.repeat(batch, *[1] * (rows.ndim - 1))
        return rows

    def _send(self) -> None:
        """Send the calls of all components whose tensors are known by now, in order."""
        while self._next < len(self._components):
            component, traced = self._components[self._next]
            numbers = [ref.number for ref in (*traced.inputs.values(), *traced.outputs.values())]
            if not all(self._is_known(number) for number in numbers):
                return
            self._next += 1
            inputs = {name: self._value(ref.number) for name, ref in traced.inputs.items()}
            outputs = {name: self._value(ref.number) for name, ref in traced.outputs.items()}
            if is_sequential(traced):
                inputs |= self._state(traced)
            whole = not traced.is_recurrent or self._keep(component.name, inputs, traced.whole)
            if whole and self._recorder.chooses(component.name) and not self._recorder.idle:
                taken = self._recorder.before(component.name, inputs)
                self._recorder.after(component.name, taken, inputs, outputs)
            for number in {*numbers, *self._sources(numbers)}:
                self._waiting[number] -= 1
                if self._waiting[number] <= 0:
                    self._values.pop(number, None)

    def _keep(self, name: str, inputs: dict[str, Tensor], whole: frozenset[str]) -> bool:
        """Add a recurrent component's earlier inputs to a call, and keep those of the call.

        Return False where the run began before it was recorded.
        """
        batch, time = self._shape
        earlier = self._kept.get(name, {})
        known = {"positions", "token_offsets", *whole}
        own = [key for key in inputs if key not in known]
        if any(rows.shape[:2] != (batch, self._past) for rows in earlier.values()) or (
            self._past and own and not earlier
        ):
            return False
        new = {key: inputs[key].unflatten(0, (batch, time)) for key in own}
        self._kept[name] = {
            key: joined([earlier[key], rows], 1) if earlier else rows for key, rows in new.items()
        }
        inputs |= {f"{STATE}{key}": rows.flatten(0, 1) for key, rows in earlier.items()}
        return True

    def _state(self, traced: TracedComponent) -> dict[str, Tensor]:
        batch, time = self._shape
        found = {
            f"{STATE}{name}": self._earlier.pop(ref.number)
            for name, ref in traced.inputs.items()
            if ref.number in self._earlier
        }
        if traced.kind is not BoundaryKind.CACHE:
            found = {}
        offsets = torch.arange(0, batch * time + 1, time)
        if self._padding is not None:
            counts = self._padding[:, self._past :].sum(1)
            offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return {**found, "positions": self._positions, "token_offsets": offsets}

    def _sources(self, numbers: list[int]) -> set[int]:
        edges = self._graph.edges
        return {source.number for n in numbers if n in edges for source in edges[n].sources}

    def _is_known(self, number: int) -> bool:
        edge = self._graph.edges.get(number)
        known = number in self._values
        return known or (edge is not None and all(s.number in self._values for s in edge.sources))

    def _value(self, number: int) -> Tensor:
        if number in self._values:
            return self._values[number]
        return view_of(self._graph.trace, self._graph.edges[number], self._values, number)

    def _end(self, _model: nn.Module, _args: Any, returned: Any) -> None:
        logits = getattr(returned, "logits", returned)
        if isinstance(logits, torch.Tensor):
            self._take(self._graph.trace.logits.number, logits)
        self._send()
        self._values.clear()


def cache_argument(model: nn.Module) -> str:
    """Return the name under which a model takes and returns its cache: Mamba has its own."""
    named = inspect.signature(model.forward).parameters
    return next((name for name in _CACHES if name in named), _CACHES[0])


def _counted(graph: Graph) -> Counter[int]:
    """Count how often each tensor is read by a component, so that it can be dropped after."""
    found: Counter[int] = Counter()
    for traced in graph.components:
        numbers = {ref.number for ref in (*traced.inputs.values(), *traced.outputs.values())}
        for number in tuple(numbers):
            if number in graph.edges:
                numbers |= {source.number for source in graph.edges[number].sources}
        found.update(numbers)
    return found


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return _tensors(tuple(value.values()))
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in _tensors(part)]
    return []


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.cpu().to(other.dtype), other)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as it is added to scores; one of bools says which keys are seen."""
    if mask.dtype is torch.bool:
        hidden = max(MASKED, torch.finfo(dtype).min)
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, hidden)
    return mask.clamp(min=max(MASKED, torch.finfo(mask.dtype).min))


@contextmanager
def _attention_seen(recorder: TracedRecorder) -> Iterator[None]:
    """Wrap the attention function that the model looks up for as long as it is recorded."""
    from transformers.cache_utils import Cache  # noqa: PLC0415  heavy
    from transformers.modeling_utils import AttentionInterface  # noqa: PLC0415

    chosen = AttentionInterface.get_interface

    def interface(registry: AttentionInterface, name: str, default: Any) -> Any:
        function = chosen(registry, name, default)

        def attention(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Any = None,
            **named: Any,
        ) -> Any:
            made = function(module, query, key, value, attention_mask, **named)
            given = {"query": query, "key": key, "value": value}
            if isinstance(attention_mask, torch.Tensor):
                given[MASK] = _added(attention_mask, query.dtype)
            recorder.attended(module, given, made[0])
            return made

        return attention

    updating, indexing = Cache.update, Cache.update_indexer

    def update(
        cache: Any, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **named: Any
    ) -> Any:
        new = keys.clone(), values.clone()  # a static cache may give back its own memory
        whole = updating(cache, keys, values, layer_idx, *args, **named)
        recorder.cached(layer_idx, new, whole)
        return whole

    def update_indexer(cache: Any, keys: Tensor, layer_idx: int) -> Any:
        new = keys.clone()
        whole = indexing(cache, keys, layer_idx)
        recorder.cached(layer_idx, [new], [whole])
        return whole

    def exchanged(_cache: Any, *_: Any, **__: Any) -> None:
        raise InvalidArgument(
            "generate()", "a cache whose sequences change places", "one cache for each sequence",
            "Record a run without beams: num_beams=1.",
        )  # fmt: skip

    with (
        mock.patch.multiple(
            Cache,
            reorder_cache=exchanged,
            batch_repeat_interleave=exchanged,
            batch_select_indices=exchanged,
        ),  # fmt: skip
        mock.patch.object(AttentionInterface, "get_interface", interface),
        mock.patch.object(Cache, "update", update),
        mock.patch.object(Cache, "update_indexer", update_indexer),
    ):
        yield


@contextmanager
def recording(
    model: nn.Module, config: TracedConfig, recorder: Recorder, first_sequence: int = 0
) -> Iterator[None]:
    """Record every forward pass of a transformers model; the hooks are removed on exit.

    `first_sequence` is the number of the first sequence of a batch in the whole run.
    """
    with TracedRecorder(config, recorder, first_sequence).watching(model):
        yield
