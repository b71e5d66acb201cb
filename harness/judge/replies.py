"""The form of every reply of a runner, field by field, and how long the judge waits for one. A process that holds a
submission writes them.

`read` checks type, range and length of each field, and cleans texts. A reply that does not fit is a RUNTIME_ERROR.
"""

import json
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from harness.results import text
from harness.runner.gate import RETURNED
from harness.runner.wire import VARIABLE_BYTES
from harness.sandbox.process import Died

# Seconds, and how often the judge tries again.
IMPORT_LIMIT_S = 120  # importing torch and the submission
COMPILE_LIMIT_S = 120  # the first call of a process, which may compile; and compile checks, per artefact set
PREPARE_LIMIT_S = 60
CALL_LIMIT_S = 30
CHECKER_LIMIT_S = 600  # a reference is slow on purpose
CANARY_LIMIT_S = 60  # for the device to answer after a runner was lost; the kernel ends a hung one by then
GIVE_UP_AFTER = 3  # processes that a submission may lose in one phase
SETTLE_S = 0.05  # between looks at processes that are about to end
SETTLES = 5  # such looks before a process counts as left behind

TEXT_LIMIT = 20_000  # characters; a runner cuts its own texts at 16,000
NAME_LIMIT = 200
TABLE_LIMIT = 2**20
DIMENSIONS = 16
PLACE_LIMIT = 60  # characters of the place of a fault: a runner may name a field as it likes
WORDY = 5  # times a text's limit: a longer text is refused, since cleaning takes time
_MOST_US = 1e12  # no call takes eleven days
_LEAST_US = 1e-3  # nor less than a cycle of a GPU; ratios and geometric means are of times above 0
_MOST_BYTES = 2**48
NODES = 4096  # of a recorded call; its modules may have 16 times as many variables, CUTLASS's headers bring thousands


def _cleaned(clean: Callable[[str, int], str], limit: int, most: int = WORDY * TEXT_LIMIT) -> AfterValidator:
    """Return what cleans a text and cuts it to `limit` characters. A text of more than `most` is a fault."""

    def cleaned(value: str) -> str:
        if len(value) > most:
            raise ValueError(f"a text must have at most {most} characters, got {len(value)}")
        return clean(value, limit)

    return AfterValidator(cleaned)


Text = Annotated[str, _cleaned(text.clean, TEXT_LIMIT)]
Name = Annotated[str, _cleaned(text.line, NAME_LIMIT)]
Count = Annotated[int, Field(ge=0, le=_MOST_BYTES)]
# -0.0 becomes 0.0.
Time = Annotated[float, Field(ge=0, le=_MOST_US, allow_inf_nan=False), AfterValidator(abs)]
Taken = Annotated[float, Field(ge=_LEAST_US, le=_MOST_US, allow_inf_nan=False)]


class Reply(BaseModel):
    """A reply: its fields only, no value converted. most_values: in it, since pydantic lists all faults."""

    most_values: ClassVar[int] = 10_000
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Done(Reply):
    """The request was carried out."""


class Ready(Reply):
    """The runner waits for the judge's "go"."""

    ready: Literal[True]


class Failed(Reply):
    """An exception. failed: the request that raised it, or "compile"."""

    failed: Literal["import", "compile", "open", "hold", "trim", "call", "record", "map_call", "time", "profile"]
    type: Name
    memory: bool
    text: Text


class Prepared(Reply):
    """Weights are held. prepared: the submission has a `prepare`, and it was called."""

    prepared: bool


class Claim(Reply):
    """An object that a call returned. same: the judge's own tensor. value: JSON, or a container's class."""

    type: Name
    dtype: Name = ""
    shape: Annotated[list[Count], Field(max_length=DIMENSIONS)] = []
    stride: Annotated[list[Count], Field(max_length=DIMENSIONS)] = []
    device: Name = ""
    same: bool = False
    conj: bool = False
    neg: bool = False
    items: Annotated[list["Claim"], Field(max_length=RETURNED)] = []
    keys: Annotated[list[Name], Field(max_length=RETURNED)] = []
    value: Text = ""


Claims = Annotated[list[Claim], Field(max_length=RETURNED)]


class Noted(Reply):
    """What a call on a CPU in a folder that is not ours noted of its tensors, where it does not reply."""

    most_values: ClassVar[int] = 100_000
    claims: Claims


class Called(Noted):
    """A call on a CPU is over. It holds no time: the judge has its own."""


class SelfTimed(Noted):
    """A call on a GPU that its runner timed is over."""

    us: Taken
    claims: Claims = []


