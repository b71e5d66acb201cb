"""The operators as layers for `kernels.kernelize`: torch.nn.Modules without state, named FmhaDecode for fmha_decode.

forward takes what the operator takes, writes the outputs among it and returns None. Errors: see operators.py.
"""

import inspect
from typing import Any

import torch

from dsv4_kernels import operators


def _layer(operator: torch.library.CustomOpDef) -> type[torch.nn.Module]:
    def forward(self: torch.nn.Module, *given: Any, **named: Any) -> None:
        operator(*given, **named)

    names = ["self", *(argument.name for argument in operator._opoverload._schema.arguments)]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    setattr(forward, "__signature__", inspect.Signature(parameters))  # noqa: B010  kernelize compares signatures
    members = {"forward": forward, "can_torch_compile": True, "has_backward": False, "__module__": __name__}
    return type("".join(map(str.capitalize, operator._name.split("_"))), (torch.nn.Module,), members)


FmhaDecode, FmhaPrefill = _layer(operators.fmha_decode), _layer(operators.fmha_prefill)
Indexer, MhcSite, Nvfp4Gemv = _layer(operators.indexer), _layer(operators.mhc_site), _layer(operators.nvfp4_gemv)
MoeGemm, LinearDecode = _layer(operators.moe_gemm), _layer(operators.linear_decode)
