"""Train a small head for speculative decoding: the model answers prompts, and the head learns to
propose what the model answers.

    python examples/train_draft_heads.py --method eagle3 medusa

The model is the default model, or --model with a GGUF file or a folder of transformers, of the
Llama form. Each head is a checkpoint that speculative_config={"method": "eagle3", "model":
"heads/eagle3"} reads. Needs transformers, safetensors and gguf. docs/draft_heads.md says how long
it takes and what it gives.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from draft_heads.modules import EagleHead, MedusaHeads, Target
from draft_heads.texts import Texts, load, write_answers
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from pegboard.config.schema import Settings
from pegboard.plan.engine_plan import resolve

WARM_UP_STEPS = 20
LEARNING_RATE = 1e-3
NOISE = 0.1
CROSS_ENTROPY = 0.1
"""Share of the cross entropy in EAGLE's loss, and range of the noise on its states, as in the
paper."""


def model_path(given: argparse.Namespace) -> Path:
    return Path(given.model) if given.model else resolve(Settings())[0].checkpoint.path


def rope_of(model: Any, length: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of all positions, [length, head size] each."""
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(length)[None])
    return cos[0].float(), sin[0].float()


def loss_of(
    head: EagleHead | MedusaHeads,
    batch: tuple[Tensor, ...],
    rope: tuple[Tensor, Tensor],
    depth: int,
) -> tuple[Tensor, list[float]]:
    """Return the loss of a batch, and for each depth of the drafts the share that is right. depth:
    how many tokens are drafted."""
    tokens, answers, tapped, final = batch
    length = tokens.shape[1] - depth - 1
    stored: list[tuple[Tensor, Tensor]] = []
    loss = torch.zeros(())
    right = []
    if isinstance(head, EagleHead):
        noise = (torch.rand_like(final) * 2 - 1) * NOISE
        given = head.start(tapped[:, :length].float(), (final + noise)[:, :length].float())
    for place in range(depth):
        following = slice(place + 1, place + 1 + length)
        is_answer = answers[:, place + 2 : place + 2 + length] & answers[:, 1 : 1 + length]
        wanted_states = final[:, following][is_answer].float()
        if isinstance(head, EagleHead):
            turned = (rope[0][place : place + length], rope[1][place : place + length])
            given = head(given, tokens[:, following], stored, turned)
            logits = head.logits(given[is_answer])
        else:
            logits = head.logits(final[:, :length][is_answer].float(), place)
        wanted = head.target.logits(wanted_states).float()
        crossed = functional.cross_entropy(logits.float(), wanted.softmax(-1))
        if isinstance(head, EagleHead) and not head.is_third:
            apart = functional.smooth_l1_loss(given[is_answer].float(), wanted_states)
            loss = loss + apart + CROSS_ENTROPY * crossed
        else:
            loss = loss + 0.8**place * crossed
        following_tokens = tokens[:, place + 2 : place + 2 + length][is_answer]
        proposed = head.target.kept[logits.argmax(-1)]
        right.append((proposed == following_tokens).float().mean().item())
    return loss, right


def train(head: EagleHead | MedusaHeads, texts: Texts, given: argparse.Namespace) -> None:
    """Train on all batches but the last twentieth, which measures."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(texts.batches), generator=generator).tolist()
    count = max(1, len(order) // 20)
    measured, order = order[:count], order[count:]
    rope = rope_of(texts.model, max(batch[0].shape[1] for batch in texts.batches))
    optimizer = torch.optim.AdamW(head.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    num_steps = given.steps or given.epochs * len(order)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / WARM_UP_STEPS, 1.02 - step / num_steps),
    )
    begin = time.monotonic()
    for step in range(num_steps):
        number = order[int(torch.randint(len(order), (), generator=generator))]
        with torch.autocast("cpu", torch.bfloat16):
            loss, right = loss_of(head, texts.batches[number], rope, given.depth)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0 or step == num_steps - 1:
            shares = " ".join(f"{share:.2f}" for share in right)
            print(
                f"step {step}, {time.monotonic() - begin:.0f} s: loss {loss:.3f}, right {shares}",
                flush=True,
            )
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        parts = [loss_of(head, texts.batches[number], rope, given.depth)[1] for number in measured]
    shares = " ".join(f"{sum(one) / len(one):.2f}" for one in zip(*parts, strict=True))
    print(f"right on texts that were not trained on: {shares}")


def save(
    head: EagleHead | MedusaHeads, method: str, given: argparse.Namespace, taps: tuple[int, ...]
) -> None:
    """Write the checkpoint that the draft plugins read."""
    rows = len(head.target.kept)
    config = json.loads(head.target.config.to_json_string(use_diff=False))
    for name in ("quantization_config", "layer_types"):
        config.pop(name, None)
    config["num_hidden_layers"] = 1
    if method == "medusa":
        config |= {"num_heads": given.depth, "truncated_vocab_size": rows, "original_lm_head": True}
    if method == "eagle3":
        config["draft_vocab_size"] = rows
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(taps)}
    folder = given.output / method
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous() if tensor.is_floating_point() else tensor
        for name, tensor in head.checkpoint().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--method", choices=("eagle", "eagle3", "medusa"), nargs="+", default=["eagle3"]
    )
    parser.add_argument("--model", help="GGUF file or folder; without it, the default model")
    parser.add_argument(
        "--output", type=Path, default=Path("heads"), help="each head is a folder in it"
    )
    parser.add_argument(
        "--answers",
        type=Path,
        default=Path("heads/answers.json"),
        help="the model's answers; they are read if the file exists, or else written",
    )
    parser.add_argument("--prompts", type=int, default=756, help="most prompts")
    parser.add_argument("--answer-tokens", type=int, default=192, help="longest answer")
    parser.add_argument("--vocabulary", type=int, default=8192, help="tokens that are proposed")
    parser.add_argument("--depth", type=int, default=3, help="drafts that are trained together")
    parser.add_argument("--batch", type=int, default=8, help="answers in a batch")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, help="instead of epochs")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    torch.manual_seed(0)
    path = model_path(given)
    if not given.answers.is_file():
        write_answers(given, path)
    pairs = json.loads(given.answers.read_text("utf-8"))
    model = load(path)
    depth = model.config.num_hidden_layers
    taps = (depth // 3, 2 * depth // 3, depth)
    begin = time.monotonic()
    texts = Texts(model, pairs, taps, given.batch)
    num_tokens = sum(batch[1].sum().item() for batch in texts.batches)
    print(f"{num_tokens} tokens of answers, states in {time.monotonic() - begin:.0f} s", flush=True)
    counts = Counter(token for _, answer in pairs for token in answer)
    counts.update(range(min(given.vocabulary, model.config.vocab_size)))
    most = sorted(token for token, _ in counts.most_common(given.vocabulary))
    target = Target(model, torch.tensor(most))
    for method in given.method:
        head: EagleHead | MedusaHeads
        if method == "medusa":
            head = MedusaHeads(target, given.depth)
        else:
            head = EagleHead(target, len(taps), method == "eagle3")
        train(head, texts, given)
        save(head, method, given, taps)


if __name__ == "__main__":
    main()
