"""One matrix product x w^T: operands, exact result, budget, and a candidate that differs from it.

Operands are read as a kernel receives them: plain values, or codes with scales of any block format.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, ShapeMismatch
from degarble.harness.base.sums import all_finite
from degarble.harness.engine.budget.budget import HEADROOM, spacing
from degarble.harness.engine.budget.rules import U, ambiguous, summed
from degarble.harness.engine.compare.compare import values_of_any
from degarble.harness.formats.codec import FORMAT_OF_DTYPE
from degarble.harness.formats.fast.buffers import empty_tensor
from degarble.harness.formats.fast.nvfp4 import dequantise_nvfp4
from degarble.harness.formats.number_formats import NVFP4, NibbleOrder, ScaleDirection
from degarble.harness.formats.quantise import QuantisedTensor, dequantise
from degarble.harness.formats.weight import Weight
from degarble.references.numerics import DecodedOperands

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.engine.budget.budget import Budget


# --------------------------------------------------------------------------------------------------
# One matrix product x w^T: its operands, exact result and budget.
#
# Operands are read as a kernel receives them: plain values, or codes with scales of any block
# format. The exact result is summed in float64. An NVFP4 tensor scale is applied after the sum, so
# that no operand is rounded on the way.
#
# Shape letters: M rows, K summed, N outputs.

PLAIN = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class MatrixOperand:
    """One side of a product, plain or quantised; its rows flatten all leading extents."""

    stored: Tensor | QuantisedTensor
    loose: Tensor | None = None  # error of values that were rounded after decoding

    @classmethod
    def from_value(cls, name: str, given: Any, *, finite: bool = False) -> MatrixOperand:
        """Wrap a tensor, quantised tensor or weight; raise for other types and for NaN or infinity.

        `finite` states that the caller has checked that already.
        """
        if isinstance(given, cls):
            return given  # checked before
        held = given
        if isinstance(given, Weight):
            held = given.quantised() if given.is_quantised else given.value
        if not isinstance(held, (torch.Tensor, QuantisedTensor)):
            raise InvalidArgument(
                name, type(given).__name__, "a tensor, a QuantisedTensor or a Weight",
                "Say what codes mean: QuantisedTensor names format, layout, direction and shape.",
            )  # fmt: skip
        if isinstance(held, torch.Tensor) and held.dtype not in PLAIN:
            raise DtypeMismatch(
                name, held.dtype, "bfloat16, float16, float32 or float64 values",
                "Pass codes as a QuantisedTensor, which says how they are read.",
            )  # fmt: skip
        require_data(name, held if isinstance(held, torch.Tensor) else held.codes)
        if len(held.shape) < 2:
            raise ShapeMismatch(
                name, tuple(held.shape), "two extents, rows and K", "Pass a vector as [1, K]."
            )
        operand = cls(_on_cpu(held))
        if not finite:
            require_finite(name, operand.values)
        return operand

    @property
    def quantised(self) -> QuantisedTensor | None:
        """Return codes and scales; None where values are plain."""
        return self.stored if isinstance(self.stored, QuantisedTensor) else None

    @cached_property
    def factor(self) -> Tensor | None:
        """Return the NVFP4 scale applied after the sum: one number, or one per row."""
        tensor = self.quantised
        if tensor is None or tensor.tensor_scale is None:
            return None
        scale = tensor.tensor_scale.double().reshape(-1)
        return scale if tensor.direction is ScaleDirection.DECODE else scale.reciprocal()

    @cached_property
    def unit(self) -> Tensor:
        """Return exact values without `factor` [rows, K]."""
        tensor = self.quantised
        if tensor is None or tensor.tensor_scale is None:
            return self.values
        one = torch.ones_like(tensor.tensor_scale)
        if tensor.format == NVFP4 and tensor.nibble_order is NibbleOrder.LOW_EVEN and not one.ndim:
            # The fast decoder pays for small tensors too: samples ask for many of them.
            scales = tensor.linear_scale_codes().contiguous()
            made = dequantise_nvfp4(tensor.codes.contiguous(), scales, one, torch.float32)
            return _rows(made)
        bare = replace(tensor, tensor_scale=one, direction=ScaleDirection.DECODE)
        return _rows(dequantise(bare, torch.float32))

    @cached_property
    def values(self) -> Tensor:
        """Return the numbers [rows, K]; with a tensor scale, the product is rounded to float32."""
        if isinstance(self.stored, torch.Tensor):
            return _rows(self.stored.detach())
        if "unit" in self.__dict__ and self.factor is not None:
            factor = self.factor.float()
            return self.unit * (factor if factor.numel() == 1 else factor[:, None])
        exact = torch.float32 if self.stored.tensor_scale is not None else torch.float64
        return _rows(dequantise(self.stored, exact))

    def rounded(self) -> MatrixOperand:
        """Return the values as BF16: decoded or cast first, then multiplied."""
        if isinstance(self.stored, torch.Tensor):
            return replace(self, stored=self.stored.to(torch.bfloat16))
        shape = (*self.leading, -1)
        rounded = self.values.to(torch.bfloat16).reshape(shape)
        return MatrixOperand(rounded, loose=ambiguous(self.values))

    @property
    def leading(self) -> tuple[int, ...]:
        """Return the extents before K; of [M, 1, K] with a tensor scale per row only M."""
        found, tensor = tuple(self.stored.shape[:-1]), self.quantised
        scale = None if tensor is None else tensor.tensor_scale
        per_row = scale is not None and scale.ndim > 0  # also where there is a single row
        return found[:-1] if per_row and found[-1] == 1 else found


@dataclass(frozen=True, eq=False)
class Product:
    """x w^T + bias; the output is rounded once to `dtype`."""

    x: MatrixOperand
    w: MatrixOperand
    dtype: torch.dtype
    bias: Tensor | None = None
    operands: DecodedOperands = DecodedOperands.EXACT

    @classmethod
    def from_operands(
        cls, x: Any, w: Any, dtype: torch.dtype, bias: Tensor | None = None
    ) -> Product:
        """Check the operands against each other and build the product."""
        product = cls(
            MatrixOperand.from_value("x", x), MatrixOperand.from_value("w", w), dtype, bias
        )
        (_, width), (count, length) = product.x.values.shape, product.w.values.shape
        if len(product.w.stored.shape) != 2 or width != length:
            raise ShapeMismatch(
                "operands", (tuple(product.x.stored.shape), tuple(product.w.stored.shape)),
                "x [..., K] and w [N, K]", "Pass the weight as rows of K, one an output.",
            )  # fmt: skip
        if bias is not None and tuple(bias.shape) != (count,):
            raise ShapeMismatch("bias", tuple(bias.shape), f"({count},)", "One number an output.")
        if bias is not None:
            require_finite("bias", bias)
        return product

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the output."""
        return (*self.x.leading, len(self.w.values))

    @cached_property
    def x_used(self) -> MatrixOperand:
        """Return x as it is multiplied, by convention."""
        coded = self.x.quantised is not None
        return self.x.rounded() if coded and self.operands is DecodedOperands.BOTH else self.x

    @cached_property
    def w_used(self) -> MatrixOperand:
        """Return the weight as it is multiplied, by convention."""
        return self.w if self.operands is DecodedOperands.EXACT else self.w.rounded()

    @cached_property
    def exact(self) -> Tensor:
        """Return the result in float64 [M, N], not rounded."""
        return self.summed_up(self.x_used.unit.double() @ self.w_used.unit.double().T)

    def summed_up(self, total: Tensor) -> Tensor:
        """Apply what follows the sum: tensor scales and bias."""
        if self.x_used.factor is not None:
            total = total * (self.x_used.factor if self.x_used.factor.numel() == 1
                             else self.x_used.factor[:, None])  # fmt: skip
        if self.w_used.factor is not None:
            total = total * self.w_used.factor
        return total if self.bias is None else total + self.bias.double()

    @property
    def expected(self) -> Tensor:
        """Return the result, rounded once."""
        return self.exact.to(self.dtype)

    def plain(self) -> Tensor:
        """Return the result in float32 throughout, as this machine's library sums it."""
        x, w = self.x_used.values.float(), self.w_used.values.float()
        made = torch.mm(x, w.T, out=empty_tensor((len(x), len(w)), torch.float32))
        return (made if self.bias is None else made + self.bias.float()).to(self.dtype)

    @cached_property
    def budget(self) -> Budget:
        """Return how far a correct kernel may differ."""
        x, w = self.x_used, self.w_used
        budget = summed(x.values, w.values, FORMAT_OF_DTYPE[self.dtype])
        if w.loose is not None:
            loose = x.values.float().abs() @ w.loose.float().T
            budget = replace(budget, slack=budget.slack + loose)
        if x.loose is not None:
            loose = x.loose.float() @ w.values.float().abs().T
            budget = replace(budget, slack=budget.slack + loose)
        if self.bias is None:
            return budget
        added = U * (self.exact.abs() + self.bias.double().abs()).float()
        words = "bias: one more rounding in float32"
        told = (*budget.derivation[:-1], words, budget.derivation[-1])
        return replace(budget, slack=budget.slack + added, derivation=told)


