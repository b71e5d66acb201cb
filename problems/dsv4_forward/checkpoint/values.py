"""Say what is wrong with the values of a checkpoint's tensor: what no layer could compute with, or would hide.

A NaN code, or a scale under which codes overflow, need not show: SwiGLU's clamp makes finite numbers of both. Each
tensor is read once more, at memory speed; codes of e2m1 have no wrong values and are not read.
"""

import torch

from problems.common import nvfp4

_FLOAT_MAX = torch.finfo(torch.float32).max
_NAN = 0x7F  # of e4m3, with either sign
# The largest ue8m0 byte under which no code of the kind overflows fp32; 255 is NaN.
_SCALE_BYTES = {"fp8": 246, "mxfp4": 252}
_LARGEST_SCALE = _FLOAT_MAX / (nvfp4.E2M1_MAX * nvfp4.E4M3_MAX)  # of a matrix: its largest value is still finite


def fault(name: str, value: torch.Tensor, kind: str, field: str) -> str:
    """Return what is wrong with `value`, a host tensor in a file's dtype, naming the first place; "" if nothing is.

    kind, field: of the linear layer that it belongs to (weights/linear.py), "" for another tensor.
    """
    if value.dtype == torch.float8_e8m0fnu:
        most = _SCALE_BYTES[kind]
        raw = value.view(torch.uint8)
        said = f"must be scale bytes from 0 to {most}, above which values overflow or are NaN"
        return "" if int(raw.max()) <= most else _at(name, said, raw, raw > most)
    if value.dtype == torch.float8_e4m3fn and field == "scale":
        raw = value.view(torch.uint8)
        said = f"must be scale bytes from 0 to {nvfp4.SCALE_BYTE_MAX}, not negative or NaN"
        return "" if int(raw.max()) <= nvfp4.SCALE_BYTE_MAX else _at(name, said, raw, raw > nvfp4.SCALE_BYTE_MAX)
    if value.dtype == torch.float8_e4m3fn:
        raw = value.view(torch.uint8)
        if int(raw.view(torch.int8).max()) < _NAN and int(raw.max()) < 0x80 + _NAN:
            return ""
        return _at(name, "must hold no NaN (bytes 127 and 255)", raw, raw & 0x7F == _NAN)
    if field in ("scale_2", "input_scale"):
        bad = ~((value > 0) & (value <= _LARGEST_SCALE))
        return _at(name, f"must be positive and at most {_LARGEST_SCALE:.3g}", value, bad) if bool(bad.any()) else ""
    # A sum is not finite if one value is not, or if it overflows: then each is looked at.
    if not value.is_floating_point() or bool(value.sum().isfinite()):
        return ""
    bad = ~value.isfinite()
    return _at(name, "must be finite", value, bad) if bool(bad.any()) else ""


def _at(name: str, said: str, value: torch.Tensor, bad: torch.Tensor) -> str:
    if not bad.dim():
        return f"{name} {said}, got {value.item()}"
    index = tuple(bad.nonzero()[0].tolist())
    return f"{name} {said}, got {value[index].item()} at {index}"
