"""Device and process groups: CUDA with NCCL, or CPU with gloo."""

from k3train.platform.device import Platform, quiet_libraries, resolve_device, start, stop

quiet_libraries()

__all__ = ["Platform", "quiet_libraries", "resolve_device", "start", "stop"]
