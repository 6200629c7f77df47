"""How much memory is free, as far as the operating system tells."""

from __future__ import annotations

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMIT, _CGROUP_USED = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


def free_memory() -> int | None:
    """Bytes that a load may take on the host without pushing anything out; None where that can't be told.

    On Linux this is ``MemAvailable``, or what the process's control group leaves where that is less.
    """
    host = _meminfo()
    if host is None:
        return _sysconf()
    group = _cgroup()
    return host if group is None else min(host, group)


def _meminfo() -> int | None:
    try:
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def _cgroup() -> int | None:
    try:
        return max(0, int(_CGROUP_LIMIT.read_text()) - int(_CGROUP_USED.read_text()))
    except (OSError, ValueError):  # no such group, or no limit ("max")
        return None


def _sysconf() -> int | None:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
