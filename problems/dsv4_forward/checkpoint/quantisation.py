"""Compare what config.json's quantization_config says with the tensors, whose dtypes alone decide how they are loaded.

Where the two differ, one of them is another model's. The file may say less than the tensors, or nothing. Names and
dtypes: checkpoint_names.py.
"""

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import NamedTuple

from problems.dsv4_forward.checkpoint import checkpoint_names
from problems.dsv4_forward.checkpoint.checkpoint_names import Stored

_OF_FP8 = ("quant_method", "fmt", "scale_fmt", "weight_block_size", "activation_scheme")
_OF_NVFP4 = ("quant_method", "quant_algo", "moe_quant_algo", "group_size")
_FORMATS = {"F8_E4M3": "FP8", "I8": "MXFP4", "U8": "NVFP4"}  # of a quantised matrix, by its dtype
_ALGORITHMS = {"NVFP4": "U8", "FP8_PB_WO": "F8_E4M3"}  # of quantized_layers -> dtype
_NOT_QUANTISED = ("modules_to_not_convert", "ignored_layers")
_NOT_NVFP4 = ("ignore", "exclude_modules")  # of modelopt: what it left as it was, in FP8 too
_WHAT_TO_DO = "correct quantization_config, or remove it: the format is read from the tensors"


class _Matrix(NamedTuple):
    """A tensor "....weight" by DeepSeek's name for it."""

    name: str
    held: Stored

    def named(self, naming: Callable[[str], bool]) -> bool:
        """Whether what is listed names its module, in DeepSeek's spelling or the file's."""
        return naming(_module(self.name)) or (self.held.name != self.name and naming(_module(self.held.name)))


def contradictions(said: dict, stored: dict[str, Stored]) -> list[str]:
    """A fault for each statement of `said` that a tensor is against, with the key, its value and the tensor.

    said: as config_json.quantisation_from_json returns it; stored: tensors, of a format that was detected.
    """
    if not said:
        return []
    linear, expert = checkpoint_names.examples(stored)
    weights = {name: (group or {}).get("weights") or {} for name, group in said.get("config_groups", {}).items()}
    bits = {name: held.get("num_bits") for name, held in weights.items()}
    fp8 = [key for key in _OF_FP8 if key in said and said[key] != "modelopt"]
    nvfp4 = [key for key in _OF_NVFP4 if key in said and said[key] != "fp8"]
    claims = [
        ([*_shown(said, fp8), *_bits(bits, 8)], "attention matrices are FP8", linear, ("F8_E4M3",)),
        ([*_shown(said, nvfp4), *_bits(bits, 4)], "routed experts are NVFP4", expert, ("U8",)),
        (_shown(said, ["expert_dtype"]), "routed experts have 4 bits", expert, ("I8", "U8")),
    ]
    ignored = [name for key in _NOT_NVFP4 for name in said.get(key, [])]
    first = _Matrix(checkpoint_names.canonical(linear.name), linear)
    whole = said.get("quant_algo") == "NVFP4" and expert.dtype == "U8"
    if whole and not any(first.named(_naming(one)) for one in ignored):
        claims.append((_shown(said, ["quant_algo"]), "attention matrices are NVFP4", linear, ("U8",)))
    faults = [
        f"config.json: quantization_config has {', '.join(keys)}, by which {claim}, but {held.name} is "
        f"{_format(held)}: {_WHAT_TO_DO}"
        for keys, claim, held, dtypes in claims
        if keys and held.dtype not in dtypes
    ]
    modelopt = bool(nvfp4) or "config_groups" in said or "quantized_layers" in said
    matrices = [_Matrix(name, held) for name, held in stored.items() if name.endswith(".weight")]
    return faults + _listed(said, matrices, modelopt) + _layers(said, matrices)


def _shown(said: dict, keys: list[str]) -> list[str]:
    return [f"{key} {said[key]!r}" for key in keys if key in said]


def _bits(found: dict[str, object], wanted: int) -> list[str]:
    """The groups of config_groups whose weights have so many bits."""
    return [f"config_groups.{name}.weights.num_bits {wanted}" for name, bits in found.items() if bits == wanted]


def _format(held: Stored) -> str:
    return f"{_FORMATS[held.dtype]} ({held.dtype})" if held.dtype in _FORMATS else held.dtype


def _listed(said: dict, matrices: list[_Matrix], modelopt: bool) -> list[str]:
    """Modules that a list says are not quantised, and are; the first of each name."""
    faults = []
    for key in (*_NOT_QUANTISED, *_NOT_NVFP4):
        other = modelopt and key in _NOT_NVFP4
        there = [one for one in matrices if one.held.dtype == "U8" or (one.held.dtype in _FORMATS and not other)]
        for listed in said.get(key, []):
            naming = _naming(listed)
            if held := next((one.held for one in there if one.named(naming)), None):
                without = "NVFP4" if other else "a quantised format"
                faults.append(
                    f"config.json: quantization_config.{key} has {listed!r}, by which it is not in {without}, but "
                    f"{held.name} is {_format(held)}: {_WHAT_TO_DO}"
                )
    return faults


def _layers(said: dict, matrices: list[_Matrix]) -> list[str]:
    """What quantized_layers says of modules that are in another format; the first tensor of each name."""
    faults = []
    for listed, layer in said.get("quantized_layers", {}).items():
        naming, algorithm = _naming(listed), (layer or {}).get("quant_algo")
        there = [one for one in matrices if one.held.dtype != _ALGORITHMS.get(algorithm, one.held.dtype)]
        if held := next((one.held for one in there if one.named(naming)), None):
            faults.append(
                f"config.json: quantization_config.quantized_layers.{listed} has quant_algo {algorithm!r}, but "
                f"{held.name} is {_format(held)}: {_WHAT_TO_DO}"
            )
    return faults


def _naming(listed: str) -> Callable[[str], bool]:
    """Whether what is in a list names a module: by a regular expression behind "re:", a pattern with stars, or a whole
    part of the module's name, in DeepSeek's spelling or transformers'.
    """
    if listed.startswith("re:"):
        try:
            pattern = re.compile(listed[3:])
        except re.error:  # it names nothing that could be compared
            return lambda module: False
        return lambda module: bool(pattern.match(module))
    if set("*?[") & set(listed):
        return lambda module: fnmatchcase(module, listed)
    canonical = checkpoint_names.canonical
    spelled = {
        listed,
        _module(canonical(f"{listed}.weight")),
        _module(canonical(f".{listed}.weight")).removeprefix("."),
    }
    return lambda module: any(f".{one}." in f".{module}." for one in spelled if one and one in module)


def _module(name: str) -> str:
    return name.removesuffix(".weight")
