"""Detects errors caused by running out of memory or by the loss of a device.

torch has a dedicated error class only for its own allocator. Other libraries (cuBLAS, cuDNN, NCCL,
Triton's loader, the driver) report a shortage in the message of a RuntimeError. The classification
therefore checks the messages of all errors in the chain of causes.
"""

import errno
from collections.abc import Iterator

from ullage_engine.protocol.errors import HOST_SHORT, OUT_OF_MEMORY, GroupLostError

_CLASSES = frozenset({"OutOfMemoryError", "OutOfMemoryFault", "MemoryError"})
"""Names of torch, vLLM and Python error classes that always mean out of memory."""

_OUT_OF_MEMORY = (
    "out of memory",  # torch, CUDA, HIP, Triton, NCCL
    "CUDA_ERROR_OUT_OF_MEMORY",
    "cudaErrorMemoryAllocation",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "DEVICE_ALLOCATION_FAILED",  # cuDNN 9
    "HOST_ALLOCATION_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
)

_HOST_OUT_OF_MEMORY = (
    "DefaultCPUAllocator",
    "Cannot allocate memory",  # the loader of shared objects, which sets no errno
)
"""Message fragments that indicate a shortage of host memory."""

_STICKY = (
    "illegal memory access",
    "misaligned address",
    # Not "device-side assert": torch appends a hint with "device-side assertions" to all errors.
    "device-side assert triggered",
    "unspecified launch failure",
    "launch timed out",
    "illegal instruction",
    "invalid program counter",
    "hardware stack error",
    "uncorrectable ECC",
    "uncorrectable NVLink",
    "CUBLAS_STATUS_EXECUTION_FAILED",
)
"""Message fragments of errors after which all later CUDA calls in the process fail."""

_DEVICE = ("CUDA", "HIP error", "NCCL", "CUBLAS", "CUDNN", "cuDNN")
"""Message fragments that identify an error as coming from the device."""


class OutOfMemoryFault(Exception):
    """Raised by an injected fault in place of an error of a device that ran out of memory."""


def is_device_lost(error: BaseException) -> bool:
    """Return whether the error means that the device or another rank has failed.

    If so, retrying is pointless because later calls would fail as well.
    """
    chain = list(_chain(error))

    if any(isinstance(each, GroupLostError) or _says(each, _STICKY) for each in chain):
        return True
    if any(_ran_out(each) for each in chain):
        return False

    return any(type(each).__name__ == "AcceleratorError" or _says(each, _DEVICE) for each in chain)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether device or host memory ran out while the device is still usable."""
    return any(_ran_out(each) for each in _chain(error)) and not is_device_lost(error)


def shortage_status(error: BaseException | None) -> int | None:
    """Return the exit status of a process that ran out of memory.

    Return None if the error has another cause.
    """
    if error is None or not is_out_of_memory(error):
        return None
    return HOST_SHORT if any(_host_ran_out(each) for each in _chain(error)) else OUT_OF_MEMORY


def _ran_out(error: BaseException) -> bool:
    names = {each.__name__ for each in type(error).__mro__}
    return bool(names & _CLASSES) or _says(error, _OUT_OF_MEMORY) or _host_ran_out(error)


def _host_ran_out(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    if isinstance(error, OSError | ImportError | RuntimeError):
        return any(each in str(error) for each in _HOST_OUT_OF_MEMORY)
    return isinstance(error, MemoryError)


def _says(error: BaseException, texts: tuple[str, ...]) -> bool:
    """Return whether the error is a RuntimeError whose message contains any of `texts`.

    Other error classes are ignored, because the libraries report shortages only as RuntimeErrors.
    """
    text = str(error)
    return isinstance(error, RuntimeError) and any(each in text for each in texts)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the errors that caused it, following the same rules as a traceback."""
    seen = set[int]()
    following: BaseException | None = error

    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        hidden = None if following.__suppress_context__ else following.__context__
        following = following.__cause__ or hidden
