"""A second device on a machine without one: tensors that say `lazy`, compute in host memory, and mix with nothing.

Inside `Elsewhere()` what asks for the device `lazy` gets tensors that hold their values on the CPU. An op that
gets such a tensor together with one in host memory fails, as on a GPU (numbers without dimensions may be mixed), and
so does a kernel that is given an address. What makes a GPU's host wait is counted by name.
"""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("lazy")
aten = torch.ops.aten
WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique2",
    "_unique2",
    "equal",
    "is_nonzero",
    "bincount",
}
CROSSES = {"_to_copy", "copy_", "to"}


class There(torch.Tensor):
    """A tensor on the second device."""

    @staticmethod
    def __new__(cls, held):
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=DEVICE, requires_grad=False,
        )  # fmt: skip
        made.held = held
        return made

    def __repr__(self):
        return f"There({self.held})"

    def data_ptr(self):
        return self.held.data_ptr()

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {}, waits=None)


def _by_way_of_host_memory(make):
    """A maker of tensors from numbers, which torch puts on a device below every mode."""

    def made(data, **options):
        if torch.device(options.get("device") or "cpu") != DEVICE:
            return make(data, **options)
        if isinstance(data, There):
            return data.to(options.get("dtype"))
        return make(data, **{**options, "device": "cpu"}).to(DEVICE)

    return made


class Elsewhere(TorchDispatchMode):
    """Gives the second device; `waits` counts what a host would have waited for."""

    def __init__(self):
        super().__init__()
        self.waits = Counter()

    def __enter__(self):
        self._makers = torch.tensor, torch.as_tensor
        torch.tensor, torch.as_tensor = map(_by_way_of_host_memory, self._makers)
        return super().__enter__()

    def __exit__(self, *error):
        torch.tensor, torch.as_tensor = self._makers
        super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {}, waits=self.waits)


def _run(func, args, kwargs, *, waits):
    name = func._schema.name.split("::")[1]
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
    there = [t for t in tensors if isinstance(t, There)]
    here = [t for t in tensors if not isinstance(t, There) and t.dim() > 0]
    if there and here and name not in CROSSES:
        raise AssertionError(
            f"{name} mixes devices: {[tuple(t.shape) for t in there]} there, {[tuple(t.shape) for t in here]} here"
        )
    target = kwargs.get("device")
    target = None if target is None else torch.device(target)
    if waits is not None and there:
        is_masked = name == "index" and any(t.dtype == torch.bool for t in tensors[1:])
        to_host = name == "_to_copy" and target is not None and target.type == "cpu"
        to_host |= name == "copy_" and not isinstance(args[0], There)
        if name in WAITS or is_masked or to_host:
            waits[name] += 1
    goes_there = bool(there) if target is None else target == DEVICE
    if not goes_there and not there:
        return func(*args, **kwargs)
    if target is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    held_args, held_kwargs = tree_map(_held, (args, kwargs))
    out = func(*held_args, **held_kwargs)
    if name == "copy_":
        return args[0]
    if not goes_there:
        return out
    out = tree_map(lambda t: There(t) if isinstance(t, torch.Tensor) else t, out)
    return return_and_correct_aliasing(func, args, kwargs, out) if there else out


def _held(value):
    return value.held if isinstance(value, There) else value
