"""Small number formats, unpacked with integer operations that every GPU has.

Converting float8 in hardware needs sm89; these are exact on any, and in the interpreter.
"""

import triton.language as tl

from ullage_engine.kernels.triton.launch import jit


@jit
def e4m3(code: tl.tensor) -> tl.tensor:
    """float8 E4M3 as float32: its bits, moved into a float16, are 2^-8 of its value.

    Not a number (0x7f) reads as 480; no quantiser writes it.
    """
    bits = code.to(tl.uint16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@jit
def e2m1(code: tl.tensor) -> tl.tensor:
    """float4 E2M1 in the low four bits as float32: as in `e4m3`, 2^-14 of its value."""
    bits = code.to(tl.uint16)
    half = ((bits & 0x8) << 12) | ((bits & 0x7) << 9)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@jit
def e8m0(code: tl.tensor) -> tl.tensor:
    """A power of two from its biased exponent, float32; 0 stands for 2^-127 and reads as zero."""
    return (code.to(tl.int32) << 23).to(tl.float32, bitcast=True)
