"""Folders in GPU MODE's format with the traits of other people's: `write` makes one of them.

A folder has a reference that doubles a vector but for what is given, a right submission and a wrong one. What public
sets use is here: tuples and dicts of tensors, numbers and texts, configurations, modules, buffers for the answer,
checks of several kinds, compiled submissions, and further files.
"""

from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent, indent

from tests.support import write_files

HEAD = """
import dataclasses
from typing import NamedTuple
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

def random(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE, dtype=dtype)
"""
SIZES = 130, 1030  # of the test cases
DOUBLED, TRIPLED = "return data + data", "return data * 3"
NEAR = "return torch.allclose(output, ref_kernel(data), rtol=1e-5, atol=1e-5, equal_nan=True), 'elements differ'"


@dataclass(frozen=True)
class Folder:
    """right, wrong: the body of custom_kernel, or a whole file; wrong may be what is replaced in the right one, and by
    what. given, answer, check: the bodies of generate_input, ref_kernel and check_implementation. more: classes before
    them, and functions behind them. cases: of task.yml, besides size and seed. files: those that it lists, by name.
    timed: it has a benchmark of so many elements.
    """

    right: str = DOUBLED
    wrong: str | tuple[str, str] = TRIPLED
    given: str = "return random(size, seed=seed)"
    answer: str = "return data * 2"
    check: str = "return bool(torch.equal(output, ref_kernel(data))), 'elements differ'"
    classes: str = ""
    more: str = ""
    cases: str = ""
    files: dict[str, str] = field(default_factory=dict)
    timed: int = 0


