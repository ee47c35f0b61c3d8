"""The C++ library for CPUs: products with quantised weights, attention, and whole steps.

It knows shapes and addresses. It must not know models or requests. Its code is in `src/` and is
compiled when the package is built. If the library is missing or the processor lacks AVX2, the
layers compute with torch alone.
"""
