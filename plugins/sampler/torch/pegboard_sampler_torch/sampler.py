"""Sampler `torch`: the pipeline from logits to token ids.

State is in `rows` (arrays), `penalties` and `edits` (only for the rows that use them). The
arithmetic is in `choose`. A step combines the feature bits of its rows and skips what none of them
uses, so a step of greedy rows costs only an argmax.

If a row's logits leave nothing to draw from (all −inf, or NaN), it gets its argmax, which is id 0
if all are −inf. The sampler never raises because of what a model or a mask produces.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pegboard.data.batch import Logprobs, TokenMasks
from pegboard.data.sampling_params import SamplingParams
from pegboard.interfaces.sampler import Sampled, SamplerSetup, SampleStep
from pegboard.ops.sampling import sample_tokens
from pegboard_sampler_torch.choose import (
    Cuts,
    accept_equal,
    accept_on_host,
    apply_token_mask,
    argmax,
    draw,
    weigh,
)
from pegboard_sampler_torch.edits import Edits, apply_edits
from pegboard_sampler_torch.logprobs import find_logprobs, gather_logprobs
from pegboard_sampler_torch.penalties import PenaltyTable
from pegboard_sampler_torch.processors import ProcessorChain
from pegboard_sampler_torch.random import SeededUniforms
from pegboard_sampler_torch.rows import (
    CUTS,
    FREQUENCY,
    MIN_P,
    NEEDS_HISTORY,
    PRESENCE,
    REPETITION,
    TEMPERATURE,
    TOP_P,
    Feature,
    Rows,
)
from pegboard_sampler_torch.step import StepLayout
from pegboard_sampler_torch.upload import Upload

SCORE_ROWS = 256
"""Prompt logprobs are computed for this number of positions at a time, which bounds the temporary
memory for a long chunk."""


class TorchSampler:
    """Implements `pegboard.interfaces.sampler.Sampler`.

    The random numbers of a row with a seed are a function of (seed, output position). All other
    rows share one generator, which starts from `setup.seed` and is used in the order of steps and
    rows.
    """

    def __init__(self, options: None, setup: SamplerSetup) -> None:
        self.setup = setup
        self.device = torch.device(setup.device)
        self.is_host = self.device.type == "cpu"
        self.upload = Upload(setup.device, setup.copies)
        self.rows = Rows(setup.limits.max_num_seqs, setup.limits.vocab_size, self.upload)
        self.penalties = PenaltyTable(setup.limits.vocab_size, self.upload)
        self.edits: dict[int, Edits] = {}
        self.processors = ProcessorChain(setup.processors)
        self.seeded = SeededUniforms(setup.limits.max_num_seqs)
        self.generator = np.random.default_rng(setup.seed % 2**64)
        self._open: Callable[[], None] | None = None
        """Adds the tokens of the last step to the history, if that would have waited for them."""
        self.raw_logprobs = setup.logprobs_mode.startswith("raw")
        self.normalize = setup.logprobs_mode.endswith("logprobs")
        kernel = setup.kernels.get("sample_tokens")
        # the reference sorts twice; `choose` is faster
        self.kernel = None if kernel is sample_tokens else kernel

    @torch.inference_mode()
    def add(
        self,
        row: int,
        params: SamplingParams,
        seed: int | None,
        token_ids: np.ndarray,
        num_prompt_tokens: int,
    ) -> None:
        """See `Sampler.add`. If the row is still in use, it is replaced."""
        self._settle()
        self.remove(np.array([row]))
        prompt = token_ids[:num_prompt_tokens]
        outputs = token_ids[num_prompt_tokens:]
        features = self.rows.add(row, params, seed, len(outputs))
        if features & Feature.PENALTIES:
            self.penalties.add(
                row, prompt if params.repetition_penalty != 1 else prompt[:0], outputs
            )
        edits = Edits.of(params, outputs, self.setup.limits.vocab_size, self.upload)
        if edits is not None:
            self.edits[row] = edits
            self.rows.flags[row] |= Feature.EDITS | (Feature.WORDS if edits.words else 0)
        self.processors.add(row, params, prompt, outputs)

    def remove(self, rows: np.ndarray) -> None:
        """See `Sampler.remove`."""
        self._settle()
        for row in rows.tolist():
            self.rows.flags[row] = 0
            self.penalties.remove(row)
            self.edits.pop(row, None)
            self.processors.remove(row)

    @torch.inference_mode()
    def sample(self, logits: Tensor, step: SampleStep) -> Sampled:
        """See `Sampler.sample`. Overwrites `logits`."""
        self._settle()
        if self._is_plain_greedy(step, logits):
            best = (self.kernel or argmax)(
                logits if logits.dtype is torch.float32 else logits.float()
            )
            token_ids = best.unsqueeze(-1)
            counts = torch.ones_like(best)
            if step.draft_token_ids is not None:
                token_ids, counts = accept_on_host(best, step.draft_token_ids, step.offsets)
            self.rows.num_outputs[step.rows] += counts.numpy() if self.is_host else 1
            return Sampled(token_ids, counts, None)
        layout = StepLayout(step, self.rows, logits.device)
        self.processors.flush()
        logits = logits.float().contiguous()
        if step.masks is not None and len(step.masks.rows):
            self._apply_masks(logits, step.masks, layout)
        asked = layout.places(Feature.LOGPROBS) if layout.present & Feature.LOGPROBS else None
        scores = (
            self._keep_raw(logits, asked, layout)
            if asked is not None and self.raw_logprobs
            else None
        )
        logits = self._shape(logits, layout)
        tokens, token_ids, counts = self._choose(logits, layout)
        if asked is not None and scores is None:
            scores = logits[layout.to_device(asked)]
        logprobs = None
        if asked is not None and scores is not None:
            logprobs = self._logprobs(scores, asked, token_ids, counts, layout)
        self._commit(token_ids, counts, layout)
        return Sampled(token_ids, counts, logprobs)

    def _is_plain_greedy(self, step: SampleStep, logits: Tensor) -> bool:
        """True in the common case that every row needs only its most likely token. No layout is
        needed then."""
        has_drafts = len(logits) != len(step.rows)
        if step.masks is not None or (has_drafts and not self.is_host) or self.processors.all:
            return False
        return not self.rows.flags[step.rows].any()

    @torch.inference_mode()
    def score(self, logits: Tensor, targets: Tensor, top: int) -> Logprobs:
        """See `Sampler.score`. The results are always normalized. Targets outside the vocabulary
        count as id 0."""
        targets = targets.to(logits.device, torch.int64)
        targets = torch.where((targets < 0) | (targets >= logits.shape[-1]), 0, targets)
        chunks = zip(torch.split(logits, SCORE_ROWS), torch.split(targets, SCORE_ROWS), strict=True)
        return Logprobs.concat(
            [gather_logprobs(x.float(), chosen, top, normalize=True) for x, chosen in chunks]
        )

    def _apply_masks(self, logits: Tensor, masks: TokenMasks, layout: StepLayout) -> None:
        """Apply the token masks. Masks for rows or depths that are not in this step are ignored."""
        index_of = np.full(self.setup.limits.max_num_seqs, -1)
        index_of[layout.rows] = np.arange(len(layout.rows))
        index = index_of[masks.rows]
        places = layout.offsets[index] + masks.depths
        used = (index >= 0) & (places < layout.offsets[index + 1])
        bits = masks.bits[used]
        places = places[used]
        where = layout.to_device(places)
        if logits.device.type != "cpu":
            logits[where] = apply_token_mask(logits[where], layout.to_device(bits.view(np.int32)))
            return
        unpacked = np.unpackbits(
            ~bits.view(np.uint8), axis=1, count=logits.shape[-1], bitorder="little"
        )
        forbidden = torch.from_numpy(unpacked.view(np.bool_))
        if len(places) == len(logits) and (np.diff(places) == 1).all():  # all rows: no copy
            logits.masked_fill_(forbidden, float("-inf"))
        else:
            logits[where] = logits[where].masked_fill_(forbidden, float("-inf"))

    def _keep_raw(self, logits: Tensor, asked: np.ndarray, layout: StepLayout) -> Tensor:
        """Return the logits of the rows that asked for raw values: a copy, if the next stages
        change them."""
        untouched = (
            not layout.present & (Feature.SAMPLED | Feature.PENALTIES | Feature.EDITS)
            and not self.processors.all
        )
        if untouched and len(asked) == len(logits):
            return logits
        return logits[layout.to_device(asked)]

    def _shape(self, logits: Tensor, layout: StepLayout) -> Tensor:
        """Apply all changes that can change which token is the most likely one."""
        if layout.present & Feature.EDITS:
            places = layout.places(Feature.EDITS)
            rows = layout.row_of[places]
            numbers = (places, rows, self.rows.num_outputs[rows], layout.depth[places])
            edited = [
                (place, self.edits[row], num_outputs, depth)
                for place, row, num_outputs, depth in zip(
                    *(each.tolist() for each in numbers), strict=True
                )
            ]
            apply_edits(logits, edited, lambda: layout.drafts_before, self.upload)
        if self.processors.changing:
            chain = self.processors.changing
            logits = self.processors.apply(
                chain, logits, layout.row_tensor, layout.depth_tensor, layout.host_drafts_before
            )
        if layout.present & Feature.PENALTIES:
            places = layout.places(Feature.PENALTIES)
            rows = layout.row_of[places]
            where = layout.to_device(places)
            index = layout.to_device(rows)
            parameters = torch.stack(
                [self.rows.of(name, index) for name in (REPETITION, FREQUENCY, PRESENCE)]
            )
            drafts_before = layout.drafts_before[where] if layout.has_drafts else None
            self.penalties.apply(logits, where, rows.tolist(), parameters, drafts_before)
        return logits

    def _choose(self, logits: Tensor, layout: StepLayout) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens drawn at every logits row [N], the accepted token_ids [B, 1 + D] and
        counts [B]. Unless processed logprobs are needed, the logits are invalid afterwards."""
        sampled = (
            layout.places(Feature.SAMPLED) if layout.present & Feature.SAMPLED else layout.rows[:0]
        )
        uniforms = self._uniforms(sampled, layout)
        if self._draws_by_kernel:
            # also rows with a seed whose neighbors have drafts that were drawn
            tokens = self._draw_by_kernel(logits, sampled, uniforms, layout)
            verified = np.flatnonzero((layout.flags[sampled] & Feature.SEED) == 0)
            if layout.draft_probs is not None and len(verified):
                places = sampled[verified]
                where = layout.to_device(places)
                numbers = uniforms[layout.to_device(verified)]
                tokens[where] = self._draw(logits[where], places, numbers, layout)
        elif len(sampled) == layout.num_places > 0:
            tokens = self._draw(logits, sampled, uniforms, layout)
        else:
            tokens = argmax(logits)
            if len(sampled):
                where = layout.to_device(sampled)
                subset = logits[where]
                tokens[where] = self._draw(subset, sampled, uniforms, layout)
                if not self.raw_logprobs:
                    logits[where] = subset
        if not layout.has_drafts:
            return tokens, tokens.unsqueeze(-1), torch.ones_like(tokens)
        if self.is_host:
            return tokens, *accept_on_host(tokens, layout.flat_drafts, layout.offsets)
        return tokens, *accept_equal(tokens, layout.drafts, layout.offsets_tensor)

    @property
    def _draws_by_kernel(self) -> bool:
        """True if there is a kernel, and nothing reads the logits between temperature and the draw,
        or after it, in any step."""
        return self.kernel is not None and self.raw_logprobs and not self.processors.invariant

    def _draw_by_kernel(
        self, logits: Tensor, sampled: np.ndarray, uniforms: Tensor, layout: StepLayout
    ) -> Tensor:
        """Choose the tokens of all logits rows with the op `sample_tokens`. The rows in `sampled`
        are drawn at random."""
        assert self.kernel is not None, "the caller has checked that there is a kernel"
        if not len(sampled):
            return self.kernel(logits)
        present = layout.present
        index = layout.to_device(layout.row_of)
        if len(sampled) == len(logits):
            temperature = self.rows.of(TEMPERATURE, index)
            numbers = uniforms
        else:
            where = layout.to_device(sampled)
            temperature = logits.new_zeros(len(logits))
            numbers = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
            temperature[where] = self.rows.of(TEMPERATURE, index[where])
            numbers[where] = uniforms
        return self.kernel(
            logits,
            numbers,
            temperature,
            self.rows.of(MIN_P, index) if present & Feature.MIN_P else None,
            layout.to_device(self.rows.top_k[layout.row_of]) if present & Feature.TOP_K else None,
            self.rows.of(TOP_P, index) if present & Feature.TOP_P else None,
        )

    def _draw(self, x: Tensor, places: np.ndarray, uniforms: Tensor, layout: StepLayout) -> Tensor:
        """Draw tokens [n]. x [n, V]: the logits of `places`, all of which are sampled. If logprobs
        need the processed logits, x holds them afterwards."""
        rows = layout.row_of[places]
        present = layout.present
        index = layout.to_device(rows)
        if present & Feature.TEMPERATURE:
            x.div_(self.rows.of(TEMPERATURE, index).unsqueeze(-1))
        min_p = self.rows.of(MIN_P, index) if present & Feature.MIN_P else None
        if self.processors.invariant:
            if min_p is not None:
                x.masked_fill_(
                    x < x.amax(-1, keepdim=True) + min_p.log().unsqueeze(-1), float("-inf")
                )
                min_p = None
            depth = layout.to_device(layout.depth[places])
            drafts = partial(layout.host_drafts_before, places)
            x.copy_(self.processors.apply(self.processors.invariant, x, index, depth, drafts))
        cuts = self._cuts(rows, index, present, min_p, x.shape[-1])
        best = argmax(x)
        weights, floor = weigh(
            x, x.gather(-1, best.unsqueeze(-1)), cuts, has_holes=layout.has_holes
        )
        accepted = None
        if layout.draft_probs is not None:
            accepted = self._verify(weights, places, layout, layout.draft_probs)
        tokens, failed = draw(weights, uniforms)
        if floor is not None and not self.raw_logprobs:
            x.masked_fill_(x < floor, float("-inf"))
        tokens = torch.where(failed, best, tokens)
        if accepted is not None:
            tokens[accepted[0]] = torch.where(accepted[1], accepted[2], tokens[accepted[0]])
        return tokens

    def _cuts(
        self, rows: np.ndarray, index: Tensor, present: int, min_p: Tensor | None, size: int
    ) -> Cuts:
        """Return which tokens of a vocabulary are left out, for rows [n] with these features.
        index: the rows, on the device."""
        if not present & CUTS:
            return Cuts(min_p=min_p)
        top_k = self.rows.top_k[rows]
        return Cuts(
            min_p=min_p,
            top_k=self.upload(top_k) if present & Feature.TOP_K else None,
            max_k=int(np.max(top_k, where=top_k < size, initial=0)),
            top_p=self.rows.of(TOP_P, index) if present & Feature.TOP_P else None,
            all_k=bool((top_k < size).all()),
            all_p=bool((self.rows.flags[rows] & Feature.TOP_P).all()),
        )

    def _verify(
        self, weights: Tensor, places: np.ndarray, layout: StepLayout, draft_probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Verify drafts that were drawn at random (Leviathan, Kalman, Matias 2023; Chen et al.
        2023, "Accelerating large language model decoding with speculative sampling"). A draft x
        is accepted with probability min(1, p(x) / q(x)); otherwise the token is drawn from
        max(0, p − q), in which x has no weight. weights [n, V]: of p at the logits rows `places`;
        those of drafts are changed. Returns the index [m] of these rows, which drafts are accepted
        [m], and the drafts [m]."""
        is_draft = layout.depth[places] < np.diff(layout.offsets)[layout.owner[places]] - 1
        chosen = np.flatnonzero(is_draft & ((layout.flags[places] & Feature.SEED) == 0))
        if not len(chosen):
            return None
        of_drafts = places[chosen] - layout.owner[places[chosen]]
        index = layout.to_device(chosen)
        drafts_index = layout.to_device(of_drafts)
        drafts = layout.flat_drafts[drafts_index]
        q = draft_probs[drafts_index]
        p = weights[index]
        p = p / p.sum(-1, keepdim=True)
        uniforms = layout.to_device(self.generator.random(len(chosen)))
        of_p, of_q = (each.gather(-1, drafts.unsqueeze(-1)).squeeze(-1) for each in (p, q))
        weights[index] = (p - q).clamp_(min=0)
        return index, (uniforms * of_q < of_p) & (of_q > 0), drafts

    @torch.inference_mode()
    def draw_drafts(self, logits: Tensor, rows: np.ndarray) -> tuple[Tensor, Tensor | None]:
        """See `DrawsDrafts.draw_drafts`. Temperature and the cuts (top_k, top_p, min_p) shape the
        draft's distribution. What else changes logits is applied when the draft is verified."""
        tokens = argmax(logits)
        flags = self.rows.flags[rows]
        drawn = np.flatnonzero((flags & (Feature.SAMPLED | Feature.SEED)) == Feature.SAMPLED)
        if not len(drawn):
            return tokens, None
        rows = rows[drawn]
        where = self.upload(drawn)
        index = self.upload(rows)
        x = logits[where].float()
        x.div_(self.rows.of(TEMPERATURE, index).unsqueeze(-1))
        present = int(np.bitwise_or.reduce(flags[drawn]))
        min_p = self.rows.of(MIN_P, index) if present & Feature.MIN_P else None
        cuts = self._cuts(rows, index, present, min_p, x.shape[-1])
        best = tokens[where].unsqueeze(-1)
        weights, _ = weigh(x, x.gather(-1, best), cuts)
        ids, failed = draw(weights, self.upload(self.generator.random(len(drawn))))
        tokens[where] = torch.where(failed, best.squeeze(-1), ids)
        probs = torch.zeros_like(logits, dtype=torch.float32)
        shares = weights / weights.sum(-1, keepdim=True)
        probs[where] = shares.masked_fill_(failed.unsqueeze(-1), 0.0)
        return tokens, probs

    def _uniforms(self, places: np.ndarray, layout: StepLayout) -> Tensor:
        """Return random numbers for the logits rows `places`: float64 [n] in [0, 1), on the
        device."""
        numbers = np.empty(len(places))
        seeded = (layout.flags[places] & Feature.SEED) != 0
        if seeded.any():
            rows = layout.row_of[places[seeded]]
            positions = self.rows.num_outputs[rows] + layout.depth[places[seeded]]
            numbers[seeded] = self.seeded.of(rows, self.rows.seeds[rows], positions)
        if not seeded.all():
            numbers[~seeded] = self.generator.random(int((~seeded).sum()))
        return layout.to_device(numbers)

    def _logprobs(
        self,
        scores: Tensor,
        asked: np.ndarray,
        token_ids: Tensor,
        counts: Tensor,
        layout: StepLayout,
    ) -> Callable[[], list[Logprobs | None]]:
        """Return what waits for the logprobs of each row. scores: [n, V], of the logits rows
        `asked`. Rows that want the whole vocabulary are computed separately."""
        owner = layout.owner[asked]
        depth = layout.depth[asked]
        where = layout.to_device(np.stack([owner, depth]))
        # −1 after a rejected draft; such places are removed below
        chosen = token_ids[where[0], where[1]].clamp(min=0)
        num_logprobs = self.rows.num_logprobs[layout.row_of[asked]]
        parts = []
        for whole in (False, True):
            part = np.flatnonzero((num_logprobs < 0) == whole)
            if not len(part):
                continue
            index = layout.to_device(part)
            subset, subset_chosen = (
                (scores, chosen) if len(part) == len(asked) else (scores[index], chosen[index])
            )
            most = int(num_logprobs[part].max())
            tensors = find_logprobs(subset, subset_chosen, most, normalize=self.normalize)
            parts.append((part, [self._downloaded(tensor) for tensor in tensors]))
        wait_for_counts = self._downloaded(counts)

        def finish() -> list[Logprobs | None]:
            counts_cpu = wait_for_counts().numpy()
            result: list[Logprobs | None] = [None] * len(layout.rows)
            for part, waits in parts:
                ids, values, ranks = (wait().numpy() for wait in waits)
                places = zip(owner[part].tolist(), depth[part].tolist(), strict=True)
                for i, (b, d) in enumerate(places):
                    if d == 0:
                        k = int(num_logprobs[part[i]])
                        rows = slice(i, i + int(counts_cpu[b]))
                        columns = slice(None if k < 0 else 1 + k)
                        result[b] = Logprobs(ids[rows, columns], values[rows, columns], ranks[rows])
            return result

        return finish

    def _downloaded(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return what waits for the copy of a tensor on the host."""
        copies = self.setup.copies
        return (lambda: tensor) if copies is None else copies.download(tensor)

    def _settle(self) -> None:
        """Finish the commit of the last step."""
        if self._open is not None:
            self._open()
            self._open = None

    def _commit(self, token_ids: Tensor, counts: Tensor, layout: StepLayout) -> None:
        """Add the accepted tokens to the rows' history. They are copied to the host only for rows
        that need their earlier tokens. On a device with separate memory, the host reads them before
        it samples the next step, while the device computes that step's forward."""
        needs_host = self.processors.listening or (
            layout.present & (NEEDS_HISTORY if layout.has_drafts else Feature.WORDS)
        )
        if self.setup.copies is None or not needs_host:
            self._append(token_ids, counts, layout)
            return
        waits = [self._downloaded(each) for each in (token_ids, counts)]

        def append() -> None:
            on_host, counts_on_host = (wait() for wait in waits)
            self._append(token_ids, counts_on_host, layout, on_host)

        self._open = append

    def _append(
        self,
        token_ids: Tensor,
        counts: Tensor,
        layout: StepLayout,
        on_host: Tensor | None = None,
    ) -> None:
        """Add the accepted tokens. on_host: the host's copy of them, if there is one."""
        present = layout.present
        history = self.rows.num_outputs
        if not layout.has_drafts:
            history[layout.rows] += 1
            if present & Feature.PENALTIES:
                which = layout.places(Feature.PENALTIES)
                self.penalties.append(
                    layout.rows[which].tolist(), token_ids[layout.to_device(which), 0]
                )
        elif present & NEEDS_HISTORY:
            counts_cpu = counts.cpu().numpy()
            history[layout.rows] += counts_cpu
            if present & Feature.PENALTIES:
                users = (self.rows.flags[layout.rows] & Feature.PENALTIES) != 0
                for column in range(int(counts_cpu.max())):
                    which = np.flatnonzero(users & (counts_cpu > column))
                    if len(which):
                        self.penalties.append(
                            layout.rows[which].tolist(), token_ids[layout.to_device(which), column]
                        )
        if present & Feature.EDITS:
            self._commit_edits(token_ids if on_host is None else on_host, counts, layout)
        self.processors.extend(layout.rows, token_ids if on_host is None else on_host, counts)

    def _commit_edits(self, token_ids: Tensor, counts: Tensor, layout: StepLayout) -> None:
        tokens = counts_list = None
        for i, row in enumerate(layout.rows.tolist()):
            edits = self.edits.get(row)
            if edits is None:
                continue
            if edits.words:
                if tokens is None or counts_list is None:
                    tokens = token_ids.tolist()
                    counts_list = counts.tolist()
                edits.outputs += tokens[i][: counts_list[i]]
            if edits.is_done(int(self.rows.num_outputs[row])):
                del self.edits[row]
                self.rows.flags[row] &= ~Feature.EDITS
