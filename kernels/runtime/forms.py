"""Name a kernel and one of its forms, so that another process, or another night, compiles it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import DegarbleError, InvalidArgument
from degarble.kernels.runtime.kernel import Kernel, KernelSequence
from degarble.kernels.runtime.plain import from_plain, object_of_ours, to_plain

if TYPE_CHECKING:
    from degarble.kernels.runtime.compiling import CompiledKernel, CompileSettings

_WRONG = (
    DegarbleError, ImportError, AttributeError, KeyError, IndexError, TypeError, ValueError,
)  # fmt: skip


@dataclass(frozen=True)
class KernelForm:
    """A kernel by the place of its descriptor, and one of its forms."""

    kernel: str  # module:NAME, or module:NAME.number in a sequence
    form: Any

    @property
    def target(self) -> str:
        """Return the target's name."""
        name: str = self.form.target
        return name

    @property
    def name(self) -> str:
        """Return the name of the kernel's module, and of its descriptor if that has one."""
        module, _, record = self.kernel.partition(":")
        return module.rpartition(".")[2] + ("" if record == "KERNEL" else f".{record}")

    def compile(self, settings: CompileSettings) -> CompiledKernel:
        """Compile it, or take it from the cache."""
        return _kernel_at(self.kernel).compile_form(self.form, settings)

    def plain(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {"kernel": self.kernel, "form": to_plain(self.form)}

    @classmethod
    def read(cls, raw: Any) -> KernelForm:
        """Read what `plain` returned; raise for a kernel or a form that is not of this version."""
        try:
            found = cls(str(raw["kernel"]), from_plain(raw["form"]))
            _kernel_at(found.kernel)
            assert isinstance(found.target, str), "every form has a target"
        except _WRONG as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InvalidArgument(
                "form of a kernel", f"{str(raw)[:80]}: {reason}",
                "a kernel and a form of this version", "Let a night write it anew.",
            ) from error  # fmt: skip
        return found


def _kernel_at(place: str) -> Kernel[Any, Any]:
    module, _, record = place.partition(":")
    name, _, number = record.partition(".")
    found = object_of_ours(f"{module}:{name}")
    if isinstance(found, KernelSequence):
        found = found.kernels[int(number)]
    if not isinstance(found, Kernel):
        raise TypeError(place)
    return found
