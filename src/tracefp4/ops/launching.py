"""Put a kernel into a stream, by the driver's own call: the binding's wrapper around it fails where a kernel may start
before the one ahead of it has ended (cuda-core 1.2.0: an invalid value, then a crash)."""

import ctypes
from functools import lru_cache
from typing import Any

from tracefp4.errors import BackendError

Value = ctypes.c_void_p | ctypes.c_int32 | ctypes.c_float


def start(
    kernel: Any, grid: tuple[int, ...], block: tuple[int, int], values: list[Value], how: tuple[int, bool]
) -> None:
    """Launch a kernel, without waiting for it.

    Args:
        kernel: the driver's handle.
        grid: thread blocks along x, y and z; one to three numbers.
        block: its threads, and its bytes of dynamic shared memory.
        values: the kernel's parameters.
        how: the driver's number of the stream, and whether the kernel may start before the one ahead of it has ended;
            it then has to await that itself.

    Raises:
        BackendError: the name that the driver gives to what is wrong.
    """
    from cuda.bindings import driver

    addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    config = _config((*grid, 1, 1)[:3], block, how)
    (error,) = driver.cuLaunchKernelEx(config, driver.CUfunction(int(kernel)), ctypes.addressof(addresses), 0)
    if int(error) != 0:
        raise BackendError(error.name)


@lru_cache(maxsize=4096)
def _config(grid: tuple[int, ...], block: tuple[int, int], how: tuple[int, bool]) -> Any:
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block[0], 1, 1
    config.sharedMemBytes = block[1]
    config.hStream = driver.CUstream(how[0])
    if how[1]:
        value = driver.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        early = driver.CUlaunchAttribute()
        early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value = value
        config.attrs, config.numAttrs = [early], 1
    return config
