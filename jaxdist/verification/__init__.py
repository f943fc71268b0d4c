"""Proof that a config's layouts compute the same as one device, by running both.

The config is shrunk to tiny sizes but keeps its variants (`cases`). One device computes
the reference: a loss, its gradients, and the parameters after one update. Each layout
runs the same step on the same batch, built by the same `build_step` as training
(`runner`). The differences must stay within bands (`comparison`).
"""
