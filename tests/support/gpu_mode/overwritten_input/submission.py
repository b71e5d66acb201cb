def custom_kernel(data):
    return data.mul_(2)