FOLDERS = {
    # Checks, and seeds.
    "bool_check": Folder(check="return (output == data * 2).all()"),
    "string_check": Folder(check="return '' if torch.equal(output, data * 2) else 'differs'"),
    "list_check": Folder(check="return [] if torch.equal(output, data * 2) else ['one', 'two']"),
    "check_raises": Folder(check="torch.testing.assert_close(output, data * 2)"),
    "blind_to_nan": Folder(
        wrong="return data * float('nan')", check="return not ((data * 2 - output).abs() > 0).any(), 'differs'"
    ),
    "nan_of_the_reference": Folder(
        check=NEAR,
        given="""
            data = random(size, seed=seed)
            data[size // 2] = float('nan')
            return data
            """,
    ),
    "no_seed": Folder(more="def generate_input(size):\n    return torch.arange(size, device=DEVICE) + 1.0"),
    "seed_in_data": Folder(  # in fp32: all contents would be equal with a seed of 63 bits
        right="return data.sort().values",
        wrong="return data.clone()",
        given="return torch.cat([random(size // 10, seed=seed + i) + (seed + i) for i in range(10)])",
        answer="return data.sort()[0]",
        timed=90000,
    ),
    # Data.
    "text_booleans": Folder(
        right="return data[0] + data[1].to(data[0].dtype)",
        wrong="return data[0] + 1",
        more="""
            def generate_input(size, masked, seed):
                x = random(size, seed=seed)
                assert isinstance(masked, str)
                return x, (x > 0) if masked == 'True' else torch.ones_like(x, dtype=torch.bool)
            """,
        answer="return torch.where(data[1], data[0] + 1, data[0])",
        cases="masked: true",
    ),
    "dict_config": Folder(
        right="return {'y': data['x'] * data['by'][0] / (1 if data['by'][1] == 'whole' else 2)}",
        wrong="return {'z': data['x']}",
        given="return {'x': random(size, seed=seed), 'by': [seed % 8, 'half' if seed % 2 else 'whole'], 0: None}",
        answer="return {'y': data['x'] * data['by'][0] / (2 if data['by'][1] == 'half' else 1)}",
        check="return torch.equal(output['y'], ref_kernel(data)['y']), 'differs'",
    ),
    "dataclass_data": Folder(  # a class that only the reference has; its method changes it, and each call has it anew
        right="""
            layer, x = data
            scale = torch.full((), layer.scale(), dtype=layer.config.dtype, device=layer.config.device)
            return x * layer.weights.pop('w') * scale
            """,
        wrong="return data[1] * data[0].weights['w'] * (data[0].calls + 1)",
        check=NEAR,
        classes="""
            @dataclasses.dataclass(frozen=True)
            class Config:
                scale: float
                dtype: torch.dtype
                device: torch.device

            @dataclasses.dataclass
            class Layer:
                config: Config
                weights: dict
                calls: int = 0

                def scale(self):
                    self.calls += 1
                    return self.config.scale / self.calls
            """,
        given="""
            layer = Layer(Config(0.5, torch.float32, torch.device(DEVICE)), {"w": random(size, seed=seed + 1)})
            return layer, random(size, seed=seed)
            """,
        answer="return data[0].scale() * data[0].weights.pop('w') * data[1]",
        timed=300000,
    ),
    "module_data": Folder(
        right="return data[0](data[1])",
        wrong="return data[0].linear(data[1])",
        check=NEAR,
        classes="""
            class Cache(torch.nn.Module):
                def __init__(self, size):
                    super().__init__()
                    self.linear = torch.nn.Linear(4, 4)
                    self.register_buffer("data", torch.zeros(size, 4))

                def forward(self, x):
                    self.data += self.linear(x)
                    return self.data * 2
            """,
        given="""
            torch.manual_seed(seed)
            return Cache(size).to(DEVICE).requires_grad_(False), random(size, 4, seed=seed)
            """,
        answer="return data[0](data[1])",
    ),
    "numpy_data": Folder(
        right="return data['x'][::-1] * data['n']",
        wrong="return data['x'] * data['n']",
        given="""
            import numpy
            return {'x': random(size, seed=seed).cpu().numpy(), 'n': numpy.float32(0.5)}
            """,
        answer="return data['x'][::-1].copy() * data['n']",
        check="return bool((output == ref_kernel(data)).all()), 'differs'",
    ),
    "overwritten_input": Folder(right="return data.mul_(2)", wrong="return data.mul_(3)", timed=300000),
    "other_dtype_buffer": Folder(
        right="return torch.cumsum(data[0], 0, out=data[1])",
        wrong="return data[1].copy_(data[0])",
        given="return random(size, seed=seed), torch.empty(size, device=DEVICE)",
        answer="return data[0].double().cumsum(0)",
        check="return (output.double() - ref_kernel(data)).abs().max() < 1e-2, 'differs'",
    ),
    "large_memory": Folder(  # on a GPU a buffer takes 8 GiB
        right="return torch.linalg.cholesky_ex(data, check_errors=False).L",
        wrong=(".L", ".L * 1.001"),
        given="""
            n = size if DEVICE == 'cuda' else min(size, 1024)
            data = random(1, n, n, seed=seed).abs_()
            data += data.transpose(1, 2).clone()
            data.diagonal(dim1=1, dim2=2).add_(2 * n)
            return data
            """,
        answer="return torch.linalg.cholesky(data)",
        check="""
            probe = torch.ones(1, data.shape[1], 1, device=data.device)
            want, got = data @ probe, output.tril() @ (output.tril().mT @ probe)
            return ((got - want).abs() / want.abs()).max() < 1e-4, 'residual'
            """,
        timed=32768,
    ),
    "large_output": Folder(  # at the timed size the answer takes 1 GiB on a GPU
        right="""
            image, out = data
            torch.mul(image[..., 0], 0.2989, out=out)
            out.add_(image[..., 1], alpha=0.5870)
            return out.add_(image[..., 2], alpha=0.1140)
            """,
        wrong="return data[1].copy_(data[0].mean(-1))",
        given="""
            n = size if DEVICE == "cuda" else -(-size // 16)
            return random(n, n, 3, seed=seed).abs_(), torch.empty(n, n, device=DEVICE)
            """,
        answer="return data[1].copy_(data[0] @ torch.tensor([0.2989, 0.5870, 0.1140], device=DEVICE))",
        check="""
            bad = int(((output - ref_kernel(data)).abs() > 1e-4).sum())
            return bad == 0, f"{bad} elements differ"
            """,
        timed=16384,
    ),
    # Answers.
    "dict_answer": Folder(  # the reference's has a struct sequence
        right="""
            total = data.double().sum()
            return {'many': len(data), 'sum': total, 'ends': (data.min(), data.max()), 'how': 'exact'}
            """,
        wrong=("data.min()", "data[0].clone()"),
        answer="return {'sum': data.double().sum(), 'many': len(data), 'ends': torch.aminmax(data), 'how': 'exact'}",
        check="""
            want = ref_kernel(data)
            near = abs(output['sum'] - want['sum']) < 1e-9 * len(data) and output['many'] == len(data)
            return set(output) == set(want) and near and output['ends'] == tuple(want['ends']), 'differs'
            """,
        timed=300000,
    ),
    "class_answer": Folder(
        right="""
            from kinds import Out, Pair

            def custom_kernel(data):
                return [Pair(data * 2, len(data)), Out(data.sum())]
            """,
        wrong=("len(data)", "0"),
        classes="""
            class Pair(NamedTuple):
                y: torch.Tensor
                n: int

            @dataclasses.dataclass
            class Out:
                total: torch.Tensor
            """,
        answer="return [Pair(data * 2, len(data)), Out(data.sum())]",
        check="""
            pair, out = output
            right = isinstance(pair, Pair) and isinstance(out, Out) and torch.equal(pair.y, data * 2)
            return right and torch.allclose(out.total, data.sum()) and pair.n == len(data), 'differs'
            """,
        files={
            "kinds.py": """
            import dataclasses
            from typing import Any, NamedTuple

            class Pair(NamedTuple):
                y: Any
                n: int

            @dataclasses.dataclass
            class Out:
                total: Any
            """
        },
    ),
    "turned": Folder(
        right="return (data + data).T, data.sort(1)[0][:, :4].unbind(1), (data + data)[:, -1]",
        wrong=(":4", "1:5"),
        given="return random(size, 64, seed=seed)",
        answer="return (data * 2).T.contiguous(), data.sort(1).values[:, :4].unbind(1), (data * 2)[:, -1]",
        check="""
            want = ref_kernel(data)
            pairs = [(output[0], want[0]), *zip(output[1], want[1]), (output[2], want[2])]
            return all(torch.equal(a, b) for a, b in pairs), 'differs'
            """,
    ),
    "lazy_conjugate": Folder(
        right="return data.conj(), -data.conj().imag",
        wrong="return data, -data.conj().imag",
        given="return random(size, seed=seed, dtype=torch.complex64).conj()",
        answer="return data.conj(), data.imag * 1",
        check="return all(map(torch.equal, output, ref_kernel(data))), 'differs'",
    ),
    # Files, and what compiles a submission.
    "further_files": Folder(
        right="""
            from helpers.scale import FACTOR

            def custom_kernel(data):
                from task import output_t
                assert output_t == 'vector'
                return data * FACTOR
            """,
        classes="from helpers.scale import FACTOR",
        answer="""
            from task import output_t
            return data * FACTOR
            """,
        files={"helpers/scale.py": "FACTOR = 0.75", "task.py": "output_t = 'vector'"},
    ),
    "load_inline": Folder(
        right="""
            from torch.utils.cpp_extension import load_inline

            SOURCE = 'torch::Tensor twice(torch::Tensor x) { return x + x; }'
            module = load_inline(name='twice', cpp_sources=SOURCE, functions=['twice'])

            def custom_kernel(data):
                return module.twice(data)
            """,
        timed=300000,
    ),
    "torch_compile": Folder(
        right="""
            import torch

            @torch.compile
            def twice(x):
                return x + x

            def custom_kernel(data):
                return twice(data)
            """,
        wrong=("x + x", "x * 3"),
        timed=300000,
    ),
    "triton_kernel": Folder(
        right="""
            import torch, triton
            import triton.language as tl

            @triton.jit
            def twice(x, y, n, BLOCK: tl.constexpr):
                at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
                tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)

            def custom_kernel(data):
                out = torch.empty_like(data)
                twice[(triton.cdiv(len(data), 1024),)](data, out, len(data), BLOCK=1024)
                return out
            """,
        timed=300000,
    ),
}
COMPILED = ("load_inline", "torch_compile")  # with torch's own headers, for half a minute and more


