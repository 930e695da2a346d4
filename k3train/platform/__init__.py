"""Device and process groups: CUDA with NCCL, or CPU with gloo."""

from k3train.platform.device import Platform, quiet_imports, resolve_device, start, stop

__all__ = ["Platform", "quiet_imports", "resolve_device", "start", "stop"]
