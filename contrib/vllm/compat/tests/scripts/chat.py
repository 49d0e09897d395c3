"""Usage: --model MODEL. Answer a conversation, alone and ten times in a batch."""

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
EngineArgs.add_cli_args(parser)
parser.add_argument("--chat-template-path", type=str)
args = vars(parser.parse_args())
path = args.pop("chat_template_path")
llm = LLM(**args)
params = llm.get_default_sampling_params()
params.max_tokens = 3
template = None
if path is not None:
    with open(path) as file:
        template = file.read()
conversation = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": "Write an essay about education."},
]
outputs = llm.chat(conversation, params, use_tqdm=False, chat_template=template)
assert len(outputs) == 1
outputs = llm.chat([conversation for _ in range(10)], params, use_tqdm=True)
assert len(outputs) == 10
for output in outputs:
    print(repr(output.outputs[0].text))
