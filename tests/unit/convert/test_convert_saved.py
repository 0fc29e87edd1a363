"""Reading a tensor that torch saved within a file: always what `torch.load` returns."""

import io
import pickle

import pytest
import torch

from moerl.convert import saved
from moerl.convert.saved import load_tensor

BEFORE, AFTER = b"something else", b"and more"
PLAIN = {
    "bfloat16": torch.randn(3, 5).to(torch.bfloat16),
    "float32, three axes": torch.randn(2, 3, 4),
    "float64": torch.randn(7, dtype=torch.float64),
    "bytes": torch.arange(11, dtype=torch.uint8),
    "a number": torch.tensor(3.5),
    "none": torch.empty(0, 4),
    "one row": torch.randn(1, 6).T.contiguous().T,
}
UNUSUAL = {
    "fp8": torch.randn(4, 8).to(torch.float8_e4m3fn),
    "transposed": torch.randn(3, 5).T,
    "a part": torch.randn(8, 5)[2:4],
    "a parameter": torch.nn.Parameter(torch.randn(3)),
}


def written(path, value) -> tuple[int, int]:
    """Where it is in the file."""
    stream = io.BytesIO()
    torch.save(value, stream)
    path.write_bytes(BEFORE + stream.getvalue() + AFTER)
    return len(BEFORE), len(stream.getvalue())


@pytest.mark.parametrize("name", [*PLAIN, *UNUSUAL])
def test_it_is_what_torch_loads(tmp_path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    value, asked = (PLAIN | UNUSUAL)[name], []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **options: asked.append(name) or load(*args, **options))
    where = written(tmp_path / "file", value)
    found = load_tensor(tmp_path / "file", *where)
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert torch.equal(found.contiguous().view(-1).view(torch.uint8), value.detach().contiguous().view(-1).view(torch.uint8))
    assert bool(asked) == (name in UNUSUAL)


def test_what_is_cut_off_or_damaged_is_an_error(tmp_path) -> None:
    path = tmp_path / "file"
    at, nbytes = written(path, torch.randn(1000))
    whole = path.read_bytes()
    for keep in (at + nbytes // 2, at + 10):
        path.write_bytes(whole[:keep])
        with pytest.raises((OSError, RuntimeError, pickle.UnpicklingError, EOFError)):
            load_tensor(path, at, nbytes)


def test_a_file_that_ends_early_is_not_read_as_zeros(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    at, nbytes = written(path, torch.randn(1000))
    monkeypatch.setattr(saved, "fill", lambda *_: (_ for _ in ()).throw(EOFError("ends at byte 5")))
    with pytest.raises(EOFError, match="ends at byte 5"):
        load_tensor(path, at, nbytes)


def test_nothing_but_tensors_is_built(tmp_path) -> None:
    class Evil:
        def __reduce__(self):
            return (print, ("ran",))

    where = written(tmp_path / "file", Evil())
    with pytest.raises(pickle.UnpicklingError):
        load_tensor(tmp_path / "file", *where)
