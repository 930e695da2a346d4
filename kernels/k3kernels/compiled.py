"""What NVIDIA's compiler makes of the Triton kernels, which can be asked without a GPU.

A module with kernels says in `forms()` as what they are to be compiled: as what its own functions launch at the sizes
of the shipped models (`k3kernels.sizes`). The launches are noted, not written down a second time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

CAPABILITIES = (90, 100)  # Hopper, Blackwell
MODULES = (
    "k3kernels.situ.triton_kernel",
    "k3kernels.row_scale.triton_kernel",
    "k3kernels.attention_residual.triton_kernel",
    "k3kernels.attention_residual.phase_one_kernel",
    "k3kernels.attention_residual.merge_kernel",
    "k3kernels.rms_norm.triton_kernel",
    "k3kernels.short_conv.triton_kernel",
    "k3kernels.cross_entropy.triton_kernel",
    "k3kernels.mx.triton_kernel",
    "k3kernels.quantile_balancing.triton_kernel",
)
DTYPES = (torch.bfloat16, torch.float32)  # of activations, in which recipes train
Type = str | tuple[str, ...]


@dataclass(frozen=True)
class Form:
    """A kernel with the types of its arguments and its compile-time constants.

    `types` are Triton's ("*bf16", "i32", "fp32"), a tuple of them for a tuple of arguments; ":16" after an integer or
    a pointer promises a multiple of 16. What is in neither `types` nor `constants` is a mistake.
    """

    name: str
    kernel: Any
    types: Mapping[str, Type]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    most_registers: int = 255
    most_shared: int = 16384  # bytes


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def named(dtype: torch.dtype) -> str:
    """bf16 or fp32."""
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


@contextlib.contextmanager
def noted() -> Iterator[list[tuple[Any, dict[str, Any], dict[str, Any]]]]:
    """Kernels that would be launched inside are written to the list instead, each with its arguments and options."""
    from triton.runtime.jit import JITFunction

    found: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []
    launch = JITFunction.run

    def note(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        options = {name: named.pop(name) for name in list(named) if name not in kernel.arg_names}
        found.append((kernel, kernel.signature.bind(*args, **named).arguments, options))

    JITFunction.run = note
    try:
        yield found
    finally:
        JITFunction.run = launch


@functools.cache
def _binder(kernel: Any) -> Callable[..., tuple[dict[str, Any], list[Any], dict[str, Any]]]:
    """Triton's own function that sorts a kernel's arguments before a launch."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(GPUTarget("cuda", CAPABILITIES[0], 32))
    return create_function_from_signature(kernel.signature, kernel.params, backend)


def _specialized(kernel: Any, arguments: Mapping[str, Any]) -> tuple[dict[str, Type], dict[str, Any]]:
    """Types and constants as Triton's own launcher finds them: an integer of 1 becomes a constant, a multiple of 16 is
    promised."""
    bound, found, _ = _binder(kernel)(**arguments)
    types: dict[str, Type] = {}
    constants: dict[str, Any] = {}
    for name, (kind, promise) in zip(bound, found):
        if kind == "constexpr":
            constants[name] = bound[name]
        elif isinstance(kind, tuple):
            types[name] = tuple(part + (":16" if of == "D" else "") for part, of in zip(kind, promise))
        else:
            types[name] = kind + (":16" if promise == "D" else "")
    return types, constants


def launched(calls: Iterable[tuple[str, Callable[[], object]]], limits: Mapping[Any, tuple[int, int]]) -> list[Form]:
    """The forms that the calls launch, each once, named after its kernel and the first call that launches it.

    The calls are of functions that launch kernels, with tensors on the meta device; nothing is computed. `limits` are
    the most registers a thread and the most bytes of shared memory of each kernel.

    Raises:
        ValueError: two forms would have one name.
    """
    forms: dict[str, Form] = {}
    known: set[str] = set()
    for label, call in calls:
        with noted() as launches:
            call()
        for kernel, arguments, options in launches:
            types, constants = _specialized(kernel, arguments)
            key = repr((kernel.__name__, types, constants, options))
            if key in known:
                continue
            known.add(key)
            name = f"{kernel.__name__.removesuffix('_kernel')}, {label}"
            if name in forms:
                raise ValueError(f"Two forms are called {name!r}: say in the labels of forms() how they differ.")
            forms[name] = Form(name, kernel, types, constants, options.get("num_warps", 4), *limits[kernel])
    return list(forms.values())


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
            if text.endswith(":16"):
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
