"""`pegboard bench serve`: measures a running server under load. It works with any server that has
the OpenAI routes."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pegboard import env
from pegboard.errors import PegboardError, UsageError
from pegboard.interfaces.command import CommandSetup, FlagParser
from pegboard_command_bench.bodies import ENDPOINTS, POOLING, TAKES_IMAGES, Target
from pegboard_command_bench.datasets import RERANK, BenchRequest, add_dataset_flags, make_requests
from pegboard_command_bench.http_stream import request
from pegboard_command_bench.load import Arrivals, run_load, send, wait_until_ready
from pegboard_command_bench.results import write_json
from pegboard_command_bench.serve_metrics import Wanted, summarize, table

if TYPE_CHECKING:
    from pegboard.interfaces.tokenizer import Tokenizer

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)

DETAILED = (
    "input_lens",
    "output_lens",
    "ttfts",
    "itls",
    "latencies",
    "start_times",
    "generated_texts",
    "errors",
)
"""Fields of the result with one entry per request. They are saved only with --save-detailed."""


def make_parser(setup: CommandSetup) -> FlagParser:
    """The parser with all flags of the command."""
    parser = setup.parser(
        prog="pegboard bench serve", description="Measure a running server under load."
    )
    parser.add_argument(
        "--backend",
        choices=ENDPOINTS,
        default="openai",
        help="kind of route to measure (default %(default)s)",
    )
    parser.add_argument("--base-url", help="http://host:port, instead of --host and --port")
    parser.add_argument("--host", default="127.0.0.1", help="(default %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="(default %(default)s)")
    parser.add_argument("--endpoint", help="path of the route (default: by the backend)")
    parser.add_argument(
        "--header",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="headers of every request",
    )
    parser.add_argument(
        "--insecure", action="store_true", help="do not check the certificate of https"
    )
    parser.add_argument(
        "--model", help="name or reference of the model (default: the first one served)"
    )
    parser.add_argument(
        "--served-model-name", help="name of the model on the server, if --model is its reference"
    )
    parser.add_argument(
        "--tokenizer",
        help="model reference of the tokenizer (default: the model that the server serves)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the arrival times (default %(default)s)"
    )
    _add_load_flags(parser)
    _add_result_flags(parser)
    add_dataset_flags(parser, pools=True)
    return parser


def _add_load_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--request-rate",
        type=float,
        default=float("inf"),
        help="requests per second (default: all at once)",
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        help="burstiness of the intervals; 1 = Poisson (default %(default)s)",
    )
    group.add_argument("--max-concurrency", type="number", help="most requests at once")
    group.add_argument(
        "--ramp-up-strategy",
        choices=("linear", "exponential"),
        help="let the rate grow during the run",
    )
    group.add_argument(
        "--ramp-up-start-rps", type=float, help="requests per second at the start of the ramp"
    )
    group.add_argument(
        "--ramp-up-end-rps", type=float, help="requests per second at the end of the ramp"
    )
    group.add_argument(
        "--num-warmups",
        type="number",
        default=0,
        help="requests before measuring (default %(default)s)",
    )
    group.add_argument(
        "--ready-check-timeout-sec", type=float, default=0.0, help="how long to wait for the server"
    )
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        help="ignore the end of sequence, so that outputs have the requested length",
    )
    group.add_argument(
        "--extra-body", type=json.loads, default={}, metavar="JSON", help="fields of every request"
    )
    for name in SAMPLING:
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(
            flag, type=int if name == "top_k" else float, help="sampling parameter of every request"
        )


def _add_result_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("result")
    group.add_argument(
        "--percentile-metrics",
        help="of ttft,tpot,itl,e2el (default ttft,tpot,itl, or e2el if answers have no tokens)",
    )
    group.add_argument(
        "--metric-percentiles", default="99", help="as 50,90,99 (default %(default)s)"
    )
    group.add_argument(
        "--goodput",
        nargs="+",
        metavar="METRIC:MS",
        help="count the requests that stay below these milliseconds, such as ttft:200 tpot:50",
    )
    group.add_argument("--save-result", action="store_true", help="write the result as JSON")
    group.add_argument(
        "--save-detailed", action="store_true", help="also save the values of each request"
    )
    group.add_argument(
        "--append-result", action="store_true", help="append the result to the file as one line"
    )
    group.add_argument("--result-dir", help="where; default here")
    group.add_argument(
        "--result-filename", help="name of the file (default: from backend, rate, model and time)"
    )
    group.add_argument(
        "--label", help="name in the result and in its file name (default: the backend)"
    )
    group.add_argument(
        "--metadata", nargs="+", default=[], metavar="KEY=VALUE", help="more fields of the result"
    )
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def main(words: Sequence[str], setup: CommandSetup) -> int:
    """Measure and print the result. Returns 1 when no request succeeded."""
    arguments = make_parser(setup).parse(words)
    wanted = Wanted.parsed(
        arguments.percentile_metrics,
        arguments.metric_percentiles,
        arguments.goodput,
        pools=arguments.backend in POOLING,
    )
    check_flags(arguments)
    arrivals = _arrivals(arguments)
    metadata = dict(_pair(item, "--metadata") for item in arguments.metadata)
    result = asyncio.run(_run(arguments, arrivals, wanted, setup))
    result = {**_about(arguments, result), **metadata, **result}
    print(table(result, wanted))
    if result["failed"]:
        first = next(error for error in result["errors"] if error)
        print(f"{result['failed']} requests failed; the first: {first}", file=sys.stderr)
    if arguments.save_result or arguments.append_result or arguments.save_detailed:
        _save(arguments, result)
    return 0 if result["completed"] else 1


def _pair(text: str, flag: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"{flag} {text!r}: expected KEY=VALUE")
    return name.strip(), value.strip()


def _arrivals(arguments: Any) -> Arrivals:
    start = arguments.ramp_up_start_rps
    end = arguments.ramp_up_end_rps
    if arguments.ramp_up_strategy is not None:
        if arguments.request_rate != float("inf"):
            raise UsageError("--ramp-up-strategy and --request-rate exclude each other")
        if (
            start is None
            or end is None
            or start < 0
            or end <= 0
            or (start == 0 and arguments.ramp_up_strategy == "exponential")
        ):
            raise UsageError(
                "--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps, above 0"
            )
        return Arrivals(
            burstiness=arguments.burstiness,
            ramp=arguments.ramp_up_strategy,
            start=max(start, 1e-3),
            end=end,
        )
    if arguments.request_rate <= 0 or arguments.burstiness <= 0:
        raise UsageError("--request-rate and --burstiness must be above 0")
    return Arrivals(arguments.request_rate, arguments.burstiness)


async def _run(
    arguments: Any, arrivals: Arrivals, wanted: Wanted, setup: CommandSetup
) -> dict[str, Any]:
    base = (arguments.base_url or f"http://{arguments.host}:{arguments.port}").rstrip("/")
    key = env.client_key()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    headers |= dict(_pair(item, "--header") for item in arguments.header)
    served = await _served(base, headers, arguments)
    tokenizer = await asyncio.to_thread(_tokenizer, setup, arguments.tokenizer or served["root"])
    requests = make_requests(arguments, tokenizer)
    sampling = {
        name: getattr(arguments, name) for name in SAMPLING if getattr(arguments, name) is not None
    }
    target = Target(
        base + (arguments.endpoint or ENDPOINTS[arguments.backend]),
        served["id"],
        headers,
        backend=arguments.backend,
        extra={**sampling, **arguments.extra_body},
        ignore_eos=arguments.ignore_eos,
        verify=not arguments.insecure,
    )
    check_backend(arguments, requests)
    first = replace(requests[0], output_len=min(requests[0].output_len, 4))
    await wait_until_ready(
        target, first, arguments.ready_check_timeout_sec, lambda text: print(text, file=sys.stderr)
    )
    await asyncio.gather(
        *(send(target, requests[index % len(requests)]) for index in range(arguments.num_warmups))
    )
    measured, duration_s = await run_load(
        target,
        requests,
        arrivals,
        max_concurrency=arguments.max_concurrency,
        seed=arguments.seed,
        show=not arguments.disable_tqdm,
    )
    about = {"model_id": served["id"], "tokenizer_id": arguments.tokenizer or served["root"]}
    return {**about, **summarize(measured, duration_s, wanted)}


def check_flags(arguments: Any) -> None:
    """Raise UsageError for flags that do not fit the route."""
    backend = arguments.backend
    ranks = arguments.dataset_name == RERANK
    takes_many = backend in POOLING and backend != "openai-embeddings-chat"
    if (backend == "vllm-rerank") != (ranks and not arguments.no_reranker):
        raise UsageError(
            f"--backend vllm-rerank takes --dataset-name {RERANK} without --no-reranker, and "
            "other backends do not"
        )
    if not takes_many and (ranks or arguments.random_batch_size > 1):
        raise UsageError(f"--backend {backend} takes one text per request")
    given = [name for name in SAMPLING if getattr(arguments, name) is not None]
    if backend in POOLING and (given or arguments.ignore_eos):
        flag = (given or ["ignore_eos"])[0].replace("_", "-")
        raise UsageError(f"--{flag} is about text that a model generates")


def check_backend(arguments: Any, requests: Sequence[BenchRequest]) -> None:
    """Raise UsageError if the requests do not fit the route."""
    takes_audio = arguments.backend == "openai-audio"
    if any((request.recording is not None) != takes_audio for request in requests):
        raise UsageError(
            "--backend openai-audio takes --dataset-name custom with lines of {audio: file}, and "
            "other backends take no recordings"
        )
    if any(request.parts for request in requests) and arguments.backend not in TAKES_IMAGES:
        raise UsageError(f"images need --backend {' or '.join(TAKES_IMAGES)}")


async def _served(base: str, headers: dict[str, str], arguments: Any) -> dict[str, Any]:
    """Returns id and root of the wanted model, or of the first one that the server lists. Tries
    again for --ready-check-timeout-sec seconds. Raises PegboardError."""
    for attempt in range(int(arguments.ready_check_timeout_sec) + 1):
        if attempt:
            await asyncio.sleep(1)
        status = 503
        problem = None
        try:
            async with request(
                "GET", f"{base}/v1/models", headers, verify=not arguments.insecure
            ) as answer:
                status = answer.status
                body = await answer.body()
        except (OSError, PegboardError) as error:
            problem = error
        if status != 503:  # 503: the model is still loading
            break
    if problem is not None:
        raise PegboardError(f"cannot reach {base}: {problem}; is the server running?")
    if status != 200:
        raise PegboardError(
            f"{base}/v1/models answered {status}: {body.decode('utf-8', 'replace')[:200]}"
        )
    models = json.loads(body).get("data", [])
    name = arguments.model
    served_as = arguments.served_model_name
    matching = [model for model in models if (served_as or name) in (None, model["id"])]
    # --model may be the reference that the server was started with
    if not matching and served_as is None:
        matching = [model for model in models if model.get("root") == name]
    if not matching:
        names = ", ".join(model["id"] for model in models) or "nothing"
        raise PegboardError(
            f"{base} serves {names}, not {served_as or name!r}; leave --model out to measure the "
            "first one"
        )
    return {"id": matching[0]["id"], "root": matching[0].get("root") or matching[0]["id"]}


def _tokenizer(setup: CommandSetup, reference: str) -> "Tokenizer":
    """Returns the tokenizer of a model reference. Raises PegboardError."""
    try:
        return setup.tokenizer(reference)
    except PegboardError as error:
        raise PegboardError(
            f"no tokenizer to count tokens with: {error}; name one with --tokenizer"
        ) from error


def _about(arguments: Any, result: dict[str, Any]) -> dict[str, Any]:
    """The parameters of the run. They come before its results."""
    about = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": arguments.backend,
        "backend": arguments.backend,
        "label": arguments.label,
        "model_id": result["model_id"],
        "tokenizer_id": result["tokenizer_id"],
        "num_prompts": arguments.num_prompts,
        "request_rate": arguments.request_rate if arguments.request_rate != float("inf") else "inf",
        "burstiness": arguments.burstiness,
        "max_concurrency": arguments.max_concurrency,
    }
    if arguments.ramp_up_strategy is not None:
        about |= {
            name: getattr(arguments, name)
            for name in ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
        }
    return about


def _save(arguments: Any, result: dict[str, Any]) -> None:
    kept = (
        result
        if arguments.save_detailed
        else {name: value for name, value in result.items() if name not in DETAILED}
    )
    label = arguments.label or arguments.backend
    at_once = f"-concurrency{arguments.max_concurrency}" if arguments.max_concurrency else ""
    model = str(result["model_id"]).rpartition("/")[2]
    name = (
        arguments.result_filename
        or f"{label}-{result['request_rate']}qps{at_once}-{model}-{result['date']}.json"
    )
    path = Path(arguments.result_dir or ".") / name
    if not arguments.append_result:
        write_json(str(path), kept)
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(kept) + "\n")
    except OSError as error:
        raise PegboardError(f"cannot write {path}: {error.strerror or error}") from error
