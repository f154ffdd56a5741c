"""Runs a launch's PTX with the CUDA driver, with exactly the arguments that TensorRT passes."""

import ctypes

import torch

from mtpbuild.plugins.launch import Launch
from mtpbuild.plugins.ptx import compile_launch


def drive(launch: Launch, architecture: int) -> None:
    """Fill the outputs with the PTX for `architecture`, which the driver compiles for its GPU."""
    ptx = compile_launch(launch, architecture)
    torch.cuda.synchronize()  # makes PyTorch's context the current one
    cuda = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check(cuda.cuModuleLoadData(ctypes.byref(module), ptx.text.encode()))
    _check(cuda.cuModuleGetFunction(ctypes.byref(function), module, ptx.name.encode()))
    inputs = [tensor for tensor in launch.inputs if tensor is not None]
    values = [
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in inputs),
        *(ctypes.c_int32(size) for size in launch.sizes),
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in launch.outputs),
    ]
    assert len(values) == len(ptx.parameters)
    addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    grid, block = (*launch.grid, 1, 1)[:3], (ptx.threads, 1, 1)
    _check(cuda.cuLaunchKernel(function, *grid, *block, ptx.shared, None, addresses, None))
    torch.cuda.synchronize()
    _check(cuda.cuModuleUnload(module))


def _check(code: int) -> None:
    assert code == 0, f"CUDA driver error {code}"
