"""What the records of all machines say of variants that a machine has only compiled: whether they were right in the
model (harness/run.py --device model), and whether some other machine has run them. And the time that a GPU without
records would need at least, by its datasheet.
"""

from collections.abc import Iterable

from harness.results import stats
from harness.results.datasheet import FP4, RATES, flops_rate
from harness.results.ranking import case_label
from leaderboard import provenance
from leaderboard.provenance import Provenance
from problems.common import load

GPU = {"sm90": "H200", "sm100": "B200"}  # whose datasheet a prediction is made by
RUN = ("test", "benchmark")  # kinds of records that a call on a device makes

Key = tuple[str, str, str]  # problem, variant, target


class Modelled:
    """records: any, of any machine. known: of their sources."""

    def __init__(self, records: Iterable[dict], known: Provenance) -> None:
        self._known = known
        self._ran: set[Key] = set()
        self._checks: dict[tuple[Key, str], dict[str, dict]] = {}
        for one in records:
            key = one["problem"], one["variant"], one["target"]
            if one["kind"] in RUN and one["status"] != "UNSUPPORTED":
                self._ran.add(key)
            if one["kind"] == "model":
                found = self._checks.setdefault((key, one.get("source_hash") or ""), {})
                case = case_label(one["case"])
                if case not in found or found[case]["time"] <= one["time"]:
                    found[case] = one

    def said(self, one: dict) -> tuple[str, str, str]:
        """-> (status, reason, note) of a compiled variant: COMPILED, MODEL_CHECKED, or how it failed in the model.

        one: its newest compile record, or a record of the model where there is none.
        """
        key = one["problem"], one["variant"], one["target"]
        compiled = ["compiled"] if one["kind"] == "compile" else []
        run = "not run here" if key in self._ran else "never run"
        sources = [one.get("source_hash") or ""]
        if self._known.state(one) != provenance.CHANGED:  # what it was compiled to is what the checkout's source gives
            sources.insert(0, provenance.source_hash(load.PROBLEMS / one["problem"], one["variant"]) or "")
        found = next((self._checks[key, source] for source in sources if (key, source) in self._checks), {})
        failed = [(case, its) for case, its in found.items() if its["status"] != "MODEL_CHECKED"]
        if failed:
            case, its = failed[0]
            return its["status"], f"in the model, {case}: {its.get('reason') or 'no reason given'}", ""
        if found:
            cases = f"{len(found)} test case{'s' if len(found) > 1 else ''}"
            return "MODEL_CHECKED", "", ", ".join([*compiled, f"model-checked ({cases})", run])
        return "COMPILED", "", "compiled, not run"


def predicted_us(problem: str, target: str) -> float | None:
    """The geomean over the benchmark cases of the time in us that a GPU's datasheet allows for a call's bytes or its
    operations, whichever take longer; None for another target, and for a problem that is no folder of ours or does not
    say its bytes. ValueError: its task.py fails.
    """
    folder, gpu = load.PROBLEMS / problem, GPU.get(target, "")
    if not gpu or not (folder / "task.py").is_file():
        return None
    try:
        task, least = load.module(folder, "task"), []
        for case in vars(task).get(f"BENCHMARKS_{target.upper()}", task.BENCHMARKS):
            flops = case.flops() if hasattr(case, "flops") else 0
            rate = flops_rate(gpu, getattr(case, "activation", None))
            least.append(1e6 * max(case.bytes_moved() / RATES[gpu][0], flops / rate))
    except AttributeError:
        return None
    except Exception as error:
        raise ValueError(f"{problem}/task.py cannot be loaded: {error!r}") from error
    return stats.geomean(least)


def prediction(problem: str, target: str) -> str:
    """A line about `predicted_us` for a board without times, or ""."""
    least = predicted_us(problem, target)
    if least is None:
        return ""
    bandwidth, rate = RATES[GPU[target]]
    fp4 = f"; {FP4[GPU[target]] / 1e12:g} with FP4 on both sides" if GPU[target] in FP4 else ""
    return (
        f"Predicted, not measured: the roofline of a {GPU[target]} is {least:.2f} us (geomean over the cases), by its "
        f"datasheet: {bandwidth / 1e12:g} TB/s, {rate / 1e12:g} TFLOP/s (bf16{fp4})."
    )
