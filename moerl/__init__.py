"""moerl: RL post-training of mixture-of-experts models with exact routing replay."""

__version__ = "0.1.0"
