"""What Megatron-Core and torch say on import that a run says better itself. Imports nothing heavy."""

from __future__ import annotations

import logging
import warnings


def quiet_libraries() -> None:
    """Silence what Megatron-Core and torch say about absent optional packages and their own future.

    What is absent and what is used instead is told once by the run itself, as `paths`. Call before they are imported.
    """
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\..*")
    warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex|torch.distributed is disabled).*")
    warnings.filterwarnings("ignore", message=".*argument order of load has been changed.*")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
