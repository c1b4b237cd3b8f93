"""trl's side of tests/training/test_trl.py, run by its own interpreter: torch's Llama with trl's losses.

The network has a GGUF file's layout, so gradients compare by name. Forward passes are in float64; trl's
functions are called as they are, with what their trainers would give them."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
import trl
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

N_PROJECTIONS = 4


def turned(x, cos, sin):
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def logits_of(w, size, tokens):
    """(n, t, vocabulary) of tokens (n, t)."""
    n, t = tokens.shape
    heads, kv_heads, eps = size["heads"], size["kv_heads"], size["eps"]
    x = w["token_embd.weight"][tokens]
    head = x.shape[-1] // heads
    angle = torch.arange(t, dtype=x.dtype)[:, None] * 10000.0 ** (-torch.arange(0, head, 2, dtype=x.dtype) / head)
    cos, sin = angle.cos(), angle.sin()

    def norm(x, name):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * w[name]

    for i in range(size["layers"]):

        def linear(x, name, i=i):
            return F.linear(x, w[f"blk.{i}.{name}.weight"])

        y = norm(x, f"blk.{i}.attn_norm.weight")
        q = turned(linear(y, "attn_q").view(n, t, heads, head).transpose(1, 2), cos, sin)
        k = turned(linear(y, "attn_k").view(n, t, kv_heads, head).transpose(1, 2), cos, sin)
        v = linear(y, "attn_v").view(n, t, kv_heads, head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + linear(y.transpose(1, 2).reshape(n, t, -1), "attn_output")
        y = norm(x, f"blk.{i}.ffn_norm.weight")
        x = x + linear(F.silu(linear(y, "ffn_gate")) * linear(y, "ffn_up"), "ffn_down")
    return F.linear(norm(x, "output_norm.weight"), w["output.weight"])


def padded(rows):
    """(n, t) of rows of numbers, and the mask of what is there."""
    t = max(map(len, rows))
    return (
        torch.tensor([[*row, *[0] * (t - len(row))] for row in rows]),
        torch.tensor([[1] * len(row) + [0] * (t - len(row)) for row in rows]),
    )


class Case:
    """A method on its data, the loss of which follows from the weights."""

    def __init__(self, spec, size):
        self.spec, self.size = spec, size
        self.ids, self.mask = padded([row["tokens"] for row in spec["rows"]])
        self.learn, _ = padded([row["learn"] for row in spec["rows"]])
        self.reference = torch.tensor(spec["reference"], dtype=torch.float64)

    def outputs(self, w, chosen=slice(None)):
        """As the fused head of trl gives them; log_probs (n, t - 1), 0 where nothing is learned."""
        logits = logits_of(w, self.size, self.ids[chosen])[:, :-1]
        labels = self.ids[chosen, 1:]
        own = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0] * self.learn[chosen, 1:]
        nothing = torch.zeros_like(own)
        return SimpleNamespace(log_probs=own, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())

    def trainer(self, **more):
        """Everything of a trainer that its loss asks for."""
        same = SimpleNamespace(
            device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, **_: x
        )
        given = {
            "model": SimpleNamespace(training=True), "accelerator": same, "aux_loss_enabled": False,
            "precompute_ref_logps": True, "_metrics": {"train": defaultdict(list)}, "_total_train_tokens": 0,
            "_tp_size": 1, "label_smoothing": 0.0, **self.spec["hyperparameters"], **more,
        }  # fmt: skip
        return SimpleNamespace(**given)

    def loss(self, w):
        return getattr(self, self.spec["method"])(w)

    def dpo(self, w):
        order = [*range(0, len(self.ids), 2), *range(1, len(self.ids), 2)]  # chosen ones, then rejected ones
        chosen, rejected = self.reference[order].chunk(2)
        inputs = {
            "input_ids": self.ids[order], "attention_mask": self.mask[order], "completion_mask": self.learn[order],
            "ref_chosen_logps": chosen, "ref_rejected_logps": rejected,
        }  # fmt: skip
        trainer = self.trainer(
            ld_alpha=None, f_divergence_type="reverse_kl", loss_types=["sigmoid"], loss_weights=[1.0],
            use_weighting=False,
        )  # fmt: skip
        return DPOTrainer._compute_loss(trainer, lambda **_: self.outputs(w, order), inputs, False)

    def kto(self, w):
        own, other = (list(range(first, len(self.ids), 2)) for first in (0, 1))
        inputs = {
            "input_ids": self.ids[own], "attention_mask": self.mask[own], "completion_mask": self.learn[own],
            "label": torch.tensor([row["value"] > 0 for row in self.spec["rows"]])[own],
            "KL_input_ids": self.ids[other], "KL_attention_mask": self.mask[other],
            "KL_completion_mask": self.learn[other], "ref_logps": self.reference[own],
            "ref_KL_logps": self.reference[other],
        }  # fmt: skip

        def model(input_ids, **_):
            return self.outputs(w, own if input_ids is inputs["input_ids"] else other)

        trainer = self.trainer(calculate_KL=True, loss_type="kto")
        trainer._compute_kl_logps = lambda m, batch: KTOTrainer._compute_kl_logps(trainer, m, batch)
        return KTOTrainer._compute_loss(trainer, model, inputs, False)

    def means(self, w):
        labels = self.ids.masked_fill(self.learn == 0, -100)
        logits = logits_of(w, self.size, self.ids)
        return ORPOTrainer.get_batch_logps(logits, labels, average_log_prob=True), logits, labels

    def orpo(self, w):
        """trl's odds ratio; the supervised part is of the answers alone, as in the paper, and not of the prompts."""
        means, logits, labels = self.means(w)
        ratio = ORPOTrainer.odds_ratio_loss(self.trainer(), means[0::2], means[1::2])[0]
        supervised = F.cross_entropy(logits[0::2, :-1].flatten(0, 1), labels[0::2, 1:].flatten())
        return supervised - ratio.mean()

    def simpo(self, w):
        means, _, _ = self.means(w)
        trainer = self.trainer(alpha=0.0, loss_type="simpo", simpo_gamma=self.spec["hyperparameters"]["gamma"])
        return CPOTrainer.cpo_loss(trainer, means[0::2], means[1::2])[0].mean()

    def reinforcement(self, w):
        n, group = len(self.ids), self.spec["hyperparameters"]["n_samples"]
        rewards = torch.tensor(self.spec["rewards"], dtype=torch.float64).view(-1, group)
        advantages = rewards - rewards.mean(1, keepdim=True)
        if self.spec["loss_type"] == "grpo":
            advantages = advantages / (rewards.std(1, keepdim=True) + 1e-4)
        learn = self.learn[:, 1:]
        old, reference = torch.zeros(learn.shape, dtype=torch.float64), torch.zeros(learn.shape, dtype=torch.float64)
        for i in range(n):
            old[i, learn[i] > 0] = torch.tensor(self.spec["old"][i], dtype=torch.float64)
            reference[i, learn[i] > 0] = torch.tensor(self.spec["token_reference"][i], dtype=torch.float64)
        inputs = {
            "prompt_ids": self.ids[:, :1], "prompt_mask": self.mask[:, :1], "completion_ids": self.ids[:, 1:],
            "completion_mask": learn, "advantages": advantages.view(-1), "old_per_token_logps": old,
            "ref_per_token_logps": reference,
        }  # fmt: skip
        h = self.spec["hyperparameters"]
        trainer = self.trainer(
            top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level="token",
            args=SimpleNamespace(use_bias_correction_kl=False, delta=None), epsilon_low=h["clip"],
            epsilon_high=h["clip"], use_vllm=False, current_gradient_accumulation_steps=1,
            max_completion_length=h["max_tokens"], _entropy_bonus_enabled=False, loss_type=self.spec["loss_type"],
        )  # fmt: skip
        own = self.outputs(w)
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (own.log_probs, own.entropy, None)
        return GRPOTrainer._compute_loss(trainer, None, inputs)


