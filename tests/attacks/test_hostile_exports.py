"""Exports that no recorder writes: the judge or the player refuses them, or the player is lost alone. Needs a GPU."""

import contextlib
import copy
import os

import pytest

from harness.judge import replies
from harness.judge.handle import RunnerHandle
from harness.judge.recording import Player, Replays
from harness.judge.session import Session
from harness.player import player
from harness.problem import folders
from harness.sandbox.process import Died
from tests.attacks import variants
from tests.support import SUPPORT

SUBMISSION = next(file for file in variants.files() if file.stem == "honest_cuda")
SCRATCH, INPUTS = player.BASE, player.place_of(1)
OUTPUTS = INPUTS + player.PAGE
FILL = {"kind": "fill", "to": OUTPUTS, "pitch": 8, "width": 2, "height": 1, "value": 0, "element": 4}


def of_copy(**fields) -> dict:
    """Change: a copy more, of 8 bytes from scratch memory to the outputs but for these fields."""
    return {"more": [{"kind": "copy", "to": OUTPUTS, "from": SCRATCH, "bytes": 8, **fields}]}


def of_kernel(**fields) -> dict:
    return {"kernel": fields}


# What is changed in the export of an honest call, and what the reason holds.
CHANGES = {
    "a copy to inputs": (of_copy(to=INPUTS), "neither scratch nor output"),
    "a copy across the end": (of_copy(to=OUTPUTS + player.PAGE - 4), "neither scratch nor output"),
    "a copy that wraps around": (of_copy(to=2**64 - 4, bytes=2**47), "neither scratch nor output"),
    "a copy from elsewhere": (of_copy(**{"from": 4096}), "not the call's"),
    "a copy from another call": (of_copy(**{"from": player.place_of(2)}), "not the call's"),
    "a fill of inputs": ({"more": [FILL | {"to": INPUTS}]}, "neither scratch nor output"),
    "a fill with a far row": ({"more": [FILL | {"pitch": 2**40, "height": 2}]}, "fill"),
    "a fill whose size wraps": ({"more": [FILL | {"pitch": 2**32, "height": 2**32}]}, "fill"),
    "a fill of odd elements": ({"more": [FILL | {"element": 3}]}, "unknown size"),
    "5000 copies": ({"more": of_copy()["more"] * 5000}, "malformed reply"),
    "no image": (of_kernel(image=2**32 - 1), "of no image"),
    "no kernel": (of_kernel(name="nothing"), "kernel nothing"),
    "parameters elsewhere": (of_kernel(layout=[2**20, 8, 8, 8, 16, 8, 24, 8]), "not those of its code"),
    "too few parameters": (of_kernel(layout=[0, 8, 8, 8]), "too few parameters"),
    "too many parameters": (of_kernel(layout=[0, 8, 8, 8, 16, 8, 24, 8, 32, 8]), "parameters"),
    "values of no size": (of_kernel(values=""), "another size"),
    "a negative carveout": (of_kernel(carveout=-2), "malformed reply"),
    "no blocks": (of_kernel(grid=[0, 1, 1]), "INVALID_VALUE"),
    "a cluster of nothing": (of_kernel(cluster=[1, 0, 0]), "launch"),
    "blocks of four billion": (of_kernel(block=[2**32 - 1] * 3), "INVALID_VALUE"),
    "more scratch than there is": ({"used": [0, 2**47]}, "beyond scratch memory"),
    "all scratch memory twice": ({"used": [0, player.PAGE, 0, player.PAGE]}, "more than scratch memory"),
    "half an image": ({"image": lambda image: image[: len(image) // 2]}, ""),
    "an empty image": ({"image": lambda image: b""}, ""),
    "text for an image": ({"image": lambda image: b".version 9.0\n.target sm_90\n.entry f() { bra f; }"}, ""),
}


@pytest.fixture(scope="module")
def export():
    """The export of an honest call, and its images."""
    problem, exports = folders.find(str(SUPPORT / "problems" / "vector_add")), []
    handle = RunnerHandle("honest", folders.submission(problem, SUBMISSION), "sm90")

    def load(_, recorded, images, kept):
        exports.append((recorded.model_dump(by_alias=True), [os.pread(fd, 2**28, 0) for fd in images]))

    with pytest.MonkeyPatch.context() as patch, Session(problem, "cuda") as session:
        patch.setattr(Player, "load", load)
        session.build(handle)
        with Replays(session, [handle], {0: problem.tests[0]}, {0: 1}) as replays:
            next(replays.waves())
            replays.place(0)
            assert exports, replays.played[handle.name].recordings[0].failure
    return exports[0]


def played(message: dict, images: list[bytes]) -> tuple[float, float]:
    """Load an export into a fresh player, and make its call."""
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(contextlib.closing(Player("sm90")))

        def kept(fds: list[int]) -> list[int]:
            for fd in fds:
                stack.callback(os.close, fd)
            return fds

        kept([made.scratch(player.PAGE)[1]])
        kept(made.memory(1, {"inputs": player.PAGE, "outputs": player.PAGE, "weights": 0}))
        fds = kept([os.memfd_create("image") for _ in images])
        for fd, image in zip(fds, images, strict=True):
            os.write(fd, image)
        recorded = replies.read(replies.Recorded, message)
        made.load(recorded, fds, kept(made.snapshot(recorded.used)))
        return made.play(0, 5.0)


@pytest.mark.gpu
@pytest.mark.parametrize("change", CHANGES)
def test_it_is_refused(change, export):
    changed, text = CHANGES[change]
    message, images = copy.deepcopy(export[0]), list(export[1])
    message["nodes"][0].update(changed.get("kernel", {}))
    message["nodes"] += changed.get("more", [])
    message["used"] = changed.get("used", [])
    if "image" in changed:
        images[0] = changed["image"](images[0])
    with pytest.raises(Died, match=text) as died:
        played(message, images)
    assert died.value.status == "RUNTIME_ERROR"


@pytest.mark.gpu
def test_it_would_be_played_unchanged(export):
    us, host_us = played(export[0] | {"used": []}, export[1])
    assert 0 < us < host_us
