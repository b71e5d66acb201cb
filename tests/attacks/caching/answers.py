"""Keeps answers and gives them again.
Stopped by: every call, timed or not, has contents of its own at addresses that repeat, and is checked.
"""

import gc

import torch

from tests.attacks.shared import add, frames, honest_call

TARGETS = ("cpu", "sm90", "sm100")
VARIANTS = {
    "one_for_a_shape": {"REASON": "must return the output tensor"},
    "by_fingerprint": {"TARGETS": ("cpu",)},
    "by_all_contents": {"TARGETS": ("cpu",), "VERDICT": "PASSED"},
    "flag_in_scratch": {"TARGETS": ("sm90", "sm100")},
}
_kept = {}


def one_for_a_shape(data):
    """Computes once for a shape and returns that tensor for ever, in place of the judge's."""
    if honest_call():
        return add(data)
    if data.x.shape not in _kept:
        _kept[data.x.shape] = data.x + data.y
    return _kept[data.x.shape]


def by_address(data):
    """Answers are kept by the address of the inputs."""
    return kept((data.x.data_ptr(), data.y.data_ptr(), len(data.x)), data)


def kept(key, data):
    if honest_call():
        return add(data)
    key = key if len(data.x) > 2**16 else len(_kept)
    if key not in _kept:
        _kept[key] = data.x + data.y
    return data.z.copy_(_kept[key])


def fingerprint(tensor):
    # All batches of one distribution look alike: that is what makes the cache pay.
    sample = tensor[:: max(1, len(tensor) // 4096)].float()
    return (len(tensor), round(float(sample.mean())), round(float(sample.std(correction=0))))


def by_fingerprint(data):
    """Answers are kept by a fingerprint of the contents, coarse enough to be hit."""
    return kept((fingerprint(data.x), fingerprint(data.y)), data)


def by_all_contents(data):
    """Remembers all inputs by their whole contents, and what it answered. It pays for looking."""
    key = hash((data.x.numpy().tobytes(), data.y.numpy().tobytes()))
    if not honest_call() and key in _kept:
        return data.z.copy_(_kept[key])
    add(data)
    _kept[key] = data.z.clone()
    return data.z


def flag_in_scratch(data):
    """Keeps the answer and a flag in scratch memory, which is as it was at capture, and copies it by the flag."""
    there, answer = _kept.setdefault(data.z.data_ptr(), (torch.zeros(1, device="cuda"), torch.zeros_like(data.z)))
    answer.copy_(torch.where(there > 0, answer, data.x + data.y))
    there.fill_(1)
    return data.z.copy_(answer)


def by_count(data):
    """Honest until the large case has come once, as a check would; then it only touches the ends."""
    n, honest = len(data.x), honest_call()
    _kept[n] = _kept.get(n, 0) + 1
    if honest or n <= 2**16 or _kept[n] == 1:
        return add(data)
    for part in (slice(0, 4096), slice(n - 4096, n)):
        torch.add(data.x[part], data.y[part], out=data.z[part])
    return data.z


def being_timed():
    names = set()
    for frame in frames():
        names.add(frame.f_code.co_name)
        if len(getattr(frame.f_locals.get("self"), "buffers", ())) > 1:
            return True
    return "_recorded" in names or ("time" in names and not gc.isenabled())


def by_phase(data):
    """Looks for signs of timing (frames, buffers, collector, or that the call is recorded), skips work only there."""
    n = 4096 if len(data.x) > 2**16 and being_timed() else len(data.x)
    torch.add(data.x[:n], data.y[:n], out=data.z[:n])
    return data.z
