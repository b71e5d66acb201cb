"""compat.py: FlashMLA's and DeepGEMM's functions compute what they say, refuse the rest, and vLLM calls them."""

import sys
from types import ModuleType

import pytest
import torch

from dsv4_kernels import compat, vllm
from tests.problems import cases

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def view(pages, per_page):
    """FlashMLA's view of pages."""
    return pages.view(torch.float8_e4m3fn).as_strided((len(pages), per_page, 1, 584), (pages.shape[1], 584, 584, 1))


def decode_call(device, **changes):
    """Data of fmha_decode, and what flash_mla_with_kvcache takes of them."""
    data = cases.made("fmha_decode", device, **{"batch": 5, "page_window": 4, "content": "ragged", **changes})
    sizes = cases.task("fmha_decode").unpack(data)
    arguments = {
        "q": data.q,
        "k_cache": view(data.window, sizes.page_window),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": compat.get_mla_metadata()[0],
        "is_fp8_kvcache": True,
        "indices": data.window_index,
        "attn_sink": data.sink,
        "extra_k_cache": view(data.compressed, sizes.page_compressed),
        "extra_indices_in_kvcache": data.compressed_index,
        "topk_length": data.window_length,
        "extra_topk_length": data.compressed_length,
    }
    return data, arguments


def sparse_call(device, **changes):
    """Data of fmha_decode without compressed entries, and what flash_mla_sparse_fwd takes for the same attention."""
    data, _ = decode_call(device, queries=1, **changes)
    data = data._replace(compressed_length=torch.zeros_like(data.compressed_length))
    per_page = cases.task("fmha_decode").unpack(data).page_window
    entries = torch.arange(len(data.window) * per_page, device=device)  # those that no list names are anything
    rows = cases.reference("fmha_decode").decoded(data.window, per_page, entries).bfloat16().unsqueeze(1)
    call = {"q": data.q[:, 0], "kv": rows, "indices": data.window_index, "sm_scale": 512**-0.5}
    return data, call | {"attn_sink": data.sink, "topk_length": data.window_length}


def logits_call(device, queries=2, lengths=((200, 1), (0, 70), (191, 190))):
    """Data of indexer of FP8 keys in pages of 64, and what fp8_paged_mqa_logits takes of them."""
    changes = {"batch": len(lengths), "queries": queries, "heads": 64, "entries": 200, "kind": "fp8", "per_page": 64}
    data = cases.made("indexer", device, **changes, content="plain")
    q = data.q.to(torch.float8_e4m3fn)
    visible = torch.tensor(lengths, dtype=torch.int32, device=device)
    keys = data.keys.view(-1, 64, 1, 132)
    call = {"q": q, "kv_cache": keys, "weights": data.weights.view(-1, 64), "context_lens": visible}
    return data, call | {"block_table": data.table, "schedule_meta": None, "max_context_len": 200}


def apart(a, b):
    """The relative distance of two tensors."""
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [3, 16])
def test_flash_mla_with_kvcache_is_the_problems_attention(heads, device):
    data, arguments = decode_call(device, heads=heads)
    arguments["q"] = torch.cat([data.q, data.q], 3)[..., 512:]  # not contiguous
    out, lse = compat.flash_mla_with_kvcache(**arguments, out=torch.empty_like(data.q))
    assert cases.reference("fmha_decode").check_implementation(data, (out, lse.transpose(1, 2))) == (True, "")
    window = {name: value for name, value in arguments.items() if "extra" not in name and name != "attn_sink"}
    alone = data._replace(compressed_length=torch.zeros_like(data.compressed_length), sink=data.sink.fill_(-torch.inf))
    out, lse = compat.flash_mla_with_kvcache(**window)
    assert cases.reference("fmha_decode").check_implementation(alone, (out, lse.transpose(1, 2))) == (True, "")


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("indices", lambda _: None, "dense attention"),
        ("is_fp8_kvcache", lambda _: False, "bf16 caches"),
        ("causal", lambda _: True, "causal must be False"),
        ("softmax_scale", lambda _: 0.1, r"softmax_scale must be 512\^-0.5"),
        ("q", lambda t: torch.cat([t, t[..., :64]], 3), r"q must be \(B, S, H, 512\), got .*576"),
        ("k_cache", lambda t: torch.zeros(2, 64, 1, 656, dtype=torch.uint8), "k_cache must be of bytes"),
        ("k_cache", lambda t: torch.zeros(3, 64, 1, 584, dtype=torch.uint8), "k_cache must have strides.*37440"),
        ("k_cache", lambda t: torch.zeros(1, 64, 1, 584, dtype=torch.uint8), "padding of its last page"),
        ("extra_indices_in_kvcache", lambda _: None, "extra_k_cache must be given where"),
        ("attn_sink", lambda t: t[:1], "^attn_sink must be"),
    ],
)
def test_flash_mla_with_kvcache_refuses(name, change, said):
    arguments = {"causal": False, "softmax_scale": None} | decode_call("cpu")[1]
    with pytest.raises(ValueError, match=said):
        compat.flash_mla_with_kvcache(**arguments | {name: change(arguments[name])})


