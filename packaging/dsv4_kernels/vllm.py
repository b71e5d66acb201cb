"""Let vLLM call fmha_decode's winner where it calls FlashMLA: the entry point vllm.general_plugins.

vLLM loads its plugins before it imports its models, which take the function from the module that is changed here.
"""

import functools
import importlib
import inspect
import logging
from typing import Any

import torch

from dsv4_kernels import compat

MODULE, NAME = "vllm.v1.attention.ops.flashmla", "flash_mla_with_kvcache"
_ARGUMENTS = tuple(inspect.signature(compat.flash_mla_with_kvcache).parameters)
KNOWN = (_ARGUMENTS, _ARGUMENTS[:-1])  # vLLM's FlashMLA, and DeepSeek's, which has no `out`


def register() -> None:
    """Replace vLLM's flash_mla_with_kvcache, or log one warning, where vLLM has none with the known arguments.

    What compat does not serve goes to the function that was there, with one warning a reason. On GPUs that are not of
    sm_90 all calls do: the winner there is made for comparisons, not for serving.
    """
    try:
        module = importlib.import_module(MODULE)
        theirs = getattr(module, NAME)
        arguments = tuple(inspect.signature(theirs).parameters)
    except (ImportError, AttributeError) as error:
        _warn_once(f"dsv4-kernels: FlashMLA stays: no {NAME} in {MODULE} ({error})")
        return
    if arguments not in KNOWN:
        _warn_once(f"dsv4-kernels: FlashMLA stays: {NAME} has arguments {arguments}, known are {KNOWN[0]}")
        return

    @functools.wraps(theirs)
    def flash_mla_with_kvcache(q: torch.Tensor, *rest: Any, **named: Any) -> object:
        if q.is_cuda and torch.cuda.get_device_capability(q.device)[0] != 9:
            return theirs(q, *rest, **named)
        try:
            return compat.flash_mla_with_kvcache(q, *rest, **named)
        except ValueError as refused:  # before anything is computed
            _warn_once(f"dsv4-kernels: FlashMLA serves a call: {refused}")
            return theirs(q, *rest, **named)

    if inspect.unwrap(theirs) is theirs:  # vLLM may load a plugin several times in a process
        setattr(module, NAME, flash_mla_with_kvcache)


@functools.cache
def _warn_once(text: str) -> None:
    logging.getLogger(__name__).warning(text)
