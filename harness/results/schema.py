"""What a record and the first line of a run's file are: each field once, with its type, unit and meaning.

Readers get records as dicts that `check` has passed: no value is converted, and keys that are not known here are kept.
"""

import datetime
from collections.abc import Iterable
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from harness.results import text
from harness.results.status import Status

SCHEMA = 4
Kind = Literal["test", "benchmark", "compile", "latency", "model"]
KINDS: tuple[str, ...] = get_args(Kind)
Target = Literal["cpu", "sm90", "sm100"]
TIMED, JUDGED = ("benchmark", "latency"), ("test", "benchmark")
WORK = ("outcome", "group", "audit", "confirm", "resumed")  # kinds of lines of a run's file before the results


def _time(value: str) -> str:
    # fromisoformat also takes weeks, and years that no table of times holds.
    try:
        year = datetime.datetime.fromisoformat(value).year
    except ValueError:
        year = 0
    if not 1970 <= year < 2200 or len(value) < 19 or value[10] != "T" or value[13] != ":":
        raise ValueError("must be a time in ISO 8601, of the years 1970 to 2199, such as 2026-01-02T03:04:05Z")
    return value


def _us(value: float) -> float:
    if value and not 1e-12 <= abs(value) <= 1e18:  # no axis could show it
        raise ValueError("must be a time in us: 0, or 1e-12 to 1e18")
    return value


def _ascending(pair: list[float]) -> list[float]:
    if pair[0] > pair[1]:
        raise ValueError("must be [low, high]")
    return pair


Name = Annotated[str, AfterValidator(text.name)]
Time = Annotated[str, AfterValidator(_time)]
Us = Annotated[float, AfterValidator(_us)]
Roofline = Annotated[Us, Field(gt=0)]
Pair = Annotated[list[float], Field(min_length=2, max_length=2)]
Interval = Annotated[Pair, AfterValidator(_ascending)]
Count = Annotated[int, Field(ge=1)]
Size = Annotated[float, Field(ge=0)]
Numbers = dict[str, float | None]


def _field(description: str, of: Iterable[str] = KINDS, required: bool = False, **more: Any) -> Any:
    """A field of a record or of a part of one. of: the kinds of record that have it; more: arguments of Field."""
    default: Any = ... if required else None
    return Field(default, description=description, json_schema_extra={"of": list(of)}, **more)


class _Checked(BaseModel):
    """Fields of their very types: no text becomes a number. Unknown keys are allowed, and kept by who reads."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class Clock(_Checked):
    """How times were taken, in texts."""

    warnings: list[str] | None = None


class Against(_Checked):
    """The ratio of this variant's times to another's, from interleaved pairs; below 1 this one is faster."""

    variant: str | None = _field("the other variant")
    ratio: float | None = _field("geometric mean of this time / the other's time")
    ci95: Pair | None = _field("its 95 % interval: [low, high]")
    ci99: Pair | None = _field("its 99 % interval: FASTER and SLOWER if it excludes 1")
    word: str | None = _field("FASTER, SLOWER, SAME or UNDECIDED")
    processes: int | None = _field("of each of the two, that were compared")
    same_within: float | None = _field("how near to 1 the 95 % interval must be for SAME")


class Confirms(_Checked):
    """The leader against whom these times confirm a first place."""

    variant: Name = Field(description="the leader's name")
    run_id: str | None = _field("the run that made it the leader")
    source_hash: str | None = _field("the leader's source_hash")
    paired: bool | None = _field("whether the leader was timed in pairs with this variant")


class Resource(_Checked):
    """What the compiler says of one kernel."""

    target: Name | None = _field("what it was compiled for: sm90 or sm100")
    name: str | None = _field("the kernel's mangled name")
    registers: int | None = _field("registers of a thread")
    spill_bytes: int | None = _field("bytes of registers that are spilled, stores and loads together")
    stack_bytes: int | None = _field("bytes of a thread's stack frame")
    shared_bytes: int | None = _field("bytes of static shared memory")
    sass: dict[str, int] | None = Field(
        None,
        description="instructions of tensor cores, copies, barriers and local memory in its machine code, by name how "
        "many; absent where nvdisasm was not installed or could not read it",
    )
    bytes: int | None = _field("size of the file that has the kernel")


class Share(_Checked):
    """The part of something in a step on a GPU."""

    us: Us | None = _field("time of its launches, from the end of those ahead; up to 28 November 2026 the whole of it")
    launches: int | None = _field("how many there are")


class Breakdown(_Checked):
    """Where the time of a step goes on a GPU, in us, by the driver's records."""

    ops: dict[str, Share] | None = _field('by op of the model; "": in none')
    kernels: dict[str, Share] | None = _field("by name of a kernel, copy or fill")
    span_us: Us | None = _field("from the first start to the last end")
    gaps_us: Us | None = _field("of these, while nothing ran")


