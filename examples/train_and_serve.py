"""A trainer and an engine in one process. The engine writes answers, the trainer learns from the
best ones, and the engine takes the trainer's weights. The task is small: answers should consist of
even tokens.

Needs transformers. The model is tiny and starts with random weights.
"""

import tempfile

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from pegboard import LLM, SamplingParams

NUM_ROUNDS = 8
NUM_ANSWERS = 16
NUM_BEST = 4
LENGTH = 12


def reward(answer: list[int]) -> float:
    return sum(token % 2 == 0 for token in answer) / len(answer)


def train(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, sequences: list[list[int]]
) -> None:
    """One step on the answers, which follow a prompt of one token."""
    batch = torch.tensor(sequences)
    optimizer.zero_grad()
    logits = model(batch[:, :-1]).logits
    cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
    optimizer.step()


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    prompts = [{"prompt_token_ids": [token]} for token in range(3, 11)]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with LLM(
            folder, dtype="float32", skip_tokenizer_init=True, kv_cache_memory_bytes=16 << 20
        ) as llm:
            for number in range(NUM_ROUNDS):
                params = SamplingParams(
                    n=NUM_ANSWERS, max_tokens=LENGTH, ignore_eos=True, detokenize=False, seed=number
                )
                best = []
                rewards = []
                for prompt, output in zip(
                    prompts, llm.generate(prompts, params, use_tqdm=False), strict=True
                ):
                    answers = sorted(
                        (list(one.token_ids) for one in output.outputs), key=reward, reverse=True
                    )
                    rewards += [reward(answer) for answer in answers]
                    best += [
                        [*prompt["prompt_token_ids"], *answer] for answer in answers[:NUM_BEST]
                    ]
                print(f"round {number}: mean reward {sum(rewards) / len(rewards):.2f}")
                for _ in range(4):
                    train(model, optimizer, best)
                model.save_pretrained(folder)
                llm.update_weights(folder)


if __name__ == "__main__":
    main()
