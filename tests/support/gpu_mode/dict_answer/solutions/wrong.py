def custom_kernel(data):
    total = data.double().sum()
    return {"mean": total, "sum": total}
