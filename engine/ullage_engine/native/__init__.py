"""The C++ library for CPUs: matmuls with quantised weights, attention, and whole model steps.

The library knows only tensor shapes and memory addresses, and must not depend on models or
requests. Its code is in `src/` and is compiled when the package is built. If the library is missing
or the processor lacks AVX2, the layers fall back to torch.
"""
