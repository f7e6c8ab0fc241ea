"""A device that is not there: its tensors compute on the CPU and refuse to meet host tensors, as an accelerator's do.

Every operation unwraps its operands, runs on the CPU and wraps the result. An operation between a tensor of the device
and one of the host raises, but for numbers (0 dimensions), indices and copies. Factories that name the device give
tensors on it, those that name none give host tensors. So code that forgets a device fails here without one. Calling
`install` registers the device with torch for the rest of the process.
"""

from contextlib import contextmanager

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

NAME = "pretend"
COPIES = ("aten::copy_", "aten::_to_copy")
INDEXED = ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_")


def install():
    """Register the device with torch."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME)


class OnDevice(Tensor):
    """A tensor on the device; `host` holds its numbers."""

    @staticmethod
    def __new__(cls, host):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(NAME, 0),
            requires_grad=False,
        )
        made.host = host
        return made

    def __repr__(self):
        return f"OnDevice({self.host!r})"

    @property
    def data(self):
        """The same numbers without autograd; setting it changes dtype and numbers in place, as parameters do."""
        return OnDevice(self.host)

    @data.setter
    def data(self, value):
        Tensor.data.__set__(self, value)
        self.host = value.host

    def data_ptr(self):
        return self.host.data_ptr()

    def tolist(self):
        return self.host.tolist()

    def __deepcopy__(self, memo):
        return OnDevice(self.host.clone())

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl


class _Factories(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


class _FromNumbers(TorchFunctionMode):
    """torch.tensor and torch.as_tensor fill memory of the device themselves, unseen by a dispatch mode."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if (
            func in (torch.tensor, torch.as_tensor)
            and device is not None
            and torch.device(device).type == NAME
        ):
            return func(*args, **{**kwargs, "device": "cpu"}).to(device)
        return func(*args, **kwargs)


@contextmanager
def pretend_device():
    """Inside, factories that name the device work; gives the device."""
    with _Factories(), _FromNumbers():
        yield torch.device(NAME, 0)


def run(func, args, kwargs):
    """Run one operation on the CPU, and put its result where it belongs."""
    name = func._schema.name
    flat = torch.utils._pytree.tree_leaves((args, kwargs))
    on_device = [x for x in flat if isinstance(x, OnDevice)]
    on_host = [x for x in flat if isinstance(x, Tensor) and not isinstance(x, OnDevice)]
    asked = kwargs.get("device")
    is_copy = name in COPIES
    if on_device and not is_copy:
        strangers = [x for x in on_host if x.dim() > 0]
        if name in INDEXED:
            strangers = [x for x in strangers if x is args[0] or x.dtype not in (torch.int64, torch.bool)]
        if strangers or (
            on_host
            and isinstance(args[0], Tensor)
            and not isinstance(args[0], OnDevice)
            and name.endswith("_")
        ):
            raise RuntimeError(
                f"{name}: operands on the device and on the host, {[tuple(x.shape) for x in strangers]}"
            )
    unwrapped_args, unwrapped_kwargs = tree_map(
        lambda x: x.host if isinstance(x, OnDevice) else x, (args, kwargs)
    )
    lands_on_device = bool(on_device)
    if asked is not None:
        unwrapped_kwargs = {**unwrapped_kwargs, "device": torch.device("cpu")}
        lands_on_device = torch.device(asked).type == NAME
    if name == "aten::copy_":
        lands_on_device = isinstance(args[0], OnDevice)
    with torch.utils._python_dispatch._disable_current_modes():
        result = func(*unwrapped_args, **unwrapped_kwargs)
    if not lands_on_device:
        return result
    known = {id(x.host): x for x in on_device}
    return tree_map(
        lambda x: known.get(id(x)) if id(x) in known else OnDevice(x) if isinstance(x, Tensor) else x, result
    )
