"""Right in what it computes, but not in what it returns or writes: another tensor, or a byte beside its output.
Stopped by: a runner says what came back after each test call and after the last call of each case; the bytes between
tensors are secret, and compared after the call; the output is the judge's tensor.
"""

import torch

TARGETS = ("cpu", "sm90", "sm100")
VERDICT = "INCORRECT"
VARIANTS = {
    "copy_when_timed": {"REASON": "the output tensor it was given"},
    "writes_beside": {"REASON": "behind output z"},
    "odd_type": {"REASON": "[/red]PASSED", "TARGETS": ("cpu",)},
}
TESTED = 2**19  # elements; no test case has as many, and every timed one more
ODD = type("\x1b[2J\x1b[H[/red]PASSED|\n| 1 us |\u202e", (torch.Tensor,), {})


def copy_when_timed(data):
    """Returns a copy of its output at sizes that are only timed."""
    torch.add(data.x, data.y, out=data.z)
    return data.z if data.z.numel() <= TESTED else data.z.clone()


def writes_beside(data):
    """Writes one element behind its output, where it could keep what a later call finds."""
    torch.add(data.x, data.y, out=data.z)
    data.z.as_strided((1,), (1,), data.z.storage_offset() + data.z.numel()).fill_(7)
    return data.z


def odd_type(data):
    """The name of the type that it returns, and of its error, moves the cursor and makes a table row."""
    return torch.add(data.x, data.y, out=data.z).as_subclass(ODD)