class Record(_Checked):
    """One result of one run."""

    schema_: int = _field(f"{SCHEMA}; 1 to {SCHEMA - 1} are read too", required=True, alias="schema", ge=1, le=SCHEMA)
    run_id: Name = _field("the run: all its records have the same one", required=True)
    time: Time = _field("when the record was made, ISO 8601, in the years 1970 to 2199", required=True)
    kind: Kind = _field("what was done: test, benchmark, compile, latency, or model (executed in one)", required=True)
    problem: Name = _field("the problem's folder", required=True)
    variant: Name = _field("the submission's name", required=True)
    target: Target = _field("cpu, sm90 or sm100", required=True)
    case: dict[str, Any] | None = _field("the case's parameters; {} for a verdict on all cases", required=True)
    status: Status = _field("the verdict", required=True)
    reason: str | None = _field("why the verdict is no better, as text")
    baseline: bool | None = _field("a public kernel to compare with; it is not ranked")
    source_hash: str | None = _field("hash of its sources, with what they use of problems/common (from schema 3 on)")
    code_hash: str | None = _field("hash of the machine code of its GPU kernels; null where there is no cubin")
    problem_hash: str | None = _field("hash of what defines the problem: cases, tolerances, task and reference")
    harness_hash: str | None = _field("hash of the judge, of problems/common and of ptx_model")
    commit: str | None = _field("the checkout's commit")
    dirty: bool | None = _field("whether the checkout had uncommitted changes, other than new records; null: not known")
    environment: dict[str, str | None] | None = _field("versions and names of what ran: gpu, cpu, driver, torch, ...")
    sandbox: Any = _field("what held the submission in its place")
    device: str | None = _field("cpu or cuda")
    seeds: list[str] | None = _field("seeds of the contents, in the order of the calls", ("test", "benchmark", "model"))
    orders: list[str] | None = _field("of asynchronous work, each executed; status is the worst one's", ("model",))
    error: Numbers | None = _field("worst error: rel (Frobenius, a share), max (of an element), tol (admitted)", JUDGED)
    median_us: Us | None = _field("median time of a call in us; latency: of a replay, else of an eager call", TIMED)
    ci95_us: Interval | None = _field("its 95 % interval in us: [low, high]", ("benchmark",))
    samples_us: list[list[Us]] | None = _field("all scored times in us, a list for each process", TIMED)
    n: int | None = _field("number of scored times", TIMED)
    host_us: Us | None = _field("median time of the call by the host's clock in us", ("benchmark",))
    setup_us: Us | None = _field("median time in us of a baseline's preparations (until 2026-11)", ("benchmark",))
    empty_call_us: Us | None = _field("time of a call that does nothing, under the same clock, in us", ("benchmark",))
    roofline_us: Roofline | None = _field("measured: least time in us for these bytes or flops", ("benchmark",))
    roofline_kind: str | None = _field("which of them is the roofline: read or flops", ("benchmark",))
    roofline_config: Any = _field("the reader that was the fastest", ("benchmark",))
    bytes: Size | None = _field("least memory traffic of a call in bytes", TIMED)
    flops: float | None = _field("operations of a call, two for a multiplication with its sum", TIMED)
    clocks_mhz: Any = _field("clocks of the GPU while it was timed, in MHz: sm, mem", ("benchmark",))
    throttle: Any = _field("reasons why the GPU throttled its clocks", ("benchmark",))
    clock: Clock | None = _field(
        "how times were taken: name, and warnings (a list of texts: what was less than it should be for these times)",
        TIMED,
    )
    ranking_by: Literal["geom", "mean", "last"] | None = _field("geom, mean or last: the metric", ("benchmark",))
    attempt: Count | None = _field("how many runs timed a variant of this name here, this one included", ("benchmark",))
    audit: Any = _field("what was looked at beside the outputs", ("benchmark",))
    bits: dict[str, Any] | None = _field(
        "whether equal calls had equal bits: call, the same one; batch, a row in any (null: it has none); calls, case",
        ("benchmark",),
    )
    superseded: bool | None = _field("a later measurement of the same run counts instead", ("benchmark",))
    confirms: Confirms | None = _field("the leader against whom these times confirm a first place", ("benchmark",))
    against: Against | None = _field("the ratio to another variant, from interleaved pairs", ("benchmark",))
    resources: list[Resource] | None = _field("what the compiler says, an object for each kernel", ("compile",))
    eager_us: Us | None = _field("median time of the same step without a graph, in us, host's clock", ("latency",))
    gpus: dict[str, Any] | None = _field("that share a model: partition, topology, median_us of each", ("latency",))
    row_us: Us | None = _field("time of a step in a row that nothing waits within, in us, host's clock", ("latency",))
    sol_us: Us | None = _field(
        "speed of light: bytes or flops at the datasheet's rates, the longer, in us; null where these are not known",
        ("latency",),
    )
    launches: dict[str, int] | None = _field("kernels, copies and fills of a step: eager, graph", ("latency",))
    breakdown: Breakdown | None = _field("where the time of a step goes on the GPU, longest first", ("latency",))
    kernels: dict[str, str | None] | None = _field("by op of the model, what fills it", ("latency",))
    checks: dict[str, Any] | None = _field("by check of the graph: what it found", ("latency",))


