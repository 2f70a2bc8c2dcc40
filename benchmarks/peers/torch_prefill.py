"""The peer of `benchmarks.prefill_latency`: torch, FlashAttention 2, Triton kernels around it.

    python -m benchmarks.peers.torch_prefill '{"hidden": 4096, ...}'     (see `Sizes`)

Two designs: `torch eager` launches every kernel, `torch full` replays one CUDA graph of the body,
padded to a bucket, with sixteen request slots. As in the benchmark a pass is host metadata, one
copy to the device, the body, and the LM head on each request's last row. Needs torch and triton.
Prints one JSON object a line.
"""

import gc
import json
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
import triton
import triton.language as tl

CUDA = torch.device("cuda")
SLOTS = 16
EAGER_UP_TO = 512  # tokens; above, it takes as long as the graph
EPS = 1e-6


@dataclass(frozen=True)
class Sizes:
    """The model, and what is measured: (tokens, requests) and the bucket of each."""

    hidden: int
    mlp: int
    layers: int
    q_heads: int
    kv_heads: int
    dim: int
    vocab: int
    theta: float
    repeats: int
    cases: list[list[int]]


@triton.jit
def add_norm(x, hidden, weight, out, width: tl.constexpr, eps: tl.constexpr,
             adds: tl.constexpr, block: tl.constexpr):  # fmt: skip
    """hidden += x (or = x); out = its RMS norm."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    live = at < width
    value = tl.load(x + row * width + at, mask=live, other=0.0).to(tl.float32)
    if adds:
        value += tl.load(hidden + row * width + at, mask=live, other=0.0).to(tl.float32)
    tl.store(hidden + row * width + at, value.to(hidden.dtype.element_ty), mask=live)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / width + eps)
    normed = value * scale * tl.load(weight + at, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, normed.to(out.dtype.element_ty), mask=live)


@triton.jit
def norm_rotate_store(qkv, norms, table, positions, q, keys, values, q_heads: tl.constexpr,
                      kv_heads: tl.constexpr, dim: tl.constexpr, eps: tl.constexpr):  # fmt: skip
    """One head of one token: queries to `q`, keys and values to their own arrays."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = dim // 2
    at = tl.arange(0, half)
    source = qkv + (token * (q_heads + 2 * kv_heads) + head) * dim
    low, high = tl.load(source + at).to(tl.float32), tl.load(source + half + at).to(tl.float32)
    if head >= q_heads + kv_heads:
        target = values + (token * kv_heads + head - q_heads - kv_heads) * dim
    else:
        is_key = head >= q_heads
        scale = 1.0 / tl.sqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / dim + eps)
        norm = norms + tl.where(is_key, dim, 0)
        low = low * scale * tl.load(norm + at).to(tl.float32)
        high = high * scale * tl.load(norm + half + at).to(tl.float32)
        position = tl.load(positions + token).to(tl.int64)
        cos = tl.load(table + position * dim + at)
        sin = tl.load(table + position * dim + half + at)
        low, high = low * cos - high * sin, high * cos + low * sin
        if is_key:
            target = keys + (token * kv_heads + head - q_heads) * dim
        else:
            target = q + (token * q_heads + head) * dim
    tl.store(target + at, low.to(q.dtype.element_ty))
    tl.store(target + half + at, high.to(q.dtype.element_ty))


@triton.jit
def silu_mul(gate_up, out, width: tl.constexpr, block: tl.constexpr):
    token, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    live = at < width
    gate = tl.load(gate_up + token * 2 * width + at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * width + width + at, mask=live, other=0.0).to(tl.float32)
    out_value = (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty)
    tl.store(out + token * width + at, out_value, mask=live)


