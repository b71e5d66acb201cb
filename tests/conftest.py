"""What all tests share: a profile for hypothesis, and a clear skip of tests marked gpu where there is none."""

import pytest
import torch

try:
    import hypothesis
except ModuleNotFoundError:  # python3's own packages may lack it (tools/setup.py says so): only its tests fail then
    hypothesis = None

# Modules whose tests are computations in the test's own process.
ALONE = (
    "test_dsv4", "test_nvfp4", "test_fmha", "test_moe", "test_fp8", "test_kv_pages", "test_stats", "test_board",
    "test_report",
)  # fmt: skip

if hypothesis:
    # Equal runs on every machine; no deadline, since a first call may compile.
    hypothesis.settings.register_profile("project", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("project")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test marked gpu is skipped, with the reason, where torch sees none. What starts judges, each of several
    processes, runs one after the other in one worker, when there are several (pytest -n 2 --dist loadgroup).
    """
    workers = config.pluginmanager.hasplugin("xdist")  # else its mark is unknown
    for item in items:
        if workers and not item.module.__name__.rpartition(".")[2].startswith(ALONE):
            item.add_marker(pytest.mark.xdist_group("judging"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU that torch sees"))


@pytest.fixture(autouse=True)
def few_threads(request):
    """The small models' operations are too short to share between threads; waiting for each other costs more."""
    if not request.module.__name__.rpartition(".")[2].startswith("test_dsv4"):
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
