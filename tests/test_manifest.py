"""No promise changes unseen."""

from tests import manifest


def test_manifest_equals_the_tree():
    """A deliberate change is written with `python -m tests.manifest --write` and shows in the commit."""
    assert not manifest.differences()
