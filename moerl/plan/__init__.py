"""What a job would take, before there is a cluster: memory of every rank, legal parallel sizes, weight-sync bytes, bounds on speed.

    settings + config.json + Assumptions --estimate--> Estimate --show--> table, JSON, or a row of Markdown
                                         --split-----> trainer and engine sizes for so many GPUs

`trainer.py` and `engine.py` count memory, `rates.py` bounds speed, `fit.py` refuses sizes that cannot work and names the nearest that can,
`split.py` searches, `command.py` is `moerl plan`.

Invariants: bytes of weights, gradients, optimizer, KV cache and sync are counted, and tests hold them against tensors that exist.
Everything else is an estimate or a bound under `Assumptions`, and is printed together with them. Only `config.json` is read; nothing
here imports torch.
"""
