"""The judge's side of the player, the process that makes recorded calls on a GPU (harness/player/player.py)."""

import contextlib

from harness.judge import replies
from harness.player import player
from harness.problem.folders import ProblemError
from harness.sandbox.process import Child, Died

EMPTY, READER = 1, 2  # what a player does in place of a call: nothing; reader READER + n
MEMORY = "CUDA_ERROR_ILLEGAL_ADDRESS"
MEMORY_HINT = (
    "in a timed call inputs and weights are read-only, and scratch memory must come from torch (torch.empty in the "
    "call, or before): memory of its own, or the address of a module's variable in a parameter, is not there"
)


class Player:
    """A player's process. Died from any request: it is gone, or failed and is ended. ProblemError: it cannot start."""

    def __init__(self, target: str) -> None:
        self.child = Child("harness.player.player")
        self._images: dict[int, int] = {}  # by descriptor, the number of code that the process has loaded
        self._about: dict | None = None  # its first reply, which takes a second; None: that is still to come
        with contextlib.suppress(Died):  # as the first request says
            self.child.send({"library": str(player.artefact(target).path)})

    @property
    def about(self) -> dict[str, int]:
        """How many plain "readers" it has, and of how many "device_bytes" the device is."""
        if self._about is None:
            try:
                self._about = self._taken(self.child.receive(replies.CHECKER_LIMIT_S))[0]
            except Died as died:
                raise ProblemError(f"no player can be started: {died.reason}") from None
        return self._about

    def _request(
        self, message: dict, fds: tuple[int, ...] = (), limit_s: float = replies.CHECKER_LIMIT_S
    ) -> tuple[dict, list[int]]:
        self.about  # noqa: B018  it has started
        return self._taken(self.child.request(message, limit_s, fds))

    def _taken(self, answer: tuple[dict, list[int]]) -> tuple[dict, list[int]]:
        """Return a reply and its descriptors. Died: it says that the player failed."""
        reply, given = answer
        if "failed" not in reply:
            return reply, given
        text = reply["text"]
        if reply["failed"] == player.RefusedError.__name__:
            raise Died("RUNTIME_ERROR", f"its recorded call is refused: {text}")
        self.child.kill()
        if text.startswith("TIMEOUT "):
            raise Died("TIMEOUT", text.removeprefix("TIMEOUT "))
        raise Died("RUNTIME_ERROR", f"{text}; {MEMORY_HINT}" if MEMORY in text else text)

    def scratch(self, nbytes: int) -> tuple[dict, int]:
        """Forget the call, and make scratch memory for those of the next runner. Return what the runner needs, with the
        descriptor.
        """
        nbytes = -(-nbytes // player.PAGE) * player.PAGE
        reply, (fd,) = self._request({"op": "scratch", "bytes": nbytes})
        return {"address": reply["address"], "nbytes": nbytes}, fd

    def memory(self, number: int, sizes: dict[str, int]) -> list[int]:
        """Forget the call, and make the memory of another: "inputs", "outputs" and "weights" bytes. Return the
        descriptors.
        """
        return self._request({"op": "memory", "number": number, **sizes})[1]

    def snapshot(self, used: list[int]) -> list[int]:
        """Copy ranges of scratch memory, each an offset and a size. Return the copy's descriptor, if there are any."""
        return self._request({"op": "snapshot", "used": used})[1]

    def load(self, recorded: replies.Recorded, images: list[int], kept: list[int]) -> None:
        """Take a recorded call, whose memory was made. images, kept: descriptors of its code, which stay open as long
        as the process lives, and of the copy of the scratch memory that it uses.
        """
        parts = recorded.model_dump(by_alias=True, include={"before", "nodes", "variables", "used"})
        fresh = [fd for fd in dict.fromkeys(images) if fd not in self._images]
        for fd in fresh:
            self._images[fd] = len(self._images)
        numbers = [self._images[fd] for fd in images]
        self._request({"op": "load", **parts, "images": numbers, "kept": bool(kept)}, (*fresh, *kept))

    def play(
        self, copy: int, limit_s: float, what: int = 0, nbytes: int = 0, takes: list[dict] | None = None
    ) -> tuple[float, float]:
        """Make the call on the contents of one of its copies. Return (us of the event pair, us of the host's clock)."""
        message = {"op": "play", "copy": copy, "what": what, "bytes": nbytes, "limit_s": limit_s, "takes": takes or []}
        reply, _ = self._request(message, limit_s=3 * limit_s + replies.CHECKER_LIMIT_S)
        return reply["us"], reply["host_us"]

    def close(self) -> None:
        self.child.close()
