"""What the sampler knows about each row: its parameters in arrays that are indexed by row, and
feature bits, which let a step skip everything that none of its rows uses."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pegboard.data.sampling_params import SamplingParams
from pegboard_sampler_torch.upload import Upload


class Feature:
    """The features that a row uses, as bits of an int. A row without any bit is greedy and needs
    nothing else. This is not an `IntFlag`, because a step checks a dozen bits and each `IntFlag`
    operation costs a microsecond."""

    SAMPLED = 1
    TEMPERATURE = 2
    TOP_K = 4
    TOP_P = 8
    MIN_P = 16
    SEED = 32
    LOGPROBS = 64
    PENALTIES = 128
    EDITS = 256
    WORDS = 512
    """Edits that depend on the tokens before."""


CUTS = Feature.TOP_K | Feature.TOP_P | Feature.MIN_P
NEEDS_HISTORY = Feature.SEED | Feature.PENALTIES | Feature.EDITS

TEMPERATURE, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE = range(6)


class Rows:
    """Arrays over rows 0 … max_num_seqs − 1.

    flags: int32, the `Feature` bits; 0 for a free row. values: float32 [6, R] on the device, with
    the parameters named above. upload: copies arrays to the device. top_k, num_logprobs (−1 = whole
    vocabulary), seeds, num_outputs: int64, on the host.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, upload: Upload) -> None:
        self.vocab_size = vocab_size
        self.upload = upload
        self.flags = np.zeros(max_num_seqs, np.int32)
        self.values = torch.zeros(6, max_num_seqs, device=upload.device)
        self.top_k = np.zeros(max_num_seqs, np.int64)
        self.num_logprobs = np.zeros(max_num_seqs, np.int64)
        self.seeds = np.zeros(max_num_seqs, np.int64)
        self.num_outputs = np.zeros(max_num_seqs, np.int64)

    def add(self, row: int, params: SamplingParams, seed: int | None, num_outputs: int) -> int:
        """Fill `row` and return its features, except EDITS, which the caller sets."""
        features = 0
        if not params.is_greedy:
            features |= Feature.SAMPLED
            features |= Feature.TEMPERATURE if params.temperature != 1 else 0
            features |= Feature.TOP_K if 0 < params.top_k < self.vocab_size else 0
            features |= Feature.TOP_P if params.top_p < 1 else 0
            features |= Feature.MIN_P if params.min_p > 0 else 0
            features |= Feature.SEED if seed is not None else 0
        if params.logprobs is not None:
            features |= Feature.LOGPROBS
        if (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (
            1,
            0,
            0,
        ):
            features |= Feature.PENALTIES
        self.flags[row] = features
        self.top_k[row] = params.top_k if features & Feature.TOP_K else self.vocab_size
        self.num_logprobs[row] = 0 if params.logprobs is None else params.logprobs
        self.seeds[row] = 0 if seed is None else seed
        self.num_outputs[row] = num_outputs
        penalties = [params.repetition_penalty, params.frequency_penalty, params.presence_penalty]
        values = [params.temperature, params.top_p, params.min_p, *penalties]
        self.values[:, row] = self.upload(np.array(values, np.float32))
        return features

    def of(self, name: int, rows: Tensor) -> Tensor:
        """Return parameter `name` of `rows` (int64 on the device) as float32 [n]."""
        return self.values[name].index_select(0, rows)
