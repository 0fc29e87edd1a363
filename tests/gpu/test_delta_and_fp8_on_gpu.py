"""Deltas and fp8 quantisation on a GPU: the bytes are those of the CPU's, but for the rounding of scales.

Run on a machine with an NVIDIA GPU: `bash tools/test.sh tests/gpu`.
"""

import pytest
import torch

from moerl.errors import ReshardError
from moerl.reshard import delta
from moerl.reshard.delta import Form, apply, encode
from moerl.reshard.fp8 import dequantise_blocks, quantise_blocks

SEEN = torch.backends.cuda.is_built() and torch.cuda.is_available()

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not SEEN, reason="no NVIDIA GPU is visible to torch")]


@pytest.mark.parametrize("unit", [1, 2, 4])
@pytest.mark.parametrize("share", [0, 0.01, 0.4, 1])
def test_payloads_are_those_of_the_cpu(unit: int, share: float) -> None:
    count = delta._CHUNK["cuda"] + 1237
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[unit]
    old = torch.randint(0, 100, (count,), dtype=dtype)
    new = torch.where(torch.rand(count) < share, old + 1, old)
    raw = new.view(torch.uint8), old.view(torch.uint8)
    outs = torch.zeros_like(raw[0]), torch.zeros_like(raw[0]).cuda()
    found = encode(*raw, unit, outs[0])
    assert encode(*(tensor.cuda() for tensor in raw), unit, outs[1]) == found
    assert torch.equal(outs[1].cpu(), outs[0])
    base = raw[1].cuda()
    payload = raw[0].cuda() if found.kind is Form.FULL else outs[1][: found.nbytes]
    if found.kind in (Form.INDICES, Form.BITMAP):
        with pytest.raises(ReshardError):
            apply(payload[:-1], found.kind, base, unit)
        assert torch.equal(base.cpu(), raw[1])
    apply(payload, found.kind, base, unit)
    assert torch.equal(base.cpu(), raw[0])


@pytest.mark.parametrize("power_of_two", [False, True])
def test_scales_differ_from_the_cpus_by_a_rounding_at_most(power_of_two: bool) -> None:
    weight = torch.randn(1000, 700, dtype=torch.bfloat16)
    values, scales = quantise_blocks(weight, power_of_two=power_of_two)
    on_gpu = quantise_blocks(weight.cuda(), power_of_two=power_of_two)
    assert ((on_gpu[1].cpu() - scales).abs() <= scales * 2**-23).all()
    alike = on_gpu[0].cpu().view(torch.uint8) == values.view(torch.uint8)
    assert alike.float().mean() > 0.999
    back = dequantise_blocks(*on_gpu).cpu().float()
    assert torch.allclose(back, weight.float(), rtol=0.07, atol=float(scales.max()) * 2**-9)
