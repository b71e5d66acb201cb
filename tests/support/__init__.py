"""What tests share: where things are, problem folders, runners and machines that are made up."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SUPPORT = ROOT / "tests" / "support"
