"""`Linear`: one weight matrix in any of the model's formats, dequantised on request.

kind   | weight                                  | scale                                      | value
plain  | fp32 or bf16 (..., n, k)                | -                                          | weight
fp8    | float8_e4m3fn (..., n, k)               | ue8m0 (..., ceil(n / 128), ceil(k / 128))  | weight * scale
mxfp4  | uint8 (..., n, k / 2), e2m1, low first  | ue8m0 (..., n, k / 32)                     | weight * scale
nvfp4  | uint8 (..., n, k / 2), e2m1, low first  | e4m3 (..., n, k / 16), scale_2 fp32 (...)  | weight * scale * scale_2
ue8m0 is uint8 or float8_e8m0fnu. Leading axes (...): experts or groups.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from problems.common import fp8, nvfp4
from problems.dsv4_forward.weights import formats

KINDS = ("plain", "fp8", "mxfp4", "nvfp4")
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
                raise ValueError(f"{self._label}: {self.kind} has no {field}, got {form(tensor)}")
            if tensor is None and field == "input_scale" and not self.quantise_input:
                continue
            if dtypes and (tensor is None or tensor.dtype not in dtypes or tuple(tensor.shape) != shape):
                raise ValueError(f"{self._label}: {field} must be {_words(dtypes)} {shape}, got {form(tensor)}")

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

    @cached_property
    def bf16(self) -> torch.Tensor:
        """weight * scale, (..., n, k) in bf16, which holds them exactly where the kind is fp8 or nvfp4. Kept."""
        whole = self if self.scale_2 is None else replace(self, scale_2=torch.ones_like(self.scale_2))
        return whole.dequantise(torch.bfloat16)

    @cached_property
    def factors(self) -> torch.Tensor:
        """Of each of the matrices: scale_2, times input_scale if inputs are quantised; 1 for a kind without. fp32 (G,).
        Kept.
        """
        if self.scale_2 is None:
            return torch.ones(self.weight[..., 0, 0].numel(), device=self.weight.device)
        return (self.scale_2 * self.input_scale if self.quantise_input else self.scale_2).reshape(-1)

    @cached_property
    def host_factors(self) -> tuple[float, ...]:
        """factors, one for all if they are equal. Kept; waits for the device at the first call."""
        every = tuple(self.factors.tolist())
        return every[:1] if len(set(every)) == 1 else every

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
        return {"weight": self.weight, "scale": self.scale, "scale_2": self.scale_2, "input_scale": self.input_scale}

    def _wanted(self) -> dict[str, tuple[tuple[torch.dtype, ...], tuple[int, ...]]]:
        """Dtypes and shape of each tensor that the kind has, given the weight's shape."""
        if self.weight.dim() < 2:
            raise ValueError(f"{self._label}: weight must be (..., n, k), got {form(self.weight)}")
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


def _take(tensor: torch.Tensor, i: int | torch.Tensor) -> torch.Tensor:
    """tensor[i]; through bytes for FP8, which not every device can index."""
    if tensor.element_size() == 1:
        return tensor.view(torch.uint8)[i].view(tensor.dtype)
    return tensor[i]


def form(tensor: torch.Tensor | None) -> str:
    """Return dtype and shape of a tensor, for messages."""
    return "None" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"


def _words(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(map(str, dtypes))
