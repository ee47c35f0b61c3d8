"""Forbids TF32 in float32 computations, because TF32 has only ten bits of mantissa."""

import ctypes

import torch

_CUBLAS_PROPERTIES = (0, 1, 2)
"""MAJOR_VERSION, MINOR_VERSION and PATCH_LEVEL in CUDA's library_types.h."""


def forbid_tf32() -> None:
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def describe(device: torch.device) -> str:
    """Describe the device, the libraries and torch's TF32 settings in one line."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    cublas = f", cuBLAS {_cublas_version()}" if device.type == "cuda" else ""
    return (
        f"{name}, torch {torch.__version__}{cublas}; "
        f"TF32 in cuBLAS: {torch.backends.cuda.matmul.allow_tf32}, "
        f"in cuDNN: {torch.backends.cudnn.allow_tf32}, "
        f"float32 products: {torch.get_float32_matmul_precision()}"
    )


def _cublas_version() -> str:
    """Return the version of the cuBLAS library that torch has loaded."""
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        # By its soname, so that the loader returns the loaded library.
        library = ctypes.CDLL(f"libcublas.so.{major}")
    except OSError:
        return "of unknown version"
    parts = []
    for kind in _CUBLAS_PROPERTIES:
        value = ctypes.c_int()
        library.cublasGetProperty(kind, ctypes.byref(value))
        parts.append(str(value.value))
    return ".".join(parts)
