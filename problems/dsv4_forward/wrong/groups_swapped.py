"""Wrong: each group of wo_a is multiplied with its neighbour's heads."""

from problems.dsv4_forward import linear


def grouped_linear(x, w, out):
    linear.grouped_linear(x.roll(1, 1), w, out)
