"""Functions inside compiled CPU kernels that turn into vector instructions."""

from __future__ import annotations

import numpy as np
from numba import njit

from kvyard_kernels.cpu_memory import float_bits

_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_FLOOR = np.float32(-87.0)
_CEILING = np.float32(88.0)
_ONE = np.float32(1.0)
_C2, _C3, _C4, _C5, _C6 = (np.float32(1.0 / n) for n in (2.0, 6.0, 24.0, 120.0, 720.0))


@njit
def exponential(x: float) -> float:
    """exp of a float32 to about 1e-7 relative; 0 below -87, so that minus infinity gives 0.

    Reduced to `|r| <= ln 2 / 2`, Taylor's polynomial of degree 6, scaled by bits. A library call here
    would keep the loop around it from using vectors.
    """
    bounded = min(max(x, _FLOOR), _CEILING)
    power = np.floor(bounded * _LOG2_E + np.float32(0.5))
    r = bounded - power * _LN2_HIGH - power * _LN2_LOW
    value = _ONE + r * (_ONE + r * (_C2 + r * (_C3 + r * (_C4 + r * (_C5 + r * _C6)))))
    scale = float_bits(np.int32((np.int32(power) + np.int32(127)) << np.int32(23)))
    return value * scale if x >= _FLOOR else np.float32(0.0)
