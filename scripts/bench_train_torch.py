"""torch's side of bench_train.py, run by its own interpreter: a plain Llama, AdamW, cross entropy."""

from __future__ import annotations

import argparse
import json
import resource
import time

import torch
import torch.nn.functional as F
from torch import nn

SHAPES = {"15M": (288, 6, 6, 6, 768, 32000), "135M": (576, 30, 9, 3, 1536, 49152)}
N_SEQUENCES, LENGTH = 4, 128


def turned(x, cos, sin):
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


class Block(nn.Module):
    def __init__(self, d, heads, kv_heads, ff):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, d // heads
        self.norm_1, self.norm_2 = nn.RMSNorm(d, 1e-5), nn.RMSNorm(d, 1e-5)
        self.q, self.o = (nn.Linear(d, d, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(d, kv_heads * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(d, ff, bias=False) for _ in range(2))
        self.down = nn.Linear(ff, d, bias=False)

    def forward(self, x, cos, sin):
        n, t, d = x.shape
        y = self.norm_1(x)
        q = turned(self.q(y).view(n, t, self.heads, self.size).transpose(1, 2), cos, sin)
        k = turned(self.k(y).view(n, t, self.kv_heads, self.size).transpose(1, 2), cos, sin)
        v = self.v(y).view(n, t, self.kv_heads, self.size).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x = x + self.o(y.transpose(1, 2).reshape(n, t, d))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, d, layers, heads, kv_heads, ff, n_vocab):
        super().__init__()
        self.embedding = nn.Embedding(n_vocab, d)
        self.blocks = nn.ModuleList(Block(d, heads, kv_heads, ff) for _ in range(layers))
        self.norm = nn.RMSNorm(d, 1e-5)
        size = d // heads
        angle = torch.arange(LENGTH)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
        self.cos, self.sin = angle.cos(), angle.sin()

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.linear(self.norm(x), self.embedding.weight)


def digits(n_steps):
    """784-500-10 in steps of 1000 images, 500 at a time."""
    net = nn.Sequential(nn.Linear(784, 500), nn.ReLU(), nn.Linear(500, 10))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.0)
    x, y = torch.rand(6000, 784), torch.randint(0, 10, (6000,))
    times = []
    for _ in range(10 * n_steps):
        start = time.perf_counter()
        order = torch.randperm(6000)
        optimizer.zero_grad(set_to_none=True)
        for rows in order[:1000].split(500):
            out = net(x[rows])
            loss = F.cross_entropy(out, y[rows]) / 2
            loss.backward()
            (loss.item(), (out.argmax(1) == y[rows]).sum().item())
        optimizer.step()
        times.append(time.perf_counter() - start)
    return 1000, times


def tokens(shape, n_steps):
    model = Llama(*SHAPES[shape])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    tokens = torch.randint(0, SHAPES[shape][-1], (N_SEQUENCES, LENGTH))
    targets = tokens.flatten().roll(-1)
    times = []
    for _ in range(n_steps):
        start = time.perf_counter()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        loss.item()
        times.append(time.perf_counter() - start)
    return N_SEQUENCES * LENGTH, times


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    n, times = digits(args.steps) if args.shape == "mnist-fc" else tokens(args.shape, args.steps)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"tokens_s": n / min(times), "median": n / sorted(times)[len(times) // 2], "bytes": peak}))


if __name__ == "__main__":
    main()
