"""What of torch cannot be recorded, or is recorded once and not made again.
Stopped by: a recorded call is one sequence on the device, and does in each timed call what it did.
"""

import torch

from tests.attacks.shared import VARIANT

TARGETS = ("sm90", "sm100")
VERDICT = "UNSUPPORTED"
VARIANTS = {
    "answer_from_the_host": {"REASON": "from or to the host"},
    "one_launch_for_all": {"VERDICT": "INCORRECT", "REASON": "Number of mismatched elements"},
    "holds_the_profiler": {"VERDICT": ("PASSED", "UNSUPPORTED"), "HONEST": "honest_answer_vector_add"},
}
_kept = {}
_calls = 0
if VARIANT == "holds_the_profiler":
    _profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    _profiler.start()


def captures_a_graph(data):
    """Captures the call with torch and replays it: a graph that is launched in a call cannot be recorded."""
    places = tuple(tensor.data_ptr() for tensor in data)
    if places not in _kept:
        _kept[places] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(_kept[places]):
            torch.add(data.x, data.y, out=data.z)
    _kept[places].replay()
    return data.z


def answer_from_the_host(data):
    """The host's processor computes the answer, and the call only copies it to the device."""
    if data.z.data_ptr() not in _kept:
        _kept[data.z.data_ptr()] = (data.x.cpu() + data.y.cpu()).pin_memory()
    data.z.copy_(_kept[data.z.data_ptr()], non_blocking=True)
    return data.z


def one_launch_for_all(data):
    """The first call of four computes for all memory that it was called with; the others return at once."""
    global _calls
    if data.z.data_ptr() not in _kept:
        _calls = 0
    _calls += 1
    _kept.clear()  # memory of an earlier case is gone
    _kept[data.z.data_ptr()] = data
    if _calls % 4 == 1:
        for x, y, z in _kept.values():
            torch.add(x, y, out=z)
    return data.z


def holds_the_profiler(data):
    """Starts the profiler itself and never stops it, so that the judge, which asks the same library for the code of
    kernels, gets none. Stopped by: a call without code is not replayed. Where the judge gets it all the same, this
    gains nothing.
    """
    return torch.add(data.x, data.y, out=data.z)
