"""How this process keeps memory that was freed, where it is glibc's malloc that hands it out."""

from __future__ import annotations

import functools
import os

from gradbus.runtime import fast_paths

# glibc's parameters of malloc. DDS allocates and frees memory for each chunk on its way, and receives into buffers of
# 1 MiB. By default glibc gives such memory back to the kernel at once, which then has to hand out zeroed pages again:
# half of the time of a 4 MiB all_reduce over DDS went there (750 page faults a call instead of 8). The same with the
# activations of a model: a step of the CNN with 64 samples has 31,000 page faults and takes 1.5 times as long where
# 4 MiB are the limit, and 1,300 with this one. Setting it by hand ends glibc's own adapting, so it has to be large.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_PARAMETERS = (
    (_M_MMAP_THRESHOLD, 32 << 20),  # the most that glibc takes; what is larger is given back at once
    # Free memory at the end of the main arena that it keeps for the next time. It is more than a step frees: glibc 2.36
    # leaves splinters between aligned blocks, so little of it lay at the end, but 2.41 joins them. There a step that
    # frees 177 MiB on the main thread had 24,320 page faults each time with 128 MiB, and has none with this.
    (_M_TRIM_THRESHOLD, 512 << 20),
    # Room to grow, which costs nothing until it is used: threads' arenas, in heaps of 64 MiB, give an empty heap back
    # only if so much stays free in the one before it, so now they keep what they had at most. Without, a federated run
    # still had four times the page faults.
    (_M_TOP_PAD, 64 << 20),
)


@functools.cache
def keep_memory() -> bool:
    """Have malloc keep freed memory of the size of chunks and of activations. Once per process.

    False: this is not glibc, or the user has set its parameters.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    mallopt = fast_paths.mallopt()
    if mallopt is None:
        return False
    return all(mallopt(parameter, size) for parameter, size in _PARAMETERS)
