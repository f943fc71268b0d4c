"""Table of the channels, by the kinds of `model.feed_forward_pattern`."""

from typing import Literal

from jaxdist.models.experts import Experts
from jaxdist.models.feed_forward import FeedForward
from jaxdist.models.parts import Channel

# dense: one feed-forward part of width d_ff; sparse: experts
ChannelKind = Literal["dense", "sparse"]

CHANNELS: dict[str, type[Channel]] = {
    "dense": FeedForward,
    "sparse": Experts,
}