def _on_cpu(held: Tensor | QuantisedTensor) -> Tensor | QuantisedTensor:
    """Return the data on the CPU, where the twin is computed; copy only if needed."""
    if isinstance(held, torch.Tensor):
        return held.detach().cpu()
    scale = None if held.tensor_scale is None else held.tensor_scale.cpu()
    return replace(
        held, codes=held.codes.cpu(), block_scale=held.block_scale.cpu(), tensor_scale=scale
    )


def require_data(name: str, tensor: Tensor) -> None:
    """Raise for a tensor that is empty, sparse or without data."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        kind = "meta" if tensor.is_meta else str(tensor.layout)
        raise InvalidArgument(name, kind, "a dense tensor with data", "Pass tensor.to_dense().")
    if not tensor.numel():
        raise ShapeMismatch(
            name, tuple(tensor.shape), "one number at least", "Leave calls without rows out."
        )


def require_finite(name: str, values: Tensor) -> None:
    """Raise for a NaN or an infinity, and name the first place."""
    if not all_finite(values):
        wrong = ~values.isfinite()
        at = tuple(wrong.nonzero()[0].tolist())
        raise InvalidArgument(
            f"{name}{list(at)}", float(values[at]), "finite numbers",
            f"No kernel is right or wrong on such operands; {int(wrong.sum()):,} of "
            f"{values.numel():,} are not finite. Find where they come from.",
        )  # fmt: skip


def _rows(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1])


def excess_of(candidate: Tensor, twin: Tensor, budget: Budget) -> Tensor:
    """Return each element's difference in units of its budget; infinite where kinds differ."""
    c, t = (values_of_any(side) for side in (candidate, twin))
    slack = budget.slack.expand(twin.shape).double().numpy()
    known = np.isfinite(c) & np.isfinite(t)
    t, c = np.where(known, t, 0.0), np.where(known, c, 0.0)
    most = np.where(slack > 0, slack + spacing(np.abs(t) + slack, budget.output), 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.where(c == t, 0.0, np.abs(c - t) / most * HEADROOM)
    alike = candidate.isfinite() & twin.isfinite()
    excess: Tensor = torch.from_numpy(found)
    excess[~alike] = torch.inf
    return excess
