"""What tests share: where things are, problem folders, runners and machines that are made up."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SUPPORT = ROOT / "tests" / "support"

# A right kernel of tests/support/problems/vector_add.
ADDS = '''"""adds."""
import torch

TARGETS = ("cpu",)


def custom_kernel(data):
    return torch.add(data.x, data.y, out=data.z)
'''
