"""Kernels that the check must refuse, as edits of a right one (problems/wrong.py)."""

from problems.wrong import mistake

RIGHT = """
from task import input_t, output_t, unpack

TARGETS = ("cpu", "sm90", "sm100")


def custom_kernel(data: input_t) -> output_t:
    m, k = unpack(data)
    data.y[:] = data.w @ data.x
    return data.y
"""
ALL = "data.y[:] = data.w @ data.x"
SMALL = "m=33 k=7"
WRONG = {
    "drops_last_column": mistake(
        "Leaves the last column out.", SMALL, RIGHT, ("w @ data.x", "w[:, :-1] @ data.x[:-1]")
    ),
    "inputs_in_bf16": mistake("Rounds W to bf16 before the product.", SMALL, RIGHT, ("w @", "w.bfloat16().float() @")),
    "skips_last_row": mistake(
        "Leaves the last row as it is.", SMALL, RIGHT, (ALL, "data.y[:-1] = data.w[:-1] @ data.x")
    ),
}
