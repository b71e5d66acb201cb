"""Wrong: takes all sequences to be as long as the first."""

from problems.dsv4_forward import judged_call

TARGETS = ("cpu", "sm90", "sm100")


def prepare(weights):
    return judged_call.prepare(weights, "reference")


def custom_kernel(data):
    lengths = data.inputs.lengths[:1].expand(len(data.inputs.lengths))
    return judged_call.run(data._replace(inputs=data.inputs._replace(lengths=lengths)))
