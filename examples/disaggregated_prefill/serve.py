"""Several servers that compute prompts, several that answer, and a proxy before them, on one
machine. They share blocks of the KV cache in a folder, or send them to each other with --p2p.

    python examples/disaggregated_prefill/serve.py --prefill 2 --decode 2 MODEL -- --dtype float32
    curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
        -d '{"model": "MODEL", "prompt": "Once upon a time", "max_tokens": 20}'

The words after -- are flags of every server. Ctrl-C ends all.
"""

import argparse
import contextlib
import signal
import subprocess
import sys
import tempfile

PEGBOARD = [sys.executable, "-m", "pegboard"]
FOLDER = "--kv_connector.shared_storage.shared_storage_path"
PORT = "--kv_connector.p2p.port"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill", type=int, default=1, help="number of servers for prompts")
    parser.add_argument("--decode", type=int, default=1, help="number of servers that answer")
    parser.add_argument("--port", type=int, default=8000, help="the proxy's; servers have the next")
    parser.add_argument("--blocks", help="the shared folder; default: a temporary one")
    parser.add_argument("--p2p", action="store_true", help="over TCP instead of a folder")
    parser.add_argument("words", nargs="*", help="MODEL -- flags of the servers")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.ExitStack() as stack:
        blocks = given.blocks or stack.enter_context(tempfile.TemporaryDirectory())
        roles = ["prefill"] * given.prefill + ["decode"] * given.decode
        addresses = []
        for port, role in enumerate(roles, given.port + 1):
            folder = ["--kv-connectors", "shared_storage", FOLDER, blocks]
            tcp = ["--kv-connectors", "p2p", PORT, str(port + len(roles))]
            flags = [*(tcp if given.p2p else folder), "--port", str(port)]
            server = subprocess.Popen([*PEGBOARD, "serve", *given.words, *flags])
            stack.callback(end, server)
            print(f"{role}: http://127.0.0.1:{port} (process {server.pid})", flush=True)
            addresses += [f"--{role}", f"http://127.0.0.1:{port}"]
        words = ["proxy", "--port", str(given.port), "--show-servers", *addresses]
        proxy = subprocess.Popen([*PEGBOARD, *words])
        stack.callback(end, proxy)
        with contextlib.suppress(KeyboardInterrupt):
            proxy.wait()


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()


if __name__ == "__main__":
    main()
