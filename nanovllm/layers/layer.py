"""What the parts of a model are made of: torch modules that cost no more than the functions they are."""

from typing import Any

from torch import nn


class Layer(nn.Module):
    """A module without forward hooks: a call is its forward, and reading a parameter or child is reading an attribute.

    Parameters, children, state_dict and the like are those of nn.Module. What is left out, its dispatch of hooks and
    its search for attributes, takes a third of the time in which the host launches a step without a graph.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in cls.__dict__:
            cls.__call__ = cls.forward  # type: ignore[method-assign]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, (nn.Parameter, nn.Module)):
            self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        if name in self._parameters or name in self._modules:
            del self.__dict__[name]
        super().__delattr__(name)