Word = Annotated[int, Field(ge=0, lt=2**32)]
Triple = Annotated[list[Word], Field(min_length=3, max_length=3)]
Hex = Annotated[str, Field(pattern=r"^([0-9a-f]{2})*$", max_length=2 * VARIABLE_BYTES)]
Symbol = Annotated[str, Field(pattern=r"^[!#-~]+$", max_length=16_384)]
Address = Annotated[int, Field(ge=0, lt=2**64)]


class KernelNode(Reply):
    """A kernel. early: it may begin before what is ahead has ended. layout: each parameter's offset and size."""

    kind: Literal["kernel"]
    early: bool
    image: Word
    name: Symbol
    grid: Triple
    block: Triple
    shared: Word
    cooperative: bool
    cluster: Triple
    dynamic_shared: Annotated[int, Field(ge=0, lt=2**31)]
    carveout: Annotated[int, Field(ge=-1, le=100)]
    not_portable: bool
    layout: Annotated[list[Word], Field(max_length=8192)]
    values: Hex


class Take(Reply):
    """A copy of an answer, from where a call leaves it to where the judge looks, by address."""

    to: Address
    from_: Address = Field(alias="from")
    bytes: Count


class CopyNode(Take):
    """A copy within the call's memory, by address."""

    kind: Literal["copy"]


class FillNode(Reply):
    """A fill of rows, by address. pitch, width (in elements), height; element: its bytes."""

    kind: Literal["fill"]
    to: Address
    pitch: Count
    width: Count
    height: Count
    value: Word
    element: Word


class Variable(Reply):
    """A variable of an image, with its value when the call was recorded."""

    image: Word
    name: Symbol
    value: Hex


Node = Annotated[KernelNode | CopyNode | FillNode, Field(discriminator="kind")]
Nodes = Annotated[list[Node], Field(max_length=NODES)]


class Recorded(Reply):
    """A recorded call. before: a baseline's setup; used: offset and size of each range of scratch memory in use;
    scratch: bytes of it that were ever handed out; unrecorded: why there is none; branches: its work has no one order.
    """

    most_values: ClassVar[int] = 1_000_000
    before: Nodes = []
    nodes: Nodes = []
    variables: Annotated[list[Variable], Field(max_length=16 * NODES)] = []
    used: Annotated[list[Count], Field(max_length=2 * NODES)] = []
    scratch: Count = 0
    claims: Claims = []
    takes: Annotated[list[Take], Field(max_length=RETURNED)] = []
    unrecorded: Text = ""
    branches: bool = False
    prepare_us: Time | None = None


class Kernel(Reply):
    """What a compiler says of one kernel."""

    name: Name
    registers: Count
    stack_bytes: Count
    spill_bytes: Count
    shared_bytes: Count
    sass: Annotated[dict[Name, Count], Field(max_length=256)] | None = None


class Artefact(Reply):
    bytes: Count
    kernels: Annotated[list[Kernel], Field(max_length=4096)]


class Compiled(Reply):
    most_values: ClassVar[int] = 100_000
    artefacts: Annotated[list[Artefact], Field(max_length=256)]


class Profiled(Reply):
    """A profiler's table. trace: for a viewer of traces; "" where there is none."""

    table: Annotated[str, _cleaned(text.clean, TABLE_LIMIT, TABLE_LIMIT)]
    trace: Annotated[str, _cleaned(text.clean, TABLE_LIMIT, TABLE_LIMIT)] = ""


Wanted = TypeVar("Wanted", bound=Reply)


def read(wanted: type[Wanted], message: dict) -> Wanted | Failed:
    """Return `message` as the reply that was asked for, or as the failure that it reports. Died: it is neither."""
    return _validated(Failed if "failed" in message else wanted, message)


def noted(notes: str) -> list[Claim]:
    """Return what a call noted, as JSON. Died: it is none."""
    try:
        claims = json.loads(notes)
    except (ValueError, RecursionError):
        raise _malformed("what its call noted is no JSON") from None
    return _validated(Noted, {"claims": claims}).claims


def _validated(kind: type[Wanted], message: dict) -> Wanted:
    if _has_more(message, kind.most_values):
        raise _malformed(f"it holds more than {kind.most_values} values")
    try:
        return kind.model_validate(message)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = text.line(".".join(text.line(part, PLACE_LIMIT) for part in fault["loc"]), 2 * PLACE_LIMIT)
        raise _malformed(f"{place or 'the reply'}: {fault['msg']}") from None


def _has_more(message: dict, most: int) -> bool:
    """Whether `message` and all within it are more than `most` values. It looks at no more than that many."""
    todo: list[object] = [message]
    seen = 0
    while todo:
        inner = todo.pop()
        if isinstance(inner, dict | list):
            seen += len(inner)
            if seen > most:
                return True
            todo += inner.values() if isinstance(inner, dict) else inner
    return False


def _malformed(why: str) -> Died:
    return Died("RUNTIME_ERROR", f"its process sent a malformed reply: {text.line(why)}")
