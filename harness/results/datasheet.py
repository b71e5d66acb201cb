"""What the datasheets of GPUs promise."""

# Bytes a second and flops a second (dense; bf16), by what a GPU's name contains.
RATES = {"H200": (4.8e12, 989e12), "B200": (8.0e12, 2250e12), "H100": (3.35e12, 989e12)}
