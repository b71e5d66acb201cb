from torch.utils.cpp_extension import load_inline

SOURCE = """
torch::Tensor relu(torch::Tensor x) { return torch::clamp_min(x, 0); }
"""
module = load_inline(name="relu", cpp_sources=SOURCE, functions=["relu"])


def custom_kernel(data):
    return module.relu(data)
