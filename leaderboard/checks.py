"""What the end-to-end check of a composed model left on this machine: the error of each layer, the time of each op.

`harness/run.py PROBLEM` leaves a file for each configuration in leaderboard/out/check/PROBLEM. These are no records:
the newest replaces the one before, and another machine has others.
"""

from pydantic import BaseModel, ConfigDict, Field

from harness.results import record, schema
from harness.tools import endtoend


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class Layer(_Line):
    """Relative errors of the hc copies after a layer, each with its budget; None where one was not finite."""

    after: str
    alone: float | None
    alone_budget: float | None
    drift: float | None
    drift_budget: float | None
    cosine: float | None = None


class Check(_Line):
    """ops_us: by op the time of its calls in one decode step of one sequence, with a wait for the device after each."""

    problem: schema.Name
    config: str
    format: str
    device: str
    right: bool
    time: schema.Time
    context: int
    kernels: dict[str, str]
    step_us: float = Field(gt=0)
    ops_us: dict[str, float]
    layers: list[Layer]


def read() -> tuple[list[Check], list[str]]:
    """-> (what the checks left, complaints about files that are none)."""
    found, complaints = [], []
    for file in sorted(path for path in endtoend.OUT.glob("*/*.json") if path.is_file()):
        try:
            said = record.loads(file.read_bytes())
            schema.check(said, Check)
            found.append(Check.model_validate(said))
        except (OSError, ValueError) as error:
            complaints.append(f"{file.parent.name}/{file.name}: not what a check leaves ({error}): left out")
    return found, complaints
