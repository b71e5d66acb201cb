"""The judge's side of the player, the process that makes recorded calls on a GPU (harness/player/player.py)."""

from harness.judge import limits, replies
from harness.player import player
from harness.sandbox.process import Child, Died

EMPTY, READER = 1, 2  # what a player does in place of a call: nothing; reader READER + n
MEMORY = "CUDA_ERROR_ILLEGAL_ADDRESS"
MEMORY_HINT = (
    "in a timed call inputs and weights are read-only, and scratch memory must come from torch (torch.empty in the "
    "call, or before): memory of its own, or the address of a module's variable in a parameter, is not there"
)


class Player:
    """A player's process. Died from any request: it is gone, or failed and is ended."""

    def __init__(self, target: str) -> None:
        self.child, self.lost = Child("harness.player.player"), False
        self.readers: int = self._request({"library": str(player.artefact(target).path)})[0]["readers"]

    def _request(
        self, message: dict, fds: tuple[int, ...] = (), limit_s: float = limits.CHECKER_LIMIT_S
    ) -> tuple[dict, list[int]]:
        reply, given = self.child.request(message, limit_s, fds)
        if "failed" not in reply:
            return reply, given
        text = reply["text"]
        if reply["failed"] == player.RefusedError.__name__:
            raise Died("RUNTIME_ERROR", f"its recorded call is refused: {text}")
        self.child.kill()
        self.lost = True
        if text.startswith("TIMEOUT "):
            raise Died("TIMEOUT", text.removeprefix("TIMEOUT "))
        raise Died("RUNTIME_ERROR", f"{text}; {MEMORY_HINT}" if MEMORY in text else text)

    def scratch(self, nbytes: int) -> tuple[dict, int]:
        """Forget all calls, and make scratch memory for those of the next runner. Return what the runner needs, with
        the descriptor.
        """
        nbytes = -(-nbytes // player.PAGE) * player.PAGE
        reply, (fd,) = self._request({"op": "scratch", "bytes": nbytes})
        return {"address": reply["address"], "nbytes": nbytes}, fd

    def memory(self, number: int, sizes: dict[str, int]) -> list[int]:
        """Make the memory of a call: "inputs", "outputs" and "weights" bytes. Return the descriptors."""
        return self._request({"op": "memory", "number": number, **sizes})[1]

    def move(self, number: int) -> list[int]:
        """Put a call's memory elsewhere. Return the descriptors, as `memory` does."""
        return self._request({"op": "move", "number": number})[1]

    def load(self, number: int, recorded: replies.Recorded, images: list[int]) -> None:
        """Take a recorded call. images: descriptors of its code."""
        parts = recorded.model_dump(by_alias=True, include={"before", "nodes", "variables", "used"})
        self._request({"op": "load", "number": number, **parts}, tuple(images))

    def play(
        self, number: int, copy: int, limit_s: float, what: int = 0, nbytes: int = 0, takes: list[dict] | None = None
    ) -> tuple[float, float]:
        """Make a call on the contents of one of its copies. Return (us of the event pair, us of the host's clock)."""
        message = {"op": "play", "number": number, "copy": copy, "what": what, "bytes": nbytes, "limit_s": limit_s}
        reply, _ = self._request({**message, "takes": takes or []}, limit_s=3 * limit_s + limits.CHECKER_LIMIT_S)
        return reply["us"], reply["host_us"]

    def close(self) -> None:
        self.child.close()
