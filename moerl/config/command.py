"""`moerl config show` and `moerl config check`."""

from moerl.config.load import load_config, setting_paths
from moerl.config.show import to_toml
from moerl.errors import ConfigError


def main(argv: list[str]) -> int:
    """`show`: print the effective tree as TOML. `check`: say whether it is right.

    Raises:
        ConfigError: another word than show or check, or a wrong config.
    """
    action, *rest = argv or [""]
    if action not in ("show", "check"):
        raise ConfigError(f"moerl config: expected show or check, got {action!r}; for example: moerl config show @ configs/tiny_cpu.toml")
    config = load_config(rest)
    if action == "show":
        print(to_toml(config), end="")
    else:
        print(f"all {len(setting_paths())} settings are right")
    return 0
