#!/usr/bin/env python3
"""Make the warm-started tiny DeepSeek-V3 of a config: `tools/make_tiny.py @ configs/tiny_cpu.toml` (see moerl/train/warmstart.py)."""

import sys

if __name__ == "__main__":
    from moerl.train.launch import make_tiny_main

    sys.exit(make_tiny_main(sys.argv[1:]))
