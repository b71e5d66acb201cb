def custom_kernel(data):
    layer, x = data
    return x * layer.weights["w"] * (layer.calls + 1)
