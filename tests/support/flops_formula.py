"""Model FLOPs of a decoder as texts write them, beside what its ops declare."""

from collections.abc import Sequence

from jaxdist.telemetry.flops import Convention


def transformer_flops_per_token(
    *,
    num_layers: int,
    d_model: int,
    d_ff: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    vocab_size: int,
    sequence_length: int,
    convention: Convention,
    gated: bool = True,
    layer_pattern: Sequence[str] = ("global",),
    window: int = 0,
    num_experts: int = 0,
    dense_layers: int = 0,
    dense_d_ff: int = 0,
) -> float:
    """Returns model FLOPs per token, forward and backward, of a decoder-only
    transformer.

    6 x (matmul parameters that a token uses, output head included) + 12 x H x N x span
    of each layer, where span is the attended length: S ("full", masked or not) or S/2
    ("causal"); W - W^2 / 2S in a "local" layer of the pattern, whose tokens see W =
    min(window, S) of them. `gated` feed-forwards have three matrices (SwiGLU) instead
    of two. With experts `d_ff` is the width of those that a token goes to, together,
    and the router is a matrix more; but `dense_layers` of them have `dense_d_ff` and no
    router. Source: Kaplan et al. 2020, PaLM appendix B (full); the causal half as in
    nanochat, Llama.

    Leaves out the embedding lookup, norms, softmax, activations, rotary embeddings,
    biases, the loss, the optimizer and all recomputation. "causal" says S/2 where the
    exact mean is (S+1)/2.
    """
    attention = 2 * d_model * (num_heads + num_kv_heads) * head_dim
    matrices, sparse_layers = 3 if gated else 2, num_layers - dense_layers
    width = sparse_layers * d_ff + dense_layers * dense_d_ff  # of all layers together
    feed_forward = d_model * (matrices * width + sparse_layers * num_experts)
    matmul_params = num_layers * attention + feed_forward + d_model * vocab_size
    W = {"local": min(window, sequence_length)}
    seen = [
        W.get(layer_pattern[i % len(layer_pattern)], sequence_length)
        for i in range(num_layers)
    ]
    causal = sum(w - w * w / (2 * sequence_length) for w in seen)
    spans = causal if convention == "causal" else num_layers * sequence_length
    return 6.0 * matmul_params + 12.0 * num_heads * head_dim * spans
