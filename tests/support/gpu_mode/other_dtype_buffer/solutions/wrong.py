def custom_kernel(data):
    x, out = data
    out.copy_(x)
    return out
