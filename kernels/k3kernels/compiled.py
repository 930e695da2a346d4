"""What NVIDIA's compiler makes of the Triton kernels, which can be asked without a GPU.

A module with kernels says in `forms()` as what they are to be compiled: at the shapes of the published K3.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CAPABILITIES = (90, 100)  # Hopper, Blackwell
MODULES = (
    "k3kernels.situ.triton_kernel",
    "k3kernels.attention_residual.triton_kernel",
    "k3kernels.attention_residual.phase_one_kernel",
    "k3kernels.attention_residual.merge_kernel",
    "k3kernels.rms_norm.triton_kernel",
    "k3kernels.short_conv.triton_kernel",
    "k3kernels.cross_entropy.triton_kernel",
    "k3kernels.mx.triton_kernel",
    "k3kernels.quantile_balancing.triton_kernel",
)
Type = str | tuple[str, ...]


@dataclass(frozen=True)
class Form:
    """A kernel with the types of its arguments and its compile-time constants.

    `types` are Triton's ("*bf16", "i32", "fp32"), a tuple of them for a tuple of arguments; ":16" after an integer
    promises that it is a multiple of 16, as pointers always are. What is in neither is a mistake.
    """

    name: str
    kernel: Any
    types: Mapping[str, Type]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    most_registers: int = 255
    most_shared: int = 16384  # bytes


@dataclass(frozen=True)
class Report:
    """A thread's registers and spilled bytes (stores), and a program's bytes of shared memory."""

    registers: int
    spilled: int
    shared: int


def all_forms() -> list[Form]:
    """The forms of every kernel of this package. Needs Triton."""
    return [form for module in MODULES for form in importlib.import_module(module).forms()]


def compile_form(form: Form, capability: int) -> Report:
    """Compile for sm_`capability`, past Triton's cache, and read what ptxas says.

    Raises:
        KeyError: an argument has neither a type nor a constant.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = form.kernel.arg_names
    signature, attributes = {}, {}
    for index, name in enumerate(names):
        if name in form.constants:
            signature[name] = "constexpr"
            continue
        given = form.types[name]
        parts = given if isinstance(given, tuple) else (given,)
        for part, text in enumerate(parts):
            if text.startswith("*") or text.endswith(":16"):
                path = (index, part) if isinstance(given, tuple) else (index,)
                attributes[path] = [["tt.divisibility", 16]]
        plain = tuple(text.removesuffix(":16") for text in parts)
        signature[name] = plain if isinstance(given, tuple) else plain[0]
    source = ASTSource(form.kernel, signature, constexprs=dict(form.constants), attrs=attributes)
    log = io.StringIO()
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        triton.knobs.compilation.always_compile = triton.knobs.nvidia.dump_ptxas_log = True
        target = GPUTarget("cuda", capability, 32)
        binary = triton.compile(source, target=target, options={"num_warps": form.num_warps})
    text = log.getvalue()
    spilled = [int(number) for number in re.findall(r"(\d+) bytes spill stores", text)]
    registers = re.search(r"Used (\d+) registers", text)
    if registers is None or not spilled:
        raise RuntimeError(f"ptxas said nothing of registers and spills of {form.name}: {text[-500:]}")
    return Report(int(registers.group(1)), sum(spilled), binary.metadata.shared)
