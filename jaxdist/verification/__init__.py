"""Proof that a config's layouts compute what one device computes, by running both.

The config is shrunk to tiny sizes, its variants kept (`cases`). One device gives the
reference: a loss, its gradients, and the parameters after one update. Every layout does
the same step on the same batch, through the same `build_step` as training (`runner`),
and the differences must stay within bands (`comparison`).
"""
