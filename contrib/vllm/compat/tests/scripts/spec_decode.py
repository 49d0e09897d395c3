"""Usage: --model MODEL --num-spec-tokens N. Draft tokens, and how many were accepted."""

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.metrics.reader import Counter, Vector

parser = FlexibleArgumentParser()
parser.add_argument("--model", type=str)
parser.add_argument("--method", type=str, default="ngram", choices=["ngram"])
parser.add_argument("--num-spec-tokens", type=int, default=2)
parser.add_argument("--prompt-lookup-max", type=int, default=5)
parser.add_argument("--prompt-lookup-min", type=int, default=2)
parser.add_argument("--output-len", type=int, default=16)
args = parser.parse_args()
llm = LLM(
    model=args.model,
    speculative_config={
        "method": args.method,
        "num_speculative_tokens": args.num_spec_tokens,
        "prompt_lookup_max": args.prompt_lookup_max,
        "prompt_lookup_min": args.prompt_lookup_min,
    },
    disable_log_stats=False,
    max_model_len=128,
)
ids = llm.get_tokenizer().encode("a b a b a b a b a b a b", add_special_tokens=False)
params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True)
outputs = llm.generate([TokensPrompt(prompt_token_ids=ids)], sampling_params=params)
drafts = accepted = 0
per_position = [0] * args.num_spec_tokens
for metric in llm.get_metrics():
    if metric.name == "vllm:spec_decode_num_draft_tokens":
        assert isinstance(metric, Counter)
        drafts += metric.value
    elif metric.name == "vllm:spec_decode_num_accepted_tokens":
        accepted += metric.value
    elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
        assert isinstance(metric, Vector)
        for position, value in enumerate(metric.values):
            per_position[position] += value
print("draft tokens:", drafts, "accepted:", accepted, "by position:", per_position)
assert sum(per_position) == accepted <= drafts
assert sum(len(output.outputs[0].token_ids) for output in outputs) == args.output_len
