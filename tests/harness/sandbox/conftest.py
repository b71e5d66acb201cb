"""Children for tests of the sandbox, some of which the tests of one file share."""

import pytest

from harness.sandbox.process import Child
from tests.support.jails import answer, child_of_its_own_user, jail_in


@pytest.fixture
def child(tmp_path):
    """A jailed child of the test's own, started."""
    child = Child("jailed", jail=jail_in(tmp_path))
    answer(child, "answer = 1")
    yield child
    child.close()


@pytest.fixture(scope="module", params=["a user of its own", "the judge's user"])
def jailed(request, tmp_path_factory):
    if request.param == "a user of its own":
        with child_of_its_own_user() as child:
            yield child
        return
    child = Child("jailed", jail=jail_in(tmp_path_factory.mktemp("jail")))
    yield child
    child.close()


@pytest.fixture(scope="module")
def open_child():
    """A child of the judge's own, without a jail: it stands for the checker."""
    child = Child("tests.support.jailed")
    yield child
    child.close()


@pytest.fixture(scope="module")
def two_users():
    with child_of_its_own_user() as first, child_of_its_own_user() as second:
        yield first, second
