"""How similar two texts are, by what a model made of them."""

from __future__ import annotations

from typing import Any


def similarity(first: Any, second: Any) -> float:
    """Return the cosine of the angle between two vectors [size]; 0 if one of them is zero. Of two
    matrices [tokens, size], it is the sum of each row's best product with a row of the second
    (Khattab and Zaharia 2020); 0 if one of them has no rows. Both are arrays or tensors."""
    import numpy as np

    first = np.asarray(first, np.float64)
    second = np.asarray(second, np.float64)
    products = first @ second.T
    if first.ndim == 2:
        return float(products.max(1).sum()) if products.size else 0.0
    lengths = float(np.linalg.norm(first)) * float(np.linalg.norm(second))
    return float(products) / lengths if lengths else 0.0
