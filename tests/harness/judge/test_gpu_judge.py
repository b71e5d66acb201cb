"""The judge on a GPU: which calls can be recorded, what is found of those that cannot, and what the clock reads."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.checker import matmul
from harness.judge import replay, replies
from harness.judge.handle import RunnerHandle
from harness.judge.outcome import Outcome
from harness.judge.phases import Counts
from harness.judge.readings import PRODUCT
from harness.judge.session import Session
from harness.judge.verdict import SELF_TIMED, Recorder, Result, aggregate
from harness.problem import folders
from harness.results.environment import RATES
from problems.common import load
from tests.support import SUPPORT

pytestmark = pytest.mark.gpu

TORCH = '''"""NAME."""
import torch

TARGETS = ("sm90", "sm100")
kept = {}


def custom_kernel(data):
    n = data.z.numel()
'''
CUDA = '''"""NAME."""
import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path
import torch
from problems.common import build, load

TARGETS = ("sm90", "sm100")
SOURCE = Path(__file__).with_suffix(".cu")


def compile_for(target):
    return [build.cuda(SOURCE, target)]


@functools.cache
def by_hand():
    path = tempfile.mkdtemp() + "/made.so"
    flags = ["-arch", build.ARCH[load.device_target("cuda")], "-shared", "-Xcompiler", "-fPIC", "-std=c++17"]
    subprocess.run(["nvcc", *flags, str(SOURCE), "-o", path], check=True)
    return ctypes.CDLL(path)


def launched(function, data):
    t = torch.empty_like(data.z)
    places = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (data.x, data.y, data.z, t)]
    function(*places, ctypes.c_int(data.z.numel()))
    return data.z


def custom_kernel(data):
'''
SOURCE = """
#include <cooperative_groups.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define EACH(i, n) for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
#define LAUNCHER(name) extern "C" void name(const half* x, const half* y, half* z, half* t, int n)
constexpr int MANY = 4096;
__device__ unsigned generation, tags[MANY], seen[2], have[2];
__device__ half kept[2][MANY];
__global__ void add(const half* x, const half* y, half* z, int n) { EACH(i, n) z[i] = __hadd(x[i], y[i]); }
__global__ void copy(const half* t, half* z, int n) { EACH(i, n) z[i] = t[i]; }
LAUNCHER(plain) { add<<<512, 1024>>>(x, y, z, n); }
LAUNCHER(clears) { cudaMemset(z, 0xFF, 2 * n), plain(x, y, z, t, n); }
LAUNCHER(copies) {
    cudaMemsetAsync(z, 0xFF, 2 * n), add<<<64, 256>>>(x, y, t, n);
    cudaMemcpyAsync(z, t, 2 * n, cudaMemcpyDeviceToDevice);
}
__global__ void count() { ++generation; }
__global__ void tag() { EACH(i, MANY) tags[i] = generation; }
__global__ void add_tagged(const half* x, const half* y, half* z, int n) {
    EACH(i, n) if (tags[i % MANY] == generation) z[i] = __hadd(x[i], y[i]);
}
LAUNCHER(grows) { count<<<1, 1>>>(), tag<<<8, 256>>>(), add_tagged<<<64, 256>>>(x, y, z, n); }
__global__ void copy_early(const half* t, half* z, int n) {
    cudaGridDependencySynchronize();
    EACH(i, n) z[i] = t[i];
}
LAUNCHER(early) {
    add<<<64, 256>>>(x, y, t, n);
    cudaLaunchAttribute attribute = {cudaLaunchAttributeProgrammaticStreamSerialization};
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {64, 256, 0, 0, &attribute, 1};
    cudaLaunchKernelEx(&config, copy_early, (const half*)t, z, n);
}
__global__ void turned(const half* x, const half* y, half* z, half* t, int n) {
    EACH(i, n) t[n - 1 - i] = __hadd(x[n - 1 - i], y[n - 1 - i]);
    cooperative_groups::this_grid().sync();
    EACH(i, n) z[i] = t[i];
}
LAUNCHER(cooperative) {
    void* arguments[] = {&x, &y, &z, &t, &n};
    cudaLaunchCooperativeKernel((void*)turned, dim3(8), dim3(256), arguments);
}
__global__ void spin(unsigned long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - start < ns);
}
LAUNCHER(spins) { spin<<<1, 1>>>(300000), plain(x, y, z, t, n); }
LAUNCHER(allocates) {
    half* made;
    cudaMallocAsync((void**)&made, 2 * n, 0);
    add<<<64, 256>>>(x, y, made, n), copy<<<64, 256>>>(made, z, n), cudaFreeAsync(made, 0);
}
void nothing(void*) {}
LAUNCHER(calls_back) { plain(x, y, z, t, n), cudaLaunchHostFunc(0, nothing, nullptr); }
__global__ void look(const half* x, int n, bool hang) {  // are contents of 1024 elements the first ones?
    const unsigned bits = ((const unsigned*)x)[0] ^ ((const unsigned*)x)[1] * 31 | 1;
    if (!seen[n % 2]) seen[n % 2] = bits;
    if (seen[n % 2] == bits || n != 1024) return;
    while (hang && *(volatile unsigned*)&seen[0]) __nanosleep(1000);
    asm volatile("trap;");
}
LAUNCHER(hangs_later) { look<<<1, 1>>>(x, n, true), plain(x, y, z, t, n); }
LAUNCHER(faults_later) { look<<<1, 1>>>(x, n, false), plain(x, y, z, t, n); }
__global__ void keep(const half* x, const half* y, int n) {
    if (!have[n % 2]) EACH(i, MANY) if (i < n) kept[n % 2][i] = __hadd(x[i], y[i]);
}
__global__ void give(half* z, int n) {
    EACH(i, n) z[i] = kept[n % 2][i % MANY];
    have[n % 2] = 1;
}
LAUNCHER(keeps) { keep<<<8, 256>>>(x, y, n), give<<<8, 256>>>(z, n); }
"""
TRITON = '''"""triton_adds."""
import triton
import triton.language as tl

TARGETS = ("sm90", "sm100")


@triton.jit
def add(x, y, z, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(z + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)


def custom_kernel(data):
    add[(triton.cdiv(data.z.numel(), 1024),)](data.x, data.y, data.z, data.z.numel(), 1024)
    return data.z
'''
COMPILED = """import torch
TARGETS = ("sm90", "sm100")
@torch.compile({how})
def add(x, y, z):
    torch.add(x, y, out=z)
