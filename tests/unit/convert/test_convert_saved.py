"""Reading a tensor that torch saved within a file: always what `torch.load` returns."""

import io
import pickle
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moerl.convert import saved
from moerl.convert.saved import load_tensor
from moerl.convert.stored import _contiguous

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


@st.composite
def boxes(draw) -> tuple[list[int], list[int], list[int]]:
    """(shape, first index, length) by axis."""
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    inside = [draw(st.integers(0, size - 1)) for size in shape]
    return shape, inside, [draw(st.integers(1, size - at)) for size, at in zip(shape, inside, strict=True)]


@given(boxes())
def test_a_part_is_read_alone_exactly_if_its_elements_lie_together(box) -> None:
    shape, inside, lengths = box
    whole = torch.arange(prod(shape)).reshape(shape)
    wanted = whole[tuple(slice(at, at + length) for at, length in zip(inside, lengths, strict=True))]
    first, together = _contiguous(shape, inside, lengths), bool((wanted.flatten().diff() == 1).all())
    assert (first is not None) == together
    assert first is None or whole.flatten()[first : first + wanted.numel()].reshape(lengths).equal(wanted)


def test_a_part_of_a_place_is_read_from_its_first_element_on(tmp_path) -> None:
    value = torch.randn(6, 4).to(torch.bfloat16)
    place = saved.locate(tmp_path / "file", *written(tmp_path / "file", value))
    assert place.read(8, (2, 4)).equal(value[2:4])
