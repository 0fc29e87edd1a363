"""Which machine a process is on, as far as sharing memory goes."""

import os
from pathlib import Path


def node_name() -> str:
    """Equal for two processes exactly if each can open the other's memory: containers of one machine cannot."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
