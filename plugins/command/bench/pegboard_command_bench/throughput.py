"""`pegboard bench throughput`: measures many requests at once, in this process."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

from pegboard.errors import UsageError
from pegboard.interfaces.command import CommandSetup
from pegboard_command_bench.datasets import BenchRequest, add_dataset_flags, make_requests
from pegboard_command_bench.results import engine_parser, write_json

BACKENDS = ("vllm", "vllm-chat")
"""The backends, with vLLM's names: complete the prompts as they are, or send each as a user's
message through the chat template."""


def main(words: Sequence[str], setup: CommandSetup) -> int:
    """Measure and print the result. The end of sequence is ignored, so that outputs have the
    requested length."""
    parser = engine_parser(
        setup, "throughput", "Measure tokens per second for many requests at once."
    )
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default="vllm",
        help="vllm-chat: send the prompts through the chat template",
    )
    parser.add_argument(
        "--n", type="number", default=1, help="completions per request (default %(default)s)"
    )
    parser.add_argument(
        "--async-engine",
        action="store_true",
        help="run the engine in its own process, like the server",
    )
    parser.add_argument(
        "--disable-detokenize", action="store_true", help="do not detokenize the outputs"
    )
    add_dataset_flags(parser)
    settings, arguments = parser.parse_settings(words, {"engine": {"disable_log_stats": True}})
    run = _run_async if arguments.async_engine else _run
    elapsed_s, num_prompt, num_output, num_requests = run(settings, arguments)
    result = {
        "elapsed_time": elapsed_s,
        "num_requests": num_requests,
        "total_num_tokens": num_prompt + num_output,
        "requests_per_second": num_requests / elapsed_s,
        "tokens_per_second": (num_prompt + num_output) / elapsed_s,
    }
    print(
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, {num_output / elapsed_s:.2f} output "
        "tokens/s"
    )
    print(f"Total num prompt tokens:  {num_prompt}")
    print(f"Total num output tokens:  {num_output}")
    if arguments.output_json:
        write_json(arguments.output_json, result)
    return 0


def _params(request: BenchRequest, arguments: Any) -> Any:
    from pegboard import SamplingParams

    detokenize = not arguments.disable_detokenize
    return SamplingParams(
        n=arguments.n,
        temperature=1.0,
        top_p=1.0,
        ignore_eos=True,
        max_tokens=request.output_len,
        detokenize=detokenize,
    )


def check_items(requests: Sequence[BenchRequest], arguments: Any) -> None:
    """Raise UsageError for images that this measurement does not send."""
    if any(request.recording is not None for request in requests):
        raise UsageError("recordings are measured by bench serve with --backend openai-audio")
    is_chat = arguments.backend == "vllm-chat" and not arguments.async_engine
    if any(request.parts for request in requests) and not is_chat:
        raise UsageError("images need --backend vllm-chat, without --async-engine")


def _run(settings: Any, arguments: Any) -> tuple[float, int, int, int]:
    """Returns (seconds, prompt tokens, output tokens, requests)."""
    from pegboard import LLM

    with LLM.from_settings(settings) as llm:
        requests = make_requests(arguments, llm.get_tokenizer())
        check_items(requests, arguments)
        params = [_params(request, arguments) for request in requests]
        started = time.perf_counter()
        use_tqdm = not arguments.disable_tqdm
        if arguments.backend == "vllm-chat":
            messages = [[{"role": "user", "content": request.content}] for request in requests]
            outputs = llm.chat(messages, params, use_tqdm=use_tqdm)
        else:
            outputs = llm.generate(
                [request.prompt for request in requests], params, use_tqdm=use_tqdm
            )
        elapsed_s = time.perf_counter() - started
    return elapsed_s, *_count(outputs), len(outputs)


def _count(outputs: Sequence[Any]) -> tuple[int, int]:
    num_prompt = sum(len(output.prompt_token_ids or ()) for output in outputs)
    return num_prompt, sum(
        len(completion.token_ids) for output in outputs for completion in output.outputs
    )


def _run_async(settings: Any, arguments: Any) -> tuple[float, int, int, int]:
    from tqdm import tqdm

    from pegboard import AsyncLLM, RequestOutputKind

    async def main() -> tuple[float, int, int, int]:
        client = await asyncio.to_thread(AsyncLLM.from_settings, settings)
        async with client:
            requests = make_requests(arguments, client.get_tokenizer())
            check_items(requests, arguments)
            with tqdm(
                total=len(requests),
                desc="Requests",
                file=sys.stderr,
                disable=arguments.disable_tqdm,
            ) as bar:

                async def one(request: BenchRequest) -> Any:
                    params = _params(request, arguments).clone(
                        output_kind=RequestOutputKind.FINAL_ONLY
                    )
                    async for output in client.generate(
                        _prompt(client, request, arguments), params
                    ):
                        if output.finished:
                            bar.update(1)
                            return output
                    raise AssertionError("a stream ended without its last output")

                started = time.perf_counter()
                outputs = await asyncio.gather(*map(one, requests))
                elapsed_s = time.perf_counter() - started
        return elapsed_s, *_count(outputs), len(outputs)

    return asyncio.run(main())


def _prompt(client: Any, request: BenchRequest, arguments: Any) -> Any:
    """Returns the prompt as text, or as the token ids of a rendered conversation."""
    if arguments.backend != "vllm-chat":
        return request.prompt
    from pegboard.interfaces.tokenizer import Chat

    rendered = client.get_tokenizer().render(
        Chat(messages=[{"role": "user", "content": request.prompt}])
    )
    return {"prompt_token_ids": list(rendered.token_ids)}
