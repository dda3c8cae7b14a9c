"""A real llama-server on a free loopback port, in an interpreter that has the `xllamacpp` wheel.

`python llama_server.py MODEL.gguf [key=value ...]` with the keys context, threads, speculation, slots and port;
prints the address on one line and serves until standard input closes.
"""

from __future__ import annotations

import sys

import xllamacpp  # pyright: ignore[reportMissingImports]


def main() -> None:
    options = dict(item.split("=", 1) for item in sys.argv[2:])
    parameters = xllamacpp.CommonParams()
    parameters.model.path = sys.argv[1]
    parameters.n_ctx = int(options.get("context", "1024"))
    parameters.n_parallel = int(options.get("slots", "1"))
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = int(options.get("port", "0"))
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = int(options.get("threads", "1"))
    parameters.endpoint_metrics = True
    parameters.warmup = False
    if options.get("speculation") == "ngram":
        kinds = xllamacpp.common_speculative_type
        parameters.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        parameters.speculative.ngram_simple.size_n = 3
        parameters.speculative.ngram_simple.size_m = 8
    server = xllamacpp.Server(parameters)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
