"""Device and process groups: CUDA with NCCL, or CPU with gloo."""

from k3train.platform.device import Platform, adapt, resolve_device, start, stop
from k3train.quiet import quiet_libraries

quiet_libraries()

__all__ = ["Platform", "adapt", "resolve_device", "start", "stop"]
