"""Check token ids before anything is computed with them: an embedding would wrap a negative one.

Ids in a tensor of a GPU are not read, since that would wait for the device: there only their dtype and shape are known.
"""

from array import array
from collections.abc import Sequence

import torch

Tokens = Sequence[int] | torch.Tensor


def checked(what: str, tokens: Tokens, vocab: int) -> torch.Tensor | array:
    """Return `tokens`, a list of the host as an array of int64; what: names them in messages.

    ValueError: one is no integer, or not in 0 .. vocab - 1; a tensor that is not int64 and 1-D.
    """
    if isinstance(tokens, torch.Tensor):
        check_tensor(what, tokens, vocab)
        return tokens
    try:
        found = tokens if isinstance(tokens, array) and tokens.typecode == "q" else array("q", tokens)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{what} must be integers from 0 to {vocab - 1}, got {_first_bad(tokens, vocab)}") from error
    if found:
        check_tensor(what, torch.frombuffer(found, dtype=torch.int64), vocab)
    return found


def check_tensor(what: str, tokens: torch.Tensor, vocab: int, count: int | None = None) -> None:
    """Raise ValueError unless tokens are int64 (count,), of any length if None, and, on the CPU, in 0 .. vocab - 1."""
    if tokens.dtype != torch.int64 or tokens.dim() != 1 or count not in (None, len(tokens)):
        wanted = "int64 and 1-D" if count is None else f"int64 ({count},)"
        raise ValueError(f"{what} must be {wanted}, got {tokens.dtype} {tuple(tokens.shape)}")
    if tokens.device.type != "cpu" or not len(tokens):
        return
    least, most = (int(bound) for bound in torch.aminmax(tokens))
    if least < 0 or most >= vocab:
        raise ValueError(f"{what} must be integers from 0 to {vocab - 1}, got {_first_bad(tokens.tolist(), vocab)}")


def _first_bad(tokens: Sequence[object], vocab: int) -> str:
    """The first that is no token id, and its place."""
    try:
        listed = list(tokens)
    except TypeError:
        return repr(tokens)
    for place, token in enumerate(listed):
        try:
            if not 0 <= array("q", [token])[0] < vocab:
                return f"{token!r} at place {place}"
        except (TypeError, OverflowError):
            return f"{token!r} at place {place}"
    return repr(tokens)