class Buffers:
    """Device arrays of one token count, and the pinned image of its integers."""

    def __init__(self, sizes: Sizes, tokens: int, slots: int) -> None:
        self.tokens = tokens
        lengths = {"ids": tokens, "positions": tokens, "starts": slots + 1, "last": slots}
        self.host = torch.zeros(sum(-(-n // 4) * 4 for n in lengths.values()), dtype=torch.int32,
                                pin_memory=True)  # fmt: skip
        self.device = torch.zeros_like(self.host, device=CUDA)
        self.fields: dict[str, np.ndarray] = {}
        self.arrays: dict[str, torch.Tensor] = {}
        start = 0
        for name, length in lengths.items():
            self.fields[name] = self.host.numpy()[start : start + length]
            self.arrays[name] = self.device[start : start + length]
            start += -(-length // 4) * 4

        def empty(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.bfloat16, device=CUDA)

        self.q = empty(tokens, sizes.q_heads, sizes.dim)
        self.keys = empty(tokens, sizes.kv_heads, sizes.dim)
        self.values = empty(tokens, sizes.kv_heads, sizes.dim)
        self.hidden, self.out = empty(tokens, sizes.hidden), empty(tokens, sizes.hidden)
        self.longest = tokens

    def fill(self, ids: np.ndarray, lens: np.ndarray) -> None:
        """A batch's metadata, made afresh, and its copy to the device."""
        fields, count = self.fields, len(lens)
        fields["ids"][: len(ids)] = ids
        fields["ids"][len(ids) :] = 0
        fields["starts"][1 : count + 1] = np.cumsum(lens)
        fields["starts"][count + 1 :] = len(ids)
        fields["last"][:count] = fields["starts"][1 : count + 1] - 1
        fields["positions"][: len(ids)] = np.arange(len(ids)) - np.repeat(
            fields["starts"][:count], lens
        )
        self.device.copy_(self.host, non_blocking=True)


class Model:
    """Random weights."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        heads = sizes.q_heads + 2 * sizes.kv_heads

        def weight(*shape: int) -> torch.Tensor:
            made = torch.empty(shape, dtype=torch.bfloat16, device=CUDA)
            return made.normal_(0, shape[-1] ** -0.5)

        def ones(*shape: int) -> torch.Tensor:
            return torch.ones(shape, dtype=torch.bfloat16, device=CUDA)

        self.embedding = weight(sizes.vocab, sizes.hidden)
        self.head, self.norm = weight(sizes.vocab, sizes.hidden), ones(sizes.hidden)
        self.layers = [
            {
                "qkv": weight(heads * sizes.dim, sizes.hidden),
                "output": weight(sizes.hidden, sizes.q_heads * sizes.dim),
                "gate_up": weight(2 * sizes.mlp, sizes.hidden),
                "down": weight(sizes.hidden, sizes.mlp),
                "norms": ones(2, sizes.hidden),
                "qk_norms": ones(2, sizes.dim),
            }
            for _ in range(sizes.layers)
        ]
        power = torch.arange(0, sizes.dim, 2, device=CUDA, dtype=torch.float64) / sizes.dim
        at = torch.arange(8192, device=CUDA, dtype=torch.float64)
        angle = torch.outer(at, sizes.theta**-power)
        self.table = torch.cat((angle.cos(), angle.sin()), -1).float().contiguous()

    def body(self, own: Buffers) -> None:
        """All layers; the normed rows in `own.out`."""
        x = functional.embedding(own.arrays["ids"], self.embedding)
        for index, layer in enumerate(self.layers):
            x = self.add_norm(x, own, layer["norms"][0], adds=index > 0)
            attended = self.attend(functional.linear(x, layer["qkv"]), layer["qk_norms"], own)
            x = functional.linear(attended, layer["output"])
            x = self.add_norm(x, own, layer["norms"][1])
            gate_up = functional.linear(x, layer["gate_up"])
            gated, width = torch.empty_like(gate_up[:, : self.sizes.mlp]), self.sizes.mlp
            silu_mul[(own.tokens, triton.cdiv(width, 2048))](gate_up, gated, width, 2048)
            x = functional.linear(gated, layer["down"])
        own.out.copy_(self.add_norm(x, own, self.norm))

    def add_norm(
        self, x: torch.Tensor, own: Buffers, weight: torch.Tensor, *, adds: bool = True
    ) -> torch.Tensor:
        out, width = torch.empty_like(x), self.sizes.hidden
        block = triton.next_power_of_2(width)
        add_norm[(own.tokens,)](x, own.hidden, weight, out, width, EPS, adds, block, num_warps=8)
        return out

    def attend(self, qkv: torch.Tensor, norms: torch.Tensor, own: Buffers) -> torch.Tensor:
        sizes, starts = self.sizes, own.arrays["starts"]
        heads = sizes.q_heads + 2 * sizes.kv_heads
        norm_rotate_store[(own.tokens, heads)](
            qkv, norms, self.table, own.arrays["positions"], own.q, own.keys, own.values,
            sizes.q_heads, sizes.kv_heads, sizes.dim, EPS, num_warps=1,
        )  # fmt: skip
        out = torch.ops.aten._flash_attention_forward(
            own.q, own.keys, own.values, starts, starts, own.longest, own.longest, 0.0, True, False,
            scale=sizes.dim**-0.5,
        )  # fmt: skip
        return out[0].reshape(own.tokens, -1)

    def logits(self, own: Buffers, count: int) -> torch.Tensor:
        return functional.linear(own.out.index_select(0, own.arrays["last"][:count]), self.head)


def measure(run: Any, repeats: int) -> dict[str, float]:
    """Median milliseconds to sync, and of calls in a row."""
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    walls: list[float] = []
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        torch.cuda.synchronize()
        walls.append(time.perf_counter() - begun)
    begun = time.perf_counter()
    for _ in range(repeats):
        run()
    torch.cuda.synchronize()
    in_a_row = (time.perf_counter() - begun) / repeats
    return {
        "wall_ms": round(1e3 * statistics.median(walls), 3),
        "busy_ms": round(1e3 * in_a_row, 3),
    }


def capture(model: Model, own: Buffers) -> torch.cuda.CUDAGraph:
    """The body as one graph, after two passes outside it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            model.body(own)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model.body(own)
    return graph


def main() -> None:
    """See the module's docstring."""
    torch.set_grad_enabled(False)
    sizes = Sizes(**json.loads(sys.argv[1]))
    model, rng = Model(sizes), np.random.default_rng(0)
    graphs: dict[int, tuple[Buffers, torch.cuda.CUDAGraph]] = {}
    gc.collect()
    gc.freeze()
    print(json.dumps({"torch": torch.__version__, "triton": triton.__version__}), flush=True)
    for tokens, requests, bucket in sizes.cases:
        ids = rng.integers(sizes.vocab, size=tokens).astype(np.int32)
        lens = np.full(requests, tokens // requests, np.int32)
        lens[: tokens % requests] += 1
        eager = Buffers(sizes, tokens, requests)
        eager.longest = int(lens.max())
        if bucket not in graphs:
            whole = Buffers(sizes, bucket, SLOTS)
            whole.fill(ids[:1], np.ones(1, np.int32))
            graphs[bucket] = whole, capture(model, whole)
        full, graph = graphs[bucket]

        def run_eager(own: Buffers = eager, ids: Any = ids, lens: Any = lens) -> torch.Tensor:
            own.fill(ids, lens)
            model.body(own)
            return model.logits(own, len(lens))

        def run_full(own: Any = full, graph: Any = graph, ids: Any = ids, lens: Any = lens):
            own.fill(ids, lens)
            graph.replay()
            return model.logits(own, len(lens))

        difference = (run_full().float() - (expected := run_eager().float())).norm()
        runs = [("torch full", run_full), ("torch eager", run_eager)]
        for path, run in runs if tokens <= EAGER_UP_TO else runs[:1]:
            row = {"tokens": tokens, "requests": requests, "prefix": 0, "path": path}
            row |= measure(run, max(10, min(sizes.repeats, 50 * 512 // max(tokens, 512))))
            row["from_eager"] = round(float(difference / expected.norm()), 4)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
