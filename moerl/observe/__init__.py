"""What a run says of itself: metrics, log files, the console, phase times, and waits that have a name and a deadline.

Flow: plain dicts and names in; `metrics.jsonl`, `logs/` and lines on the terminal out. Imports only config and errors.
"""
