"""composed: the problems' winners in every op that they can fill, the reference in the others."""

from task import Weights, input_t, output_t

from problems.dsv4_forward import judged_call

TARGETS = ("cpu", "sm90", "sm100")
COMPOSES = ("nvfp4_gemv", "fmha_decode", "fmha_prefill", "indexer", "moe_gemm", "linear_decode", "mhc_site")


def compile_for(target: str) -> list:
    """Machine code of the winners for `target`."""
    return judged_call.compile_for(COMPOSES, target)


def prepare(weights: Weights) -> judged_call.Prepared:
    """The model over the weights, which winners lay out once more where they want to. ValueError as ops.choose."""
    return judged_call.prepare(weights, "winners")


def custom_kernel(data: input_t) -> output_t:
    """Run the model on data.inputs.tokens and the state; write data.outputs and return them."""
    return judged_call.run(data)
