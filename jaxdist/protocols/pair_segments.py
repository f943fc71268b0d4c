"""The numbering of pairs in a row, which data and objectives share.

The chosen half of the i-th pair of a row, from 1, is segment 2 i - 1, and the rejected
half is segment 2 i.
"""

# Largest number of pairs in a row. It bounds the size of sums for each pair, [batch,
# pairs], which have a static shape on devices. Pairs of less than S / 64 predictions
# are rare.
PAIRS_PER_ROW = 64
