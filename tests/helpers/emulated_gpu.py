"""An emulated GPU: tensors that are computed on the CPU, report `cuda` as device, and do not mix with CPU tensors.

Within `emulated_gpu()` every tensor made on or moved to `cuda` is a `GpuTensor`. An operator on a `GpuTensor` and a
CPU tensor raises, as on a GPU; so do a generator of the other device and a conversion to numpy without `cpu()`. Not
emulated: tensors that torch makes inside composite operators or in a backward pass, and forward-mode derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

GPU = torch.device("cuda", 0)
_Generator = torch.Generator
_INDEXING = ("aten::index",)  # operators whose indices may be on the CPU
_generators: list[torch.Generator] = []  # generators of the GPU
_inside: list[str] = []  # running composite operators of torch


class GpuTensor(Tensor):
    """Stores its values in `inner`, a CPU tensor."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> GpuTensor:
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        made = Tensor._make_wrapper_subclass(cls, inner.shape, device="cpu", **layout)
        made.inner = inner
        return made

    @property
    def device(self) -> torch.device:
        return GPU

    @property
    def is_cuda(self) -> bool:
        return True

    def tolist(self) -> Any:
        return self.inner.tolist()

    def numpy(self, *args: Any, **options: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    __array__ = numpy

    def cpu(self) -> Tensor:
        return self.to("cpu")

    def __deepcopy__(self, memo: dict[int, Any]) -> GpuTensor:
        if id(self) not in memo:
            copied = GpuTensor(self.inner.detach().clone()).requires_grad_(self.requires_grad)
            if getattr(self, "_is_param", False):
                copied._is_param = True
            memo[id(self)] = copied
        return memo[id(self)]

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"GpuTensor({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func._schema.name
        if name == "aten::copy_":
            func(_inner(args[0]), _inner(args[1]), *args[2:])
            return args[0]
        leaves = [*_leaves(args), *_leaves(kwargs)]
        wanted = kwargs.get("device")
        on_gpu = wanted is None or torch.device(wanted).type == "cuda"
        if name != "aten::_to_copy":
            _check(name, leaves, on_gpu)
        if wanted is not None:
            kwargs["device"] = torch.device("cpu")
        found = func(*_mapped(args, _inner), **_mapped(kwargs, _inner))
        if not on_gpu:
            return found
        known = {id(leaf.inner): leaf for leaf in leaves if isinstance(leaf, GpuTensor)}  # for in-place results
        return _mapped(found, lambda made: known[id(made)] if id(made) in known else GpuTensor(made))


def _inner(tensor: Tensor) -> Tensor:
    return tensor.inner if isinstance(tensor, GpuTensor) else tensor


def _leaves(tree: Any) -> Iterator[Any]:
    """Leaves of nested containers, as torch's pytree yields, ten times faster."""
    if isinstance(tree, tuple | list | dict):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(item)
    else:
        yield tree


def _mapped(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same containers with every tensor mapped by `change`."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, tuple | list):
        return (tuple if isinstance(tree, tuple) else list)(_mapped(item, change) for item in tree)
    return {key: _mapped(item, change) for key, item in tree.items()} if isinstance(tree, dict) else tree


def _check(name: str, leaves: list[Any], on_gpu: bool) -> None:
    """Raise where a GPU would."""
    _check_generators(name, leaves, on_gpu)
    if _inside or torch._C._current_graph_task_id() != -1:  # in a backward pass
        return
    for number, leaf in enumerate(leaves):
        foreign = isinstance(leaf, Tensor) and not isinstance(leaf, GpuTensor) and leaf.dim() > 0
        if foreign and not (name in _INDEXING and number > 0):
            raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got cuda:0 and cpu!")


def _check_generators(name: str, leaves: list[Any], on_gpu: bool) -> None:
    for leaf in leaves:
        if isinstance(leaf, _Generator) and on_gpu != any(leaf is known for known in _generators):
            raise RuntimeError(f"The generator that {name} got is of another device.")


def _on_gpu(device: Any) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


class _Emulation(TorchFunctionMode):
    """Returns a `GpuTensor` wherever a torch function would return a tensor on the GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        first = args[0] if args else None
        if func is Tensor.to:
            return _to(*args, **kwargs)
        if isinstance(first, GpuTensor) and name == "new_tensor":
            return GpuTensor(first.inner.new_tensor(*args[1:], **kwargs))
        if isinstance(first, GpuTensor) and name == "quantile":
            return _quantile(*args, **kwargs)
        if name == "one_hot":
            _inside.append(name)
            try:
                return func(*args, **kwargs)
            finally:
                _inside.pop()
        if "device" in kwargs and _on_gpu(kwargs["device"]):
            _check_generators(name, [kwargs.get("generator")], on_gpu=True)
            args, kwargs = _mapped(args, _inner), _mapped(kwargs | {"device": torch.device("cpu")}, _inner)
            with torch._C.DisableTorchFunction():
                made = func(*args, **kwargs)
            return GpuTensor(made.detach()).requires_grad_(made.requires_grad)
        if not any(isinstance(value, GpuTensor) for value in args):
            _check_generators(name, [kwargs.get("generator")], on_gpu=False)
        if kwargs.get("device") is not None:  # the CPU
            args = _mapped(args, _inner)
        return func(*args, **kwargs)


def _to(source: Tensor, *rest: Any, device: Any = None, **options: Any) -> Tensor:
    """`Tensor.to`."""
    if rest and isinstance(rest[0], Tensor):
        device, rest = rest[0].device, (rest[0].dtype, *rest[1:])
    elif rest and isinstance(rest[0], str | torch.device):
        device, rest = rest[0], rest[1:]
    dtype = next((value for value in rest if isinstance(value, torch.dtype)), options.get("dtype")) or source.dtype
    if device is not None and _on_gpu(device) != isinstance(source, GpuTensor):
        return _Moved.apply(source, _on_gpu(device), dtype)
    return source.to(dtype, copy=options.get("copy", False))


class _Moved(torch.autograd.Function):
    """Copies a tensor to the other device, and its gradient back."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, to_gpu: bool, dtype: torch.dtype) -> Tensor:
        ctx.dtype, ctx.to_gpu = source.dtype, to_gpu
        copied = _inner(source).detach().clone().to(dtype)
        return GpuTensor(copied) if to_gpu else copied

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        back = _inner(gradient).to(ctx.dtype)
        return back if ctx.to_gpu else GpuTensor(back), None, None


def _quantile(values: Tensor, q: float, dim: int = 0) -> Tensor:
    """`torch.quantile` without its in-place shape changes, which a wrapper subclass cannot do."""
    ordered, place = values.sort(dim).values, float(q) * (values.shape[dim] - 1)
    low, high = ordered.select(dim, int(place)), ordered.select(dim, min(int(place) + 1, values.shape[dim] - 1))
    return torch.lerp(low, high, place - int(place))


class _AnyGenerator(type(_Generator)):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _Generator)


class _GpuGenerator(_Generator, metaclass=_AnyGenerator):
    """`torch.Generator(device)` on the CPU; generators requested on the GPU are recorded."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:
        made = _Generator()
        if _on_gpu(device):
            _generators.append(made)
        return made


@contextmanager
def emulated_gpu() -> Iterator[torch.device]:
    """Emulate `cuda` within the context; yields the device."""
    fork, orthogonal = torch.random.fork_rng, torch.nn.init.orthogonal_

    def filled(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        orthogonal(_inner(tensor), *args, **options)
        return tensor

    replaced = {
        (torch, "Generator"): _GpuGenerator,
        (torch, "inference_mode"): lambda mode=True: torch.no_grad() if mode else torch.enable_grad(),
        (torch.random, "fork_rng"): lambda devices=(), **options: fork([], **options),
        (torch.nn.init, "orthogonal_"): filled,
    }
    before = {place: getattr(*place) for place in replaced}
    overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
    try:
        for place, value in replaced.items():
            setattr(*place, value)
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # a parameter cannot become a `GpuTensor`
        with _Emulation():
            yield GPU
    finally:
        for place, value in before.items():
            setattr(*place, value)
        torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
        _generators.clear()
