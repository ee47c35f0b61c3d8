"""The C++ library that computes on CPUs: products with small numbers, attention, a whole step.

It knows shapes and addresses, neither models nor requests; `src/` has its code, which is compiled
when the package is built. Where the library is missing, or a processor lacks AVX2, the layers
compute with torch alone.
"""
