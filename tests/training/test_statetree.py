"""Tests of the state tree: training state is restored from disk bit by bit, without pickle."""

import math
import random

import numpy as np
import pytest
import torch

from robopolicy.training.resume import load_tree, save_tree


def roundtrip(tmp_path, tree):
    save_tree(tmp_path, tree)
    return load_tree(tmp_path)


def test_numbers_strings_and_containers_keep_their_types(tmp_path):
    tree = {"a": [1, 2.5, None, True, "x"], "b": (1, (2, [3])), "": {}, "big": 2**200 + 1, "neg": -(2**70)}
    assert roundtrip(tmp_path, tree) == tree
    assert isinstance(roundtrip(tmp_path, tree)["b"][1], tuple)


def test_floats_keep_every_bit_even_when_not_finite(tmp_path):
    back = roundtrip(tmp_path, {"x": 0.1 + 0.2, "inf": -math.inf, "nan": math.nan})
    assert back["x"] == 0.1 + 0.2
    assert back["inf"] == -math.inf
    assert math.isnan(back["nan"])


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int64", "uint8", "bool"])
def test_tensors_keep_values_and_types(tmp_path, dtype):
    tensor = torch.arange(6).reshape(2, 3).T.to(getattr(torch, dtype))  # not contiguous
    back = roundtrip(tmp_path, {"t": tensor, "scalar": tensor[0, 0], "empty": tensor[:0]})
    assert torch.equal(back["t"], tensor)
    assert back["t"].dtype == tensor.dtype
    assert back["scalar"].shape == ()
    assert back["empty"].shape == (0, 2)


def test_arrays_stay_arrays(tmp_path):
    array = np.arange(5, dtype=np.uint64) + 2**63
    back = roundtrip(tmp_path, {"a": array, "f": np.asfortranarray(np.eye(3)[:, :2])})
    assert isinstance(back["a"], np.ndarray)
    np.testing.assert_array_equal(back["a"], array)
    np.testing.assert_array_equal(back["f"], np.eye(3)[:, :2])


def test_tensors_that_share_memory_are_stored_separately(tmp_path):
    tensor = torch.arange(4.0)
    back = roundtrip(tmp_path, {"a": tensor, "b": tensor[:2]})
    back["a"].zero_()
    assert torch.equal(back["b"], torch.tensor([0.0, 1.0]))


def test_keys_with_dots_and_integer_keys_do_not_collide(tmp_path):
    tree = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, "c": {0: torch.full((1,), 2.0), "0": torch.full((1,), 3)}}
    back = roundtrip(tmp_path, tree)
    assert [back["a.b"].item(), back["a"]["b"].item(), back["c"][0].item(), back["c"]["0"].item()] == [0, 1, 2, 3]


def test_keys_that_look_like_markers_are_data(tmp_path):
    tree = {"$tensor": "x", "y": {"$pairs": [1]}}
    assert roundtrip(tmp_path, tree) == tree


def test_optimiser_state_continues_identically(tmp_path):
    def step(optimizer, weight):
        optimizer.zero_grad()
        (weight**2).sum().backward()
        optimizer.step()

    first, second = (torch.nn.Parameter(torch.arange(3.0)) for _ in range(2))
    one, two = (torch.optim.AdamW([weight], lr=0.1) for weight in (first, second))
    step(one, first)
    second.data.copy_(first.data)
    two.load_state_dict(roundtrip(tmp_path, one.state_dict()))
    step(one, first)
    step(two, second)
    assert torch.equal(first, second)


def test_random_generators_continue_identically(tmp_path):
    philox, twister = np.random.Generator(np.random.Philox(7)), random.Random(7)
    philox.standard_normal(3)
    back = roundtrip(tmp_path, {"numpy": philox.bit_generator.state, "python": twister.getstate()})
    other, again = np.random.Generator(np.random.Philox(0)), random.Random(0)
    other.bit_generator.state = back["numpy"]
    again.setstate(back["python"])
    assert other.standard_normal() == philox.standard_normal()
    assert again.random() == twister.random()


def test_objects_are_refused_and_named(tmp_path):
    with pytest.raises(TypeError, match=r"'a\.b\.1' has type object"):
        save_tree(tmp_path, {"a": {"b": [1, object()]}})
