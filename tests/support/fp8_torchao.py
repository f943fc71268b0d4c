"""Writes tests/data/fp8/torchao.npz: products of torchao's `Float8Linear`, by its own
emulation.

    python tests/support/fp8_torchao.py FILE          # torch and torchao; 0.18 made the
    file that is there

A linear layer of 64 inputs and 96 outputs on 32 rows, one of zeros, in bfloat16: x, w,
dy, and of each recipe y, dx and dw, as bits. Scales are rounded to powers of two;
torchao's own tensorwise recipe does not do that.
"""

import dataclasses
import sys

import numpy as np

M, K, N = 32, 64, 96
RECIPES = ("rowwise", "rowwise_with_gw_hp", "tensorwise")


def vectors() -> dict[str, np.ndarray]:
    """Returns inputs, and results by recipe, as the bits of bfloat16."""
    import torch
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    random = np.random.default_rng(0)

    def drawn(*dims: int, scale: float = 1.0):
        return torch.tensor(scale * random.normal(size=dims), dtype=torch.float32).to(
            torch.bfloat16
        )

    def as_bits(x) -> np.ndarray:
        return x.detach().contiguous().view(torch.int16).numpy()

    x, w, dy = drawn(M, K), drawn(K, N, scale=K**-0.5), drawn(M, N, scale=1e-3)
    x[3], dy[5] = 0, 0
    rows = {"x": as_bits(x), "w": as_bits(w), "dy": as_bits(dy)}
    for recipe in RECIPES:
        config = Float8LinearConfig.from_recipe_name(recipe)
        config = dataclasses.replace(
            config, emulate=True, round_scales_to_power_of_2=True
        )
        plain = torch.nn.Linear(K, N, bias=False, dtype=torch.bfloat16)
        plain.weight = torch.nn.Parameter(w.t().contiguous())
        layer, leaf = Float8Linear.from_float(plain, config), x.clone().requires_grad_()
        y = layer(leaf)
        y.backward(dy)
        results = {"y": y, "dx": leaf.grad, "dw": layer.weight.grad.t()}
        rows |= {f"{recipe}/{name}": as_bits(value) for name, value in results.items()}
    return rows


if __name__ == "__main__":
    np.savez_compressed(sys.argv[1], **vectors())