def main() -> None:
    torch.set_num_threads(1)  # threads wait for each other beside other work
    given = json.loads(Path(sys.argv[1]).read_text())
    start = {name: torch.tensor(x, dtype=torch.float64) for name, x in np.load(sys.argv[2]).items()}
    found = {}
    for name, spec in given["cases"].items():
        case = Case(spec, given["size"])
        w = {k: x.clone().requires_grad_() for k, x in start.items()}
        optimizer = torch.optim.AdamW(w.values(), lr=given["rate"], weight_decay=0.0)
        losses, gradients = [], {}
        for step in range(given["n_steps"]):
            optimizer.zero_grad()
            loss = case.loss(w)
            loss.backward()
            losses.append(loss.item())
            if not step:
                for i, (k, x) in enumerate(w.items()):
                    rng = np.random.default_rng(i)
                    g = x.grad.numpy()
                    along = [float((g * rng.normal(size=g.shape)).sum()) for _ in range(N_PROJECTIONS)]
                    gradients[k] = {"norm": float(np.linalg.norm(g)), "along": along}
            optimizer.step()
        found[name] = {"losses": losses, "gradients": gradients}
    versions = {"trl": trl.__version__, "torch": torch.__version__, "numpy": np.__version__}
    print(json.dumps({"versions": versions, "cases": found}))


main()
