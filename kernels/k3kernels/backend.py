"""The two forms that the element-wise kernels come in."""

BACKENDS = ("auto", "reference")


def check_backend(op: str, backend: str) -> None:
    """Refuse a backend that ``op`` doesn't have: "auto" is the memory-lean form, "reference" the readable one.

    The reference forms follow the published code's order of operations, so that on the CPU their fp32 results equal
    its results to the last bit.

    Raises:
        ValueError: unknown backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"The {op} backend is {backend!r}; it must be one of {', '.join(BACKENDS)}.")
