"""What the datasheets of GPUs promise."""

# Bytes a second and flops a second (dense; bf16), by what a GPU's name contains.
RATES = {"H200": (4.8e12, 989e12), "B200": (8.0e12, 2250e12), "H100": (3.35e12, 989e12)}
FP4 = {"B200": 9000e12}  # flops a second, dense, with FP4 on both sides, of GPUs that have such instructions


def flops_rate(gpu: str, activation: object = None) -> float:
    """Return the flops a second of a GPU of RATES in a case with that `activation`, "nvfp4" or anything else."""
    return FP4.get(gpu, RATES[gpu][1]) if activation == "nvfp4" else RATES[gpu][1]