class Shard(_Checked):
    """Which part of the cases a run with --shard has."""

    part: Count = Field(description="its number, from 1")
    of: Count = Field(description="how many parts there are")
    set: str = Field(description="equal in runs of the same sources with the same options, which are parts of one run")


class RunLine(_Checked):
    """The first line of a run's file. It also has the fields of a record that are equal in all of them."""

    kind: Literal["run"] = Field(description="run")
    schema_: int = Field(alias="schema", ge=4, le=SCHEMA, description=str(SCHEMA))
    run_id: Name = Field(description="the file's name, as a rule")
    time: Time = Field(description="when the run began")
    problem: Name = Field(description="the problem's folder")
    machine: Name | None = _field("the folder of the machine")
    arguments: dict[str, Any] | None = _field("the options that the run was given")
    submissions: list[dict[str, Any]] = Field(
        [], description="of each submission the fields that are equal in all its records: variant, source_hash, ..."
    )
    tests: list[dict[str, Any]] | None = _field("the test cases: params, seed, bytes, flops")
    benchmarks: list[dict[str, Any]] | None = _field("the benchmark cases")
    shard: Shard | None = _field("with --shard, which part of the cases")
    clock: Clock | None = _field("as of a record, without the warnings")


FIELDS = {field.alias or name: field for name, field in Record.model_fields.items()}
# Fields of a record that the first line may say for all.
SHARED = {"schema", "run_id", "problem", "device", "target", "commit", "dirty", "environment", "sandbox"}
SHARED |= {"problem_hash", "harness_hash"}


def check(record: dict, model: type[BaseModel] = Record) -> None:
    """Raise ValueError, naming the field, unless `record` is as the model says."""
    try:
        model.model_validate(record)
    except ValidationError as error:
        raise ValueError(said_of(error)) from None


def said_of(error: ValidationError) -> str:
    """The first fault in words: the field, what was wanted, what came."""
    faults = error.errors(include_url=False, include_context=False)
    if missing := [str(fault["loc"][0]) for fault in faults if fault["type"] == "missing" and len(fault["loc"]) == 1]:
        return f"it must have {', '.join(missing)}"
    first = faults[0]
    where = text.line(".".join(str(part)[:60] for part in first["loc"]), 120)
    return f"{where}: {first['msg'].removeprefix('Value error, ')}, got {text.line(repr(first['input']), 60)}"


def known(record: dict) -> dict:
    """Return `record`, which we are about to write. ValueError: it has a field that the model lacks."""
    if unknown := [name for name in record if name not in FIELDS]:
        raise ValueError(f"harness/results/schema.py has no field {', '.join(map(repr, unknown))}: add it")
    return record
