#!/usr/bin/env python3
"""Make the warm-started tiny model of a config: `tools/make_tiny.py [deepseek | qwen3 | ...] @ configs/tiny_cpu.toml` (see
moerl/train/warmstart.py)."""

import sys

if __name__ == "__main__":
    from moerl.cli import guarded
    from moerl.train.launch import make_tiny_main

    sys.exit(guarded(make_tiny_main, sys.argv[1:]))
