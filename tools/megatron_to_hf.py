#!/usr/bin/env python3
"""`moerl convert megatron-to-hf`: `tools/megatron_to_hf.py SRC DST [OPTIONS]` (see docs/convert.md)."""

import sys

if __name__ == "__main__":
    from moerl.cli import main

    sys.exit(main(["convert", "megatron-to-hf", *sys.argv[1:]]))
