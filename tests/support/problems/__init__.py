"""Problem folders of the judge's own tests."""
