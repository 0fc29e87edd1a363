"""Every setting of moerl, torch-free: files and flags in, one frozen `Config` out, or all that is wrong with it at once.

- `schema.py` all settings and their defaults; `load.py` from the command line to a `Config`
- `rules.py` rules between settings, and with the model; `native.py` `[megatron]` and `[sglang]` against what is installed
- `words.py` pydantic's errors as sentences; `show.py` a config as TOML that explains itself
"""
