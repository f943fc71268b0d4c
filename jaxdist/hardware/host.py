"""Facts of the machine that this process runs on."""

import os


def memory_bytes() -> int:
    """Reads the size of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
