"""A file beside the folders, which task.yml names as tools.py."""

import torch


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
