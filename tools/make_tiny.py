#!/usr/bin/env python3
"""Make the warm-started tiny DeepSeek-V3 of a config: `tools/make_tiny.py @ configs/tiny_cpu.toml` (see moerl/train/warmstart.py)."""

import sys

if __name__ == "__main__":
    from moerl.train.warmstart import main

    sys.exit(main(sys.argv[1:]))
