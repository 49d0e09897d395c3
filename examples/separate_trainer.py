"""A trainer and an engine in two processes. The trainer sends its weights to the engine through
shared memory, and the engine's next answers are those of the new weights.

Needs transformers. The model is tiny and has random weights. With a server, the trainer would send
`update_info` to POST /update_weights.
"""

import multiprocessing
import tempfile
from multiprocessing.connection import Connection

import torch
from pegboard_weight_transfer_shared_memory.trainer import shared
from transformers import LlamaConfig, LlamaForCausalLM

from pegboard import LLM, SamplingParams

NUM_ROUNDS = 3
PROMPT = [3, 4, 5]
LENGTH = 8


def train(pipe: Connection, folder: str) -> None:
    """The trainer's process: writes the first checkpoint, then sends weights in each round."""
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
    model.save_pretrained(folder)
    pipe.send("ready")
    for _ in range(NUM_ROUNDS):
        with torch.no_grad():  # a real trainer would learn here
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.05)
            tokens = PROMPT
            for _ in range(LENGTH):
                tokens = [*tokens, int(model(torch.tensor([tokens])).logits[0, -1].argmax())]
        with shared(model.state_dict()) as update_info:
            pipe.send((update_info, tokens[len(PROMPT) :]))
            pipe.recv()  # the engine has the weights


def main() -> None:
    context = multiprocessing.get_context("spawn")
    pipe, other_end = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        trainer = context.Process(target=train, args=(other_end, folder))
        trainer.start()
        other_end.close()
        pipe.recv()
        params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
        with LLM(
            folder,
            dtype="float32",
            skip_tokenizer_init=True,
            kv_cache_memory_bytes=16 << 20,
            weight_transfer_config={"backend": "shared_memory"},
        ) as llm:
            for number in range(NUM_ROUNDS):
                update_info, expected = pipe.recv()
                llm.update_weights({"update_info": update_info})
                pipe.send("done")
                outputs = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
                tokens = list(outputs[0].outputs[0].token_ids)
                print(f"round {number}: {tokens}, the trainer has {expected}")
        trainer.join()


if __name__ == "__main__":
    main()
