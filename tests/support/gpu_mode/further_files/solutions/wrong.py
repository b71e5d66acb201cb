from tools import device


def custom_kernel(data):
    assert device() in ("cpu", "cuda")
    return data * 2
