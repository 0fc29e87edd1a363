#!/usr/bin/env python3
"""`moerl convert hf-to-megatron`: `tools/hf_to_megatron.py SRC DST [OPTIONS]` (see docs/convert.md)."""

import sys

if __name__ == "__main__":
    from moerl.cli import main

    sys.exit(main(["convert", "hf-to-megatron", *sys.argv[1:]]))
