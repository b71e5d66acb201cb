"""torch_reference: every op holds the reference, plain torch. The baseline of the ratios."""

from task import Weights, input_t, output_t

from problems.dsv4_forward import judged_call

TARGETS = ("cpu", "sm90", "sm100")


def prepare(weights: Weights) -> judged_call.Prepared:
    """The model over the weights where they are."""
    return judged_call.prepare(weights, "reference")


def custom_kernel(data: input_t) -> output_t:
    """Run the model on data.inputs.tokens and the state; write data.outputs and return them."""
    return judged_call.run(data)