def custom_kernel(data):
    add(data.x, data.y, data.z)
"""
RIGHT = "    torch.add(data.x, data.y, out=data.z)\n"
DONE = "    return data.z\n"
TO_HOST = """    if n not in kept:
        kept[n] = torch.empty(n, dtype=data.x.dtype, pin_memory=True)
    kept[n].copy_(data.x, non_blocking=True)
"""
OUT = "    data.z[:4] = data.x[torch.full((4,), 2**40 * (n == 1024), device='cuda')]\n"
HANG = "    torch.cuda._sleep(2**50 if n == 1024 else 1)\n"
TOO_MUCH = "    torch.empty(2**42, dtype=torch.uint8, device='cuda')\n"
CUBLAS = """    ones = torch.ones(1, 2, dtype=data.x.dtype, device="cuda")
    torch.mm(ones, torch.stack((data.x, data.y)), out=data.z.view(1, -1))
"""
WAITS = "    if data.x[0].item() > 1e4:\n        return None\n" + RIGHT + DONE
# What hangs or faults at 1024 elements is right at 1025.
OUTCOMES = {"TIMEOUT": ["TIMEOUT", "PASSED"], "fault": ["RUNTIME_ERROR", "PASSED"]}
# name -> (text, verdict, piece of the reason); what tests/attacks has on a GPU too is not here
OF_TORCH = {
    "honest": (TORCH + RIGHT + DONE, "PASSED", ""),
    "cublas": (TORCH + CUBLAS + DONE, "PASSED", ""),
    "triton_adds": (TRITON, "PASSED", ""),
    "graph_mode": (COMPILED.format(how="mode='reduce-overhead'") + DONE, "PASSED", ""),
    "graph_option": (COMPILED.format(how="options={'triton.cudagraphs': True}") + DONE, "PASSED", ""),
    "waits": (TORCH + WAITS, "UNSUPPORTED", "cannot be recorded: waits.py:10: "),
    "to_host": (TORCH + TO_HOST + RIGHT + DONE, "UNSUPPORTED", "cannot be recorded: to_host.py"),
    "writes_to_input": (TORCH + RIGHT + "    data.x.mul_(1)\n" + DONE, "RUNTIME_ERROR", "weights are read-only"),
    "takes_too_much": (TORCH + TOO_MUCH + RIGHT + DONE, "RUNTIME_ERROR", "out of memory"),
    "faults": (TORCH + OUT + RIGHT + DONE, "fault", ""),
    "hangs": (TORCH + HANG + RIGHT + DONE, "TIMEOUT", "no answer within"),
}


def by_hand(name: str) -> str:
    """Built for the legacy default stream."""
    return f"{CUDA}    return launched(by_hand().{name}, data)\n"


def calling(name: str) -> str:
    library = 'build.cuda(SOURCE, load.device_target("cuda"))'
    return f'{CUDA}    return launched({library}.function("{name}"), data)\n'


OF_CUDA = {
    "copies": (calling("copies"), "PASSED", ""),
    "grows": (calling("grows"), "PASSED", ""),
    "early": (calling("early"), "PASSED", ""),
    "cooperative": (calling("cooperative"), "PASSED", ""),
    "by_hand": (by_hand("plain"), "PASSED", ""),
    "copies_by_hand": (by_hand("copies"), "PASSED", ""),
    "early_by_hand": (by_hand("early"), "PASSED", ""),
    "cooperative_by_hand": (by_hand("cooperative"), "PASSED", ""),
    "clears_by_hand": (by_hand("clears"), "UNSUPPORTED", "it waited for the GPU (cudaMemcpy and cudaMemset do"),
    "allocates": (calling("allocates"), "UNSUPPORTED", "allocates memory (cudaMallocAsync): use torch.empty"),
    "calls_back": (calling("calls_back"), "UNSUPPORTED", "the call has the host run a function"),
    "keeps": (calling("keeps"), "INCORRECT", "Number of mismatched elements"),
    "faults_later": (calling("faults_later"), "fault", ""),
    "hangs_later": (calling("hangs_later"), "TIMEOUT", "took longer than its limit"),
}
GROUPS = {"torch": OF_TORCH, "cuda": OF_CUDA}
VECTOR_ADD, LINEAR = (folders.find(str(SUPPORT / "problems" / name)) for name in ("vector_add", "linear"))
HOW = Counts(processes=2, samples=4, warmups=1, buffers=2)


def handle(folder: Path, name: str, text: str, problem: folders.Problem = VECTOR_ADD, **more) -> RunnerHandle:
    (folder / f"{name}.py").write_text(text.replace("NAME", name, 1))
    (folder / f"{name}.cu").write_text(SOURCE)
    made = replace(folders.submission(problem, folder / f"{name}.py"), **more)
    return RunnerHandle(name, made, load.device_target("cuda"))


@functools.cache
def outcomes(group: str, folder: Path) -> dict[str, list[Outcome]]:
    """What the submissions of a group get on 1024 and on 1025 elements."""
    handles = [handle(folder, name, text) for name, (text, *_) in GROUPS[group].items()]
    with pytest.MonkeyPatch.context() as patch, Session(VECTOR_ADD, "cuda", timeout_s=15) as session:
        patch.setattr(replies, "PREPARE_LIMIT_S", 5)
        return replay.run_tests(session, handles, list(VECTOR_ADD.tests[:3:2]), lambda *_: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("submissions")


@pytest.mark.parametrize(("group", "name"), [(group, name) for group in GROUPS for name in GROUPS[group]])
def test_verdict(group, name, folder):
    """A fault or a hang harms neither the next case nor the neighbours."""
    _, status, reason = GROUPS[group][name]
    found = outcomes(group, folder)[name]
    assert [outcome.status for outcome in found] == OUTCOMES.get(status, [status] * 2), found
    assert reason in found[0].reason, found
    if status == "PASSED":
        assert all(0 < outcome.us < 1000 and outcome.host_us > 0 and not outcome.self_timed for outcome in found)


def rates() -> tuple[float, ...]:
    """Bytes and operations a second of the datasheet."""
    return next(rates for known, rates in RATES.items() if known in torch.cuda.get_device_name())


def test_two_clocks_read_what_a_kernel_takes_and_a_baseline_that_waits_times_itself(tmp_path):
    """On 50 MB: one that adds, and one that spins for 300 us on the device's own timer and then adds."""
    texts = {"honest": TORCH + RIGHT + DONE, "spins": calling("spins"), "waits": TORCH + WAITS}
    handles = [handle(tmp_path, name, text) for name, text in texts.items()]
    handles.append(handle(tmp_path, "peer_waits", TORCH + WAITS, baseline=True))
    cases = list(VECTOR_ADD.benchmarks["cuda"])
    with Session(VECTOR_ADD, "cuda", timeout_s=60) as session:
        timings, (found,) = replay.run_benchmarks(session, handles, cases, HOW)
    honest, spins, waits, baseline = (timings[each.name][0] for each in handles)
    assert waits.failure.status == "UNSUPPORTED" and baseline.self_timed and not honest.self_timed
    for timing in (honest, spins, baseline):
        assert timing.failure is None, timing.failure
        assert [len(group) for group in timing.outcomes] == [HOW.samples] * HOW.processes
    assert 0 < found.empty_us < 10 and 8 < honest.median_us - found.empty_us < 100
    assert 300 <= spins.median_us - found.empty_us <= 330 + honest.median_us
    for timing in (honest, spins):
        apart = [outcome.host_us - outcome.us for group in timing.outcomes for outcome in group]
        assert 0 < sorted(apart)[len(apart) // 2] < 30
    # Read again from L2, 50 MB would come faster than the datasheet says of memory.
    assert 0.3 < found.bytes / found.roofline_us * 1e6 / rates()[0] < 1
    result = Result(handles[-1].submission, handles[-1].target, times=[aggregate(baseline, found)])
    assert Recorder(VECTOR_ADD, "cuda").lines(result)[0]["clock"]["name"] == SELF_TIMED


PREPARES = '''"""prepares."""
import torch

TARGETS = ("sm90", "sm100")


def prepare(weights):
    return [weights.w.clone() for _ in range(COPIES)]


def custom_kernel(data):
    torch.mv(data.weights[-1], data.inputs.x, out=data.outputs.y)
    return data.outputs.y
'''


def test_one_copy_of_weights_may_be_kept_and_is_timed_beside_the_matrix_product(tmp_path):
    """Groups behind the product, and in other memory, find the weights that were prepared. The product runs under its
    datasheet's rate, and over half of it.
    """
    one, two = (handle(tmp_path, f"keeps_{n}", PREPARES.replace("COPIES", str(n)), LINEAR) for n in (1, 2))
    cases, groups = list(LINEAR.benchmarks["cuda"][:1]), []
    half = replace(cases[0], params={"m": 16384, "k": 8192})
    with Session(LINEAR, "cuda", timeout_s=60) as session:
        found = replay.run_tests(session, [two], [half, LINEAR.tests[0]], lambda *_: None)
        timings, _ = replay.run_benchmarks(session, [one], cases, HOW, groups.append)
    assert [outcome.status for outcome in found["keeps_2"]] == ["RULE_BROKEN", "PASSED"], found
    (timing,) = timings["keeps_1"]
    assert timing.failure is None and len(timing.flat("us")) == HOW.samples * HOW.processes, timing.failure
    for audit in (one.audit, two.audit):  # as many bytes
        assert 2**30 <= audit.kept_bytes <= 2**30 + 2**28 and audit.prepare_us > 0
    (us,) = [sorted(group.judge_us[PRODUCT])[1] for group in groups if PRODUCT in group.judge_us]
    assert 0.5 < matmul.FLOPS / us * 1e6 / rates()[1] < 1
