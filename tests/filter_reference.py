"""What top_k, top_p and min_p leave over, in plain numpy and float64, one row at a time."""

import numpy as np

# Relative to the mass of all survivors: so near to top_p float32 may draw the line one token earlier or later.
ROUNDING = 1e-5


def reference_survivors(
    logits: list[float] | np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[set[int], set[int]]:
    """(ids that survive for certain, ids that may): they differ where top_p is reached up to rounding."""
    logits = np.asarray(logits, dtype=np.float64)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    best = logits[order[0]]
    if temperature == 0:
        return {order[0]}, {order[0]}
    if min_p > 0:
        order = [
            i for i in order if logits[i] >= np.float32(best) + np.float32(temperature) * np.float32(np.log(min_p))
        ]
    if top_k > 0:
        order = order[:top_k]
    certain = possible = len(order)
    if top_p < 1:
        masses = np.exp((logits[order] - best) / temperature)
        before = np.cumsum(masses) - masses
        share = before / masses.sum()
        certain = max(int((share < np.float32(top_p) - ROUNDING).sum()), 1)
        possible = max(int((share < np.float32(top_p) + ROUNDING).sum()), 1)
    return set(order[:certain]), set(order[:possible])
