"""The staging buffer: what is sent arrives with its shape and dtype, and lives for one more call."""

import numpy as np
import pytest
import torch

from nanovllm.engine.staging import FixedInputs, StagingBuffer


def arrays(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    table = rng.integers(-1, 9, (6, 10)).astype(np.int32)
    return {
        "ids": rng.integers(0, 2**40, 3),
        "table": table[:, :7],  # not contiguous
        "none": np.zeros(0, np.int64),
        "one": np.array([7], np.int32),
        "scale": rng.random(5).astype(np.float32),
        "no_rows": np.zeros((0, 4), np.int32),
        "last": rng.integers(0, 9, (2, 2)),
    }


def test_contents_shapes_and_dtypes_arrive(device: str) -> None:
    buffer = StagingBuffer(2000, torch.device(device))
    for seed in range(5):
        sent = arrays(seed)
        got = buffer.send(sent)
        assert list(got) == list(sent)
        for name, array in sent.items():
            assert got[name].shape == array.shape and str(got[name].dtype) == f"torch.{array.dtype}"
            assert got[name].device.type == device
            assert np.array_equal(got[name].cpu().numpy(), array), name


def test_tensors_are_valid_until_the_second_next_call() -> None:
    buffer = StagingBuffer(2000, torch.device("cpu"))
    first = buffer.send(arrays(0))
    buffer.send(arrays(1))
    for name, array in arrays(0).items():
        assert np.array_equal(first[name].numpy(), array), name


def test_every_array_is_aligned() -> None:
    for tensor in StagingBuffer(2000, torch.device("cpu")).send(arrays(0)).values():
        assert tensor.storage_offset() * tensor.itemsize % 64 == 0


def test_too_much_is_told_with_its_name() -> None:
    with pytest.raises(AssertionError, match="staging buffer of 64 bytes is full at b"):
        StagingBuffer(60, torch.device("cpu")).send({"a": np.zeros(8, np.int64), "b": np.zeros(1, np.int32)})


def test_fixed_inputs_stay_where_they_are(device: str) -> None:
    inputs = FixedInputs(1000, torch.device(device))
    small, large = inputs.layout(a=(3, np.int32)), inputs.layout(a=(3, np.int32), b=(5, np.int64))
    places = [t.data_ptr() for t in large.tensors.values()]
    for step in range(5):
        layout = (small, large)[step % 2]
        for name, array in layout.arrays().items():
            array[:] = np.arange(len(array)) + 10 * step + len(name)
        layout.send()
        for tensor in layout.tensors.values():
            assert tensor.tolist() == [i + 10 * step + 1 for i in range(len(tensor))]
    assert places == [t.data_ptr() for t in large.tensors.values()]


def test_the_host_arrays_of_a_step_outlive_the_next_one() -> None:
    """The copy of a step in flight may still read them, whichever layout the next step has."""
    inputs = FixedInputs(1000, torch.device("cpu"))
    first, second = inputs.layout(a=(3, np.int32)), inputs.layout(b=(2, np.int64))
    array = first.arrays()["a"]
    array[:] = 7
    second.arrays()["b"][:] = 9
    assert array.tolist() == [7, 7, 7]


def test_inputs_that_do_not_fit() -> None:
    with pytest.raises(AssertionError, match="the inputs need 128 bytes, there are 64"):
        FixedInputs(60, torch.device("cpu")).layout(a=(3, np.int32), b=(5, np.int64))