@pytest.mark.parametrize("device", DEVICES)
def test_flash_mla_sparse_fwd_attends_to_rows_of_fp8_values(device):
    data, call = sparse_call(device)
    out, _, lse = compat.flash_mla_sparse_fwd(**call)
    answer = out.unsqueeze(1), lse.unsqueeze(1)
    assert cases.reference("fmha_decode").check_implementation(data, answer) == (True, "")
    with pytest.raises(ValueError, match="kv must hold values of FP8 caches"):
        compat.flash_mla_sparse_fwd(**call | {"kv": torch.randn_like(call["kv"])})


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_paged_mqa_logits_are_the_indexers_scores(device):
    data, call = logits_call(device)
    entry = torch.arange(200, device=device)
    keys = cases.task("indexer").read_keys(data.keys, data.table[:, entry // 64].long() * 64 + entry % 64).double()
    dots = torch.einsum("bshd,bnd->bshn", call["q"].double(), keys).relu_()
    want = torch.einsum("bsh,bshn->bsn", data.weights.double(), dots).flatten(0, 1)
    seen = entry < call["context_lens"].view(-1, 1)
    logits = compat.fp8_paged_mqa_logits(**call)
    assert apart(logits[seen], want[seen]) < 3e-4
    cleaned = compat.fp8_paged_mqa_logits(**call, clean_logits=True)
    assert torch.equal(cleaned, logits.masked_fill(~seen, -torch.inf))
    arguments = (*data[:4], call["context_lens"])
    torch.library.opcheck(compat.indexer_scores, arguments, test_utils=["test_schema", "test_faketensor"])
    for name, value in {
        "indices": data.table,
        "context_lens": call["context_lens"][0],
        "max_context_len": 3000,
    }.items():
        with pytest.raises(ValueError, match=r"(indices|context_lens|block_table) must be"):
            compat.fp8_paged_mqa_logits(**call | {name: value})


@pytest.mark.gpu
def test_public_kernels_compute_the_same():
    flash_mla, deep_gemm = pytest.importorskip("flash_mla"), pytest.importorskip("deep_gemm")
    long = {"window": 128, "compressed": 512, "pool": 600, "page_window": 64, "page_compressed": 64}
    _, call = decode_call("cuda", queries=1, heads=64, content="plain", **long)
    out, lse = compat.flash_mla_with_kvcache(**call)
    theirs = flash_mla.flash_mla_with_kvcache(**call | {"tile_scheduler_metadata": flash_mla.get_mla_metadata()[0]})
    assert apart(out, theirs[0]) < 2e-3 and apart(lse, theirs[1]) < 1e-5
    _, call = sparse_call("cuda", heads=64, content="plain", **long)
    out, _, lse = compat.flash_mla_sparse_fwd(**call)
    theirs = flash_mla.flash_mla_sparse_fwd(**call)
    assert apart(out, theirs[0]) < 2e-3 and apart(lse, theirs[2]) < 1e-5
    _, call = logits_call("cuda", 1, ((200,), (1,), (70,)))
    count = torch.cuda.get_device_properties("cuda").multi_processor_count
    call["schedule_meta"] = deep_gemm.get_paged_mqa_logits_metadata(call["context_lens"], 64, count)
    used = torch.arange(call["block_table"].shape[1], device="cuda") * 64 < call["context_lens"]  # all are read
    call |= {"block_table": torch.where(used, call["block_table"], 0), "max_context_len": 256, "clean_logits": False}
    theirs = torch.from_dlpack(deep_gemm.fp8_paged_mqa_logits(*call.values()))
    seen = torch.arange(256, device="cuda") < call["context_lens"]
    assert apart(compat.fp8_paged_mqa_logits(**call)[seen], theirs[seen]) < 3e-4


@pytest.fixture
def flashmla(monkeypatch):
    """A stub of vLLM's module, whose function answers "theirs"."""
    parts = vllm.MODULE.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(".".join(parts[:i])))
    module = sys.modules[vllm.MODULE]
    exec(f"def {vllm.NAME}({', '.join(f'{name}=None' for name in vllm.KNOWN[0])}): return 'theirs'", vars(module))
    vllm._warn_once.cache_clear()
    return module


def test_vllms_function_is_replaced_and_keeps_what_is_not_served(flashmla, caplog):
    vllm.register()
    vllm.register()
    data, arguments = decode_call("cpu")
    out, lse = flashmla.flash_mla_with_kvcache(**arguments)
    assert cases.reference("fmha_decode").check_implementation(data, (out, lse.transpose(1, 2))) == (True, "")
    assert not caplog.records
    assert [flashmla.flash_mla_with_kvcache(**arguments | {"indices": None}) for _ in range(2)] == ["theirs"] * 2
    (record,) = caplog.records
    assert "dense attention is not served" in record.getMessage()


def test_vllms_function_stays_if_it_is_another(flashmla, caplog, monkeypatch):
    other = flashmla.flash_mla_with_kvcache = lambda q, cache: "theirs"
    vllm.register()
    monkeypatch.setitem(sys.modules, vllm.MODULE, None)
    vllm.register()
    assert flashmla.flash_mla_with_kvcache is other
    assert ["FlashMLA stays" in record.getMessage() for record in caplog.records] == [True, True]
