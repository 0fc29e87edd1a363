"""The platform's uneven gather and reduce-scatter: right, and still needed."""


def test_stock_uneven_gather_still_fails_over_gloo(torchrun):
    output = torchrun(2, "uneven_worker.py", "stock", timeout_s=120).stdout
    assert "stock failed" in output, output[-2000:]
    assert "stock works" not in output, "gloo gathers uneven sizes now: remove the patch"


def test_patched_uneven_collectives_are_right(torchrun):
    output = torchrun(2, "uneven_worker.py", "patched", timeout_s=120).stdout
    assert output.count("patched right") == 2, output[-2000:]
