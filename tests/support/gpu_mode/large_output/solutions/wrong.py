def custom_kernel(data):
    image, out = data
    return out.copy_(image.mean(-1))
