"""Its runner exports another call than the one that was recorded.
Stopped by: the judge takes kernels, copies and fills alone, of limited number and within the call's memory; what is
replayed is checked, on contents that came to exist when the runner was gone.
"""

import torch

from harness.runner import recorder
from tests.attacks.shared import VARIANT

TARGETS = ("sm90", "sm100")
VERDICT = ("RUNTIME_ERROR", "RULE_BROKEN", "CHEAT_SUSPECTED")
VARIANTS = {
    "takes": "Has the player copy a part of the answer to its place behind the clock, as it does for folders whose"
    " calls return tensors of their own. Stopped by: a call that receives its outputs has nothing to copy.",
    "setup": "Exports the first part of the call as a setup, which the player makes on the call's contents before the"
    " clock starts. Stopped by: a submission's export may not have a setup; only a baseline has one.",
    "another_call": {
        "VERDICT": "INCORRECT",
        "REASON": "Number of mismatched elements",
        "ABOUT": "Exports a call that copies a stored answer, in place of the one that it was to record.",
    },
    "copies_outside": {
        "VERDICT": "RUNTIME_ERROR",
        "REASON": "neither scratch nor output",
        "ABOUT": "Its export has a copy to its inputs, which no call may write.",
    },
    "huge": {"VERDICT": "RUNTIME_ERROR", "ABOUT": "Its export has a million copies of no bytes."},
}
_kept = []
_record = recorder.record


def copy(to, source, nbytes):
    return {"kind": "copy", "to": to.data_ptr(), "from": source.data_ptr(), "bytes": nbytes}


def record(kernel, arguments, setup):
    x, _, z = arguments[0]
    if VARIANT == "another_call":
        _kept.append(torch.empty_like(z))
    message, fds, result = _record(kernel, arguments, setup)
    if VARIANT == "takes":
        message["takes"] = [{"to": z.data_ptr(), "from": z.data_ptr(), "bytes": 2}]
    elif VARIANT == "setup":
        message["before"], message["nodes"] = message["nodes"][:1], message["nodes"][1:]
    elif VARIANT == "another_call":
        _kept[-1].copy_(z)
        message.update(nodes=[copy(z, _kept[-1], z.nbytes)], variables=[])
        torch.cuda.synchronize()
    elif VARIANT == "copies_outside":
        message["nodes"].append(copy(x, x, 2))
    else:
        message["nodes"] = [copy(z, z, 0)] * 1_000_000
    return message, fds, result


recorder.record = record


def custom_kernel(data):
    part = len(data.x) // 8
    for where in (slice(0, part), slice(part, None)):
        torch.add(data.x[where], data.y[where], out=data.z[where])
    return data.z
