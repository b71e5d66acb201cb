"""peer_torch_fp16: cuBLAS fp16 matvec (W16A16); dequantising A and b to fp16 is left out of the time.

The fp16 values are exact, so the one difference is speed: the call reads 2 bytes a weight where NVFP4 has 0.5625.
cuBLAS accumulates in fp32; torch's default lets a kernel that splits k add its parts in fp16, which PEER_TOL admits.
"""

import torch
from task import input_t, output_t, unpack

from problems.common import nvfp4

TARGETS = ("sm90", "sm100")
REQUIRES = ()


def setup(data: input_t) -> tuple[torch.Tensor, torch.Tensor]:
    """-> A as fp16 (l, m, k) and b as fp16 (l, k, 1), both contiguous. ValueError as unpack says."""
    unpack(data)
    a = nvfp4.dequantise(data.a.permute(2, 0, 1), data.sfa.permute(2, 0, 1), torch.float16)
    b = nvfp4.dequantise(data.b[0].T, data.sfb[0].T, torch.float16)
    return a, b.unsqueeze(-1)


def custom_kernel(data: input_t, state: tuple[torch.Tensor, torch.Tensor]) -> output_t:
    """Write A b into data.c, fp16 (m, 1, l), and return it; `state` is what setup(data) gave."""
    a, b = state
    if len(a) == 1:
        torch.mv(a[0], b[0, :, 0], out=data.c[:, 0, 0])
    else:
        torch.bmm(a, b, out=data.c.permute(2, 0, 1))  # (l, m, 1), contiguous as c lies in memory
    return data.c
