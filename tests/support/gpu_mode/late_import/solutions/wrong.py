def custom_kernel(data):
    from task import output_t  # noqa: F401

    return data.abs()
