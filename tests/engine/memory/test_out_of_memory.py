"""Texts of torch and of the libraries that it calls, and what each of them means."""

import errno
from collections.abc import Callable

import pytest
import torch

from ullage_engine.memory.out_of_memory import (
    OutOfMemoryFault,
    is_device_lost,
    is_out_of_memory,
    shortage_status,
)
from ullage_engine.protocol.errors import HOST_SHORT, GroupLostError
from ullage_engine.protocol.errors import OUT_OF_MEMORY as OUT_OF_MEMORY_STATUS

HINT = """
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below\
 might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""

OUT_OF_MEMORY: dict[str, Exception] = {
    "torch's allocator": torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 7.45 GiB. GPU 0 has a total capacity of 14.56 GiB of"
        " which 3.24 GiB is free. Process 1 has 11.32 GiB memory in use."
    ),
    "torch's allocator in a rank of vLLM": RuntimeError(
        "Worker failed with error 'CUDA out of memory. Tried to allocate 20.00 MiB.'"
    ),
    "torch's allocator, whatever it says": torch.OutOfMemoryError("injected fault"),
    "the CPU's allocator": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory:"
        " you tried to allocate 1152921504606846976 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "Python's": MemoryError(),
    "the kernel, as Python says it": OSError(errno.ENOMEM, "Cannot allocate memory"),
    "the loader of shared objects": OSError(
        "libx.so: failed to map segment from shared object: Cannot allocate memory"
    ),
    "the loader, of a module": ImportError(
        "_x.so: failed to map segment from shared object: Cannot allocate memory"
    ),
    "Triton's loader": RuntimeError("Triton Error [CUDA]: out of memory"),
    "cuBLAS": RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    ),
    "cuDNN": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "cuDNN 9": RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    "cuSOLVER": RuntimeError(
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"
    ),
    "CUDA, as torch says it now": torch.AcceleratorError("CUDA error: out of memory" + HINT),
    "CUDA, as torch said it": RuntimeError("CUDA error: out of memory" + HINT),
    "the driver": RuntimeError("CUDA driver error: out of memory"),
    "the driver, by its name": RuntimeError("cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY"),
    "NCCL": RuntimeError(
        "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, unhandled cuda error (run"
        " with NCCL_DEBUG=INFO for details), NCCL version 2.20.5\nncclUnhandledCudaError: Call to"
        " CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
    ),
    "a fault injected into vLLM": OutOfMemoryFault("injected fault"),
}

DEVICE_LOST: dict[str, Exception] = {
    "illegal access": torch.AcceleratorError(
        "CUDA error: an illegal memory access was encountered" + HINT
    ),
    "illegal access of a Triton kernel": RuntimeError(
        "Triton Error [CUDA]: an illegal memory access was encountered"
    ),
    "assertion": RuntimeError("CUDA error: device-side assert triggered" + HINT),
    "ECC": RuntimeError("CUDA error: uncorrectable ECC error encountered" + HINT),
    "launch": RuntimeError("CUDA error: unspecified launch failure" + HINT),
    "cuBLAS": RuntimeError(
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(handle)`"
    ),
    "context": RuntimeError("Triton Error [CUDA]: invalid device context"),
    "whatever torch blames on the accelerator": torch.AcceleratorError("it is gone"),
    "a rank": GroupLostError("rank 1: CUDA out of memory"),
    "NCCL": RuntimeError("NCCL error in: NCCLUtils.hpp:275, remote process exited"),
}

NEITHER: dict[str, Exception] = {
    "shapes": RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
    "index": IndexError("index 7 is out of bounds"),
    "a request that speaks of memory": ValueError("the prompt says: CUDA error: out of memory"),
    "a file that is no library": OSError("x.so: invalid ELF header"),
    "a module that is missing": ImportError("No module named 'x'"),
    "shared memory of a kernel": ValueError(
        "out of resource: shared memory, Required: 262144, Hardware limit: 232448"
    ),
}


def failed_with(error: Exception) -> Exception:
    """Raises an error whose cause another one is, and returns it."""
    try:
        raise ValueError("a layer cannot be computed") from error
    except ValueError as outer:
        return outer


def failed_while_handling(error: Exception) -> Exception:
    """The same with an error that came up while another one was handled."""
    try:
        try:
            raise error
        except Exception:
            raise RuntimeError("the stream cannot be synchronised")  # noqa: B904 - as it happens
    except RuntimeError as outer:
        return outer


@pytest.mark.parametrize(
    "wrapped", [lambda error: error, failed_with, failed_while_handling], ids=["", "from", "while"]
)
def test_what_an_error_means(
    subtests: pytest.Subtests, wrapped: Callable[[Exception], Exception]
) -> None:
    for errors, expected in (
        (OUT_OF_MEMORY, (True, False)),
        (DEVICE_LOST, (False, True)),
        (NEITHER, (False, False)),
    ):
        for name, error in errors.items():
            with subtests.test(name):
                seen = wrapped(error)
                assert (is_out_of_memory(seen), is_device_lost(seen)) == expected


def test_a_device_that_is_lost_for_want_of_memory_is_lost() -> None:
    lost = failed_while_handling(torch.OutOfMemoryError("CUDA out of memory"))
    sticky = RuntimeError("CUDA error: an illegal memory access was encountered")
    sticky.__cause__ = lost
    assert is_device_lost(sticky)
    assert not is_out_of_memory(sticky)


def test_a_cause_that_was_hidden_does_not_count() -> None:
    try:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except torch.OutOfMemoryError:
            raise ValueError("wrong") from None
    except ValueError as error:
        assert not is_out_of_memory(error)


def test_errors_that_cause_each_other_are_looked_at_once() -> None:
    first = ValueError("a")
    second = ValueError("b")
    first.__cause__ = second
    second.__cause__ = first
    assert not is_out_of_memory(first)
    assert not is_device_lost(first)


def test_the_status_of_a_process_says_whose_memory_ran_out() -> None:
    assert shortage_status(OUT_OF_MEMORY["torch's allocator"]) == OUT_OF_MEMORY_STATUS
    for name in (
        "Python's",
        "the CPU's allocator",
        "the kernel, as Python says it",
        "the loader of shared objects",
        "the loader, of a module",
    ):
        assert shortage_status(OUT_OF_MEMORY[name]) == HOST_SHORT, name
        assert shortage_status(failed_with(OUT_OF_MEMORY[name])) == HOST_SHORT, name
    assert shortage_status(OSError(errno.ENOSPC, "No space left on device")) is None
    assert shortage_status(DEVICE_LOST["a rank"]) is None
    assert shortage_status(None) is None
