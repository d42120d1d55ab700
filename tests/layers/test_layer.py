"""Layer is a module in every respect but hooks."""

import copy

import torch
from torch import Tensor, nn

from nanovllm.layers.layer import Layer


class Scale(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Twice(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = Scale(), nn.ModuleList([Scale()])

    def forward(self, x: Tensor) -> Tensor:
        return self.rest[0](self.first(x))


class Renamed(Twice):
    """Without a forward of its own."""


def test_parameters_and_children_are_those_of_a_module():
    model = Renamed()
    assert list(model.state_dict()) == ["first.weight", "rest.0.weight"]
    assert len(list(model.parameters())) == 2 and len(list(model.modules())) == 4
    model.load_state_dict({"first.weight": torch.full((3,), 2.0), "rest.0.weight": torch.full((3,), 5.0)})
    assert model(torch.ones(3)).tolist() == [10.0] * 3


def test_what_replaces_a_parameter_or_child_is_used():
    model = Twice()
    model.first.weight = nn.Parameter(torch.full((3,), 3.0))
    assert model(torch.ones(3)).tolist() == [3.0] * 3
    model.first = Scale()
    assert model(torch.ones(3)).tolist() == [1.0] * 3
    assert list(model.state_dict()) == ["first.weight", "rest.0.weight"]
    del model.first.weight
    assert not hasattr(model.first, "weight") and list(model.state_dict()) == ["rest.0.weight"]


def test_moves_and_copies():
    model = Twice().bfloat16()
    assert model(torch.ones(3, dtype=torch.bfloat16)).dtype == torch.bfloat16
    other = copy.deepcopy(model)
    other.first.weight.data.fill_(4)
    assert other(torch.ones(3)).tolist() == [4.0] * 3 and model(torch.ones(3)).tolist() == [1.0] * 3
