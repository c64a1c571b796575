"""What this machine is, without importing torch."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path


@cache
def device_kind() -> str:
    """Return "cuda" where an NVIDIA driver and a visible device exist, else "cpu"."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    return "cuda" if Path("/proc/driver/nvidia/version").exists() and not hidden else "cpu"


def describe() -> dict[str, str | int]:
    """Return the hardware facts that a report shows."""
    return {
        "device": device_kind(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
    }


def cores() -> int:
    """Return how many processor cores this process may use."""
    return len(os.sched_getaffinity(0))


def device_memory() -> int:
    """Return the bytes of memory that are free on the device that models run on."""
    if device_kind() == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(ln.split()[1]) for ln in lines if ln.startswith("MemAvailable")) * 1024


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (ln.split(":")[1].strip() for ln in lines if ln.startswith("model name")), "unknown"
    )


class PeakMemory:
    """Peak resident bytes of this process since `start`, children that ended included."""

    @staticmethod
    def start() -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:  # a container may forbid it: the peak is then that of the process's life
            return

    @staticmethod
    def read() -> int:
        import resource

        try:
            status = Path("/proc/self/status").read_text()
            own = next(int(ln.split()[1]) for ln in status.splitlines() if ln.startswith("VmHWM"))
        except (OSError, StopIteration):
            own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) * 1024
