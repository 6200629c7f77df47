"""How much of what was sent the peer has not taken yet."""

from __future__ import annotations

import contextlib
import struct

_INT = "i"
try:
    import fcntl
    from termios import TIOCOUTQ
except ImportError:  # a system without them
    fcntl = None  # type: ignore[assignment]


def untaken(descriptor: int) -> int:
    """Bytes in a socket's buffer that its peer has not acknowledged; 0 where it is closed or the system does not tell.

    Whether a socket can be written to does not tell it: a third of its buffer has to be free for that, which may be
    hundreds of kilobytes. ``SIOCOUTQ`` of Linux's tcp(7), which is ``TIOCOUTQ``.
    """
    answer = struct.pack(_INT, 0)
    if fcntl is not None:
        with contextlib.suppress(OSError, ValueError):
            answer = fcntl.ioctl(descriptor, TIOCOUTQ, answer)
    (count,) = struct.unpack(_INT, answer)
    return int(count)