def function(head: str, body: str) -> str:
    return f"def {head}:\n{indent(dedent(body), '    ')}\n"


def write(place: Path, found: Folder) -> Path:
    """Write a folder to `place`, with submission.py and solutions/wrong.py."""
    more = f", {found.cases}" if found.cases else ""
    tests = ", ".join(f"{{size: {size}, seed: {size + 4000}{more}}}" for size in SIZES)
    timed = f"{{size: {found.timed}, seed: 93246{more}}}" if found.timed else ""
    listed = ", ".join(f"{{name: {name}, source: {name}}}" for name in found.files)
    reference = [
        *(HEAD, dedent(found.classes), function("generate_input(size, seed)", found.given)),
        *(function("ref_kernel(data)", found.answer), function("check_implementation(data, output)", found.check)),
        dedent(found.more),
    ]
    files = {
        "task.yml": f"files: [{listed}]\ntests: [{tests}]\nbenchmarks: [{timed}]\nranking_by: geom\n",
        "reference.py": "\n".join(reference),
        **{name: dedent(text) for name, text in found.files.items()},
    }
    wrong = found.right.replace(*found.wrong) if isinstance(found.wrong, tuple) else found.wrong
    for name, text in {"submission.py": found.right, "solutions/wrong.py": wrong}.items():
        whole = "def custom" in text
        files[name] = dedent(text) if whole else f"import torch\n\n{function('custom_kernel(data)', text)}"
    return write_files(place, files)
