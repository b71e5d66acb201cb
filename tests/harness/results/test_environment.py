"""What is said of the checkout that a record comes from."""

import subprocess

from harness.results import environment


def test_new_records_are_no_uncommitted_changes(tmp_path, monkeypatch):
    monkeypatch.delenv("GIT_COMMIT", raising=False)

    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@x", *words], cwd=tmp_path, check=True)

    assert environment.commit.__wrapped__(tmp_path) == (None, None)
    records = tmp_path / "leaderboard" / "results" / "cpu" / "one.jsonl"
    records.parent.mkdir(parents=True)
    for file in (records, tmp_path / "kernel.py"):
        file.write_text("1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    head, dirty = environment.commit.__wrapped__(tmp_path)
    assert head and len(head) == 40 and dirty is False
    records.write_text("1\n2\n")
    (records.parent / "two.jsonl").write_text("3\n")
    assert environment.commit.__wrapped__(tmp_path) == (head, False)
    (tmp_path / "kernel.py").write_text("2\n")
    assert environment.commit.__wrapped__(tmp_path) == (head, True)
