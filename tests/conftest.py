"""What all tests share: a profile for hypothesis, and a clear skip of tests marked gpu where there is none."""

import contextlib
import gc
from collections.abc import Iterator

import pytest
import torch

from harness.judge import machine
from harness.results import environment
from harness.runner import gate
from harness.tools import modes
from tests.support import warm

try:
    import hypothesis
except ModuleNotFoundError:  # python3's own packages may lack it (tools/setup.py says so): only its tests fail then
    hypothesis = None

if hypothesis:
    # Equal runs on every machine; no deadline, since a first call may compile.
    hypothesis.settings.register_profile("project", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("project")


JUDGED = ("tests.attacks", "tests.harness")
MANY_THREADS = ("tests.attacks", "tests.system")  # of torch, in the process of the tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test marked gpu is skipped, with the reason, where torch sees none."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU that torch sees"))


def pytest_collection_finish() -> None:
    """What the collection made stays to the end: each search of the garbage collector would go through all of it. And a
    search after every 700 objects takes seconds of a worker.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


@pytest.fixture(autouse=True, scope="module")
def few_threads(request):
    """Small tensors are too short to share between torch's threads. CPU variants have separate threads."""
    before = torch.get_num_threads()
    if not request.module.__name__.startswith(MANY_THREADS):
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def warm_start(request):
    """Children of the judge come from a process with torch loaded, but where their start itself is tested."""
    own = torch.cuda.is_available() or request.module.__name__.startswith(("tests.attacks", "tests.harness.sandbox"))
    with contextlib.nullcontext() if own else warm.installed():
        yield


@pytest.fixture(autouse=True)
def alone_on_the_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where times and memory of a GPU are judged, the workers of one run take turns."""
    judged = request.node.get_closest_marker("gpu") and request.module.__name__.startswith(JUDGED)
    hold = machine.hold(f"tests on {environment.gpu_uuid()}", lambda _: None) if judged else contextlib.nullcontext()
    with hold:
        yield


@pytest.fixture(autouse=True, scope="session")
def small_caches_and_nothing_for_the_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Caches are made cold by reading 24 MB, not several times what the machine has: here nobody goes by the times. And
    what tests profile and check does not come to the page of this checkout.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate, "last_level_cache", lambda: 2**23)
        patch.setenv("CHECK_REPORT", "")
        patch.setattr(modes, "OUT", tmp_path_factory.mktemp("profiles"))
        yield
