"""A weight matrix in any of the model's formats, and products with it. Weights are dequantised on each call.

kind   | weight                                  | scale                                      | value
plain  | fp32 or bf16 (..., n, k)                | -                                          | weight
fp8    | float8_e4m3fn (..., n, k)               | ue8m0 (..., ceil(n / 128), ceil(k / 128))  | weight * scale
mxfp4  | uint8 (..., n, k / 2), e2m1, low first  | ue8m0 (..., n, k / 32)                     | weight * scale
nvfp4  | uint8 (..., n, k / 2), e2m1, low first  | e4m3 (..., n, k / 16), scale_2 fp32 (...)  | weight * scale * scale_2
ue8m0 is uint8 or float8_e8m0fnu. Leading axes (...): experts or groups.
"""

from dataclasses import dataclass, replace

import torch

from problems.common import fp8, nvfp4
from problems.dsv4_forward import formats

KINDS = ("plain", "fp8", "mxfp4", "nvfp4")
ACTIVATION_GROUP = 128  # values of a token that share a scale before an fp8 or mxfp4 product
_UE8M0 = (torch.uint8, torch.float8_e8m0fnu)


@dataclass(frozen=True)
class Linear:
    """y = x @ W^T for W (..., n, k), stored as its kind says (see the table above).

    quantise_input: whether inputs go through the kind's activation format before the product. input_scale: fp32 (...),
    calibrated amax / (6 * 448) of the inputs; of nvfp4 that quantises them. name: in the checkpoint, for messages.
    ValueError, naming the weight, where shapes or dtypes do not fit the kind.
    """

    kind: str
    weight: torch.Tensor
    scale: torch.Tensor | None = None
    scale_2: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None
    quantise_input: bool = True
    name: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self._label}: kind must be one of {KINDS}, got {self.kind!r}")
        wanted = self._wanted()
        for field, tensor in self._tensors().items():
            dtypes, shape = wanted.get(field, ((), ()))
            if not dtypes and tensor is not None:
                raise ValueError(f"{self._label}: {self.kind} has no {field}, got {_form(tensor)}")
            if tensor is None and field == "input_scale" and not self.quantise_input:
                continue
            if dtypes and (tensor is None or tensor.dtype not in dtypes or tuple(tensor.shape) != shape):
                raise ValueError(f"{self._label}: {field} must be {_words(dtypes)} {shape}, got {_form(tensor)}")

    @property
    def n(self) -> int:
        """Outputs."""
        return self.weight.shape[-2]

    @property
    def k(self) -> int:
        """Inputs."""
        return self.weight.shape[-1] * (2 if self.kind in ("mxfp4", "nvfp4") else 1)

    def dequantise(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """-> (..., n, k) in `dtype`: the products of the table above in fp32, rounded once. Plain fp32 comes as is."""
        if self.kind == "plain":
            return self.weight.to(dtype)
        if self.kind == "fp8":
            return fp8.dequantise_blocks(self.weight, self.scale, dtype)
        if self.kind == "mxfp4":
            return formats.dequantise_mxfp4(self.weight, self.scale, dtype)
        values = nvfp4.decode(self.weight).unflatten(-1, (-1, nvfp4.BLOCK))
        values = values.mul_(fp8.decode_e4m3(self.scale).unsqueeze(-1)).flatten(-2)
        return values.mul_(self.scale_2[..., None, None]).to(dtype)

    def select(self, i: int | torch.Tensor) -> "Linear":
        """i: int, or an int64 tensor (M, ...) -> the matrices i of the first leading axis: views for an int, else
        copies with leading axes (M, ...) in that axis's place.
        """
        if isinstance(i, torch.Tensor) and i.dim() == 0:
            raise ValueError("i must be an int or a tensor of one axis or more: a 0-d tensor would be read on the host")
        return replace(self, **{f: _take(t, i) for f, t in self._tensors().items() if t is not None})

    @property
    def _label(self) -> str:
        return self.name or "Linear"

    def _tensors(self) -> dict[str, torch.Tensor | None]:
        return {
            "weight": self.weight, "scale": self.scale, "scale_2": self.scale_2, "input_scale": self.input_scale
        }  # fmt: skip

    def _wanted(self) -> dict[str, tuple[tuple[torch.dtype, ...], tuple[int, ...]]]:
        """Dtypes and shape of each tensor that the kind has, given the weight's shape."""
        if self.weight.dim() < 2:
            raise ValueError(f"{self._label}: weight must be (..., n, k), got {_form(self.weight)}")
        *lead, n, k = self.weight.shape[:-1] + (self.k,)
        shape, lead, fp32 = tuple(self.weight.shape), tuple(lead), (torch.float32,)
        if self.kind == "plain":
            return {"weight": ((torch.float32, torch.bfloat16), shape)}
        if self.kind == "fp8":
            blocks = (*lead, -(-n // fp8.BLOCK), -(-k // fp8.BLOCK))
            return {"weight": ((torch.float8_e4m3fn,), shape), "scale": (_UE8M0, blocks)}
        group = formats.GROUP if self.kind == "mxfp4" else nvfp4.BLOCK
        if k % group:
            raise ValueError(f"{self._label}: k must be a multiple of {group} for {self.kind}, got {k}")
        codes, groups = ((torch.uint8,), shape), (*lead, n, k // group)
        if self.kind == "mxfp4":
            return {"weight": codes, "scale": (_UE8M0, groups)}
        scale = ((torch.float8_e4m3fn,), groups)
        return {"weight": codes, "scale": scale, "scale_2": (fp32, lead), "input_scale": (fp32, lead)}


def input_values(x: torch.Tensor, w: Linear) -> torch.Tensor:
    """x: fp32 or bf16 (..., k), the axes just before k being w's leading ones -> x as w's format feeds it to a product.

    fp8, mxfp4: fp32 values of e4m3 with a ue8m0 scale a 128; nvfp4: fp32 values of groups of 16 with w.input_scale.
    Plain, or without quantise_input: x itself.
    """
    if w.kind == "plain" or not w.quantise_input:
        return x
    if w.kind == "nvfp4":
        return nvfp4.round_trip(x.float(), w.input_scale)
    return fp8.round_trip(x.float(), ACTIVATION_GROUP)


def linear(x: torch.Tensor, w: Linear, out: torch.Tensor) -> None:
    """out = x @ W^T.  x: fp32 or bf16 (N, k); w: without leading axes; out: fp32 or bf16 (N, n), not x.

    Plain: matmul. Quantised: an fp32 product of input_values and the weight's values, rounded once.
    """
    if w.kind == "plain":
        return matmul(x, w.weight, out)
    _check_form(w.weight, 2, w.name)
    _check(x, (w.k,), out, (w.n,), w.name)
    _multiply(input_values(x, w).float(), w.dequantise(), out)


def grouped_linear(x: torch.Tensor, w: Linear, out: torch.Tensor) -> None:
    """out[:, g] = x[:, g] @ W[g]^T.  x: fp32 or bf16 (N, G, k); w: one leading axis G; out: fp32 or bf16 (N, G, n).

    Precision as in linear.
    """
    _check_form(w.weight, 3, w.name)
    groups = len(w.weight)
    _check(x, (groups, w.k), out, (groups, w.n), w.name)
    if w.kind == "plain" and x.is_cuda and out.dtype == torch.float32 and x.dtype == w.weight.dtype == torch.bfloat16:
        out.transpose(0, 1).copy_(torch.bmm(x.transpose(0, 1), w.weight.mT, out_dtype=torch.float32))
        return
    if w.kind == "plain":
        a, b = _operands(x, w.weight, out.dtype)
    else:
        a, b = input_values(x, w).float(), w.dequantise()
    _multiply(a.transpose(0, 1), b, out.transpose(0, 1))


def matmul(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """out = x @ weight^T for plain weights.  x: (N, k); weight: (n, k); out: (N, n), not x; each fp32 or bf16.

    fp32 out: the exact values of x and weight, multiplied and added in fp32. bf16 out: x is rounded to the weight's
    dtype, sums are in fp32 and rounded once (on CUDA where allow_bf16_reduced_precision_reduction is off).
    """
    _check_form(weight, 2, "weight")
    _check(x, (weight.shape[1],), out, (weight.shape[0],), "weight")
    if x.is_cuda and out.dtype == torch.float32 and x.dtype == weight.dtype == torch.bfloat16:
        out.copy_(torch.mm(x, weight.T, out_dtype=torch.float32))
        return
    a, b = _operands(x, weight, out.dtype)
    _multiply(a, b, out)


def _operands(x: torch.Tensor, weight: torch.Tensor, out: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x and a plain weight in the dtype that their product is taken in."""
    dtype = torch.float32 if out == torch.float32 else weight.dtype
    return x.to(dtype), weight.to(dtype)


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """out = a @ b^T over the last two axes, straight into `out` where its dtype is that of the operands."""
    if out.dtype == a.dtype:
        torch.matmul(a, b.mT, out=out)
    else:
        out.copy_(torch.matmul(a, b.mT))


def _check_form(weight: torch.Tensor, axes: int, name: str) -> None:
    if weight.dim() != axes:
        raise ValueError(f"{name or 'w'}: weight must have {axes} axes here, got {_form(weight)}")


def _check(x: torch.Tensor, inner: tuple[int, ...], out: torch.Tensor, outer: tuple[int, ...], name: str) -> None:
    """ValueError unless x is (N, *inner) and out (N, *outer)."""
    if tuple(x.shape[1:]) != inner:
        raise ValueError(f"{name or 'w'}: x must be (N, {', '.join(map(str, inner))}), got {tuple(x.shape)}")
    if tuple(out.shape) != (len(x), *outer):
        raise ValueError(f"{name or 'w'}: out must be {(len(x), *outer)}, got {tuple(out.shape)}")


def _take(tensor: torch.Tensor, i: int | torch.Tensor) -> torch.Tensor:
    """tensor[i]; through bytes for FP8, which not every device can index."""
    if tensor.element_size() == 1:
        return tensor.view(torch.uint8)[i].view(tensor.dtype)
    return tensor[i]


def _form(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"


def _words(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(map(str, dtypes))
