"""Launches of a profiler's trace, and where the time of a replayed graph goes."""

from harness.tools.latency import Launch, breakdown, read


def span(cat: str, name: str, ts: float, dur: float, **args) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def test_a_launch_belongs_to_the_innermost_op_that_the_host_was_in():
    events = [
        span("user_annotation", "op experts", 0.0, 10.0),
        span("user_annotation", "op linear", 4.0, 2.0),
        span("user_annotation", "something else", 0.0, 50.0),
        span("cuda_runtime", "cudaLaunchKernel", 1.0, 1.0, correlation=7),
        span("cuda_driver", "cuLaunchKernelEx", 5.0, 1.0, correlation=8),
        span("cuda_runtime", "cudaMemcpyAsync", 20.0, 1.0, correlation=9),
        span("kernel", "second", 140.0, 3.0, correlation=8),
        span("kernel", "first", 100.0, 30.0, correlation=7),
        span("gpu_memcpy", "Memcpy DtoD", 150.0, 2.0, correlation=9),
        span("kernel", "orphan", 160.0, 1.0),
        {"ph": "i", "name": "a mark"},
        span("gpu_user_annotation", "op experts", 100.0, 52.0),
    ]
    assert read(events) == [
        Launch("first", 100.0, 30.0, "experts"),
        Launch("second", 140.0, 3.0, "linear"),
        Launch("Memcpy DtoD", 150.0, 2.0, ""),
        Launch("orphan", 160.0, 1.0, ""),
    ]


def test_the_time_of_a_graph_goes_to_the_ops_of_the_eager_step():
    eager = [Launch("a", 0, 9, "x"), Launch("b", 20, 9, "y"), Launch("a", 40, 9, "x"), Launch("c", 60, 9)]

    def replay(us: float) -> list[Launch]:
        return [Launch("a", 0, us), Launch("b", us - 1, 5), Launch("a", 10, 2), Launch("c", 13, 1)]

    found = breakdown(eager, [replay(4), replay(6), replay(3), replay(50)[:2]])
    assert found == {
        "ops": {"x": {"us": 6.0, "launches": 2}, "y": {"us": 5.0, "launches": 1}, "": {"us": 1.0, "launches": 1}},
        "kernels": {"a": {"us": 6.0, "launches": 2}, "b": {"us": 5.0, "launches": 1}, "c": {"us": 1.0, "launches": 1}},
        "span_us": 14.0,
        "gaps_us": 3.0,
    }


def test_a_graph_of_another_length_has_no_ops():
    found = breakdown([Launch("a", 0, 1, "x")], [[Launch("a", 0, 1), Launch("b", 1, 1)]])
    assert found["ops"] == {"": {"us": 2.0, "launches": 2}} and found["gaps_us"] == 0
