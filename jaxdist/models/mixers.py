"""Table of the mixers, by the kinds of `model.layer_pattern`.

Kinds of one class have the same parameters, and a layer reads its kind in `info.kind`.
Layers of several classes repeat as a `LayerGroup`.
"""

from typing import Literal

from jaxdist.models.attention import Attention
from jaxdist.models.latent_attention import LatentAttention
from jaxdist.models.parts import Mixer

# global: attention to all earlier tokens; local: to the last `window` of them; nope:
# global, without rotary positions; latent: to all earlier tokens, by keys and values
# that follow from a small latent
MixerKind = Literal["global", "local", "nope", "latent"]

MIXERS: dict[str, type[Mixer]] = {
    "global": Attention,
    "local": Attention,
    "nope": Attention,
    "latent": LatentAttention,
}
