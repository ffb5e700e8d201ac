"""The server that benchmarks measure: a real vLLM with an exact Markov chain, whose lengths are heavy-tailed."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.models import make_markov_model, make_tokenizer
from tests.servers import start_vllm_server


@contextmanager
def benchmark_server(base_url: str | None = None, **options: object) -> Iterator[tuple[str, Path]]:
    """
    Yields the address of a server and its model's directory.

    Args:
        base_url (`str`, *optional*):
            A server that runs already and serves the Markov model. By default one is started, and ended afterwards.
        options:
            Options of the server, see `start_vllm_server`.
    """
    with tempfile.TemporaryDirectory() as directory:
        model_dir = make_markov_model(Path(directory) / "markov", make_tokenizer())
        if base_url is not None:
            yield base_url, model_dir
        else:
            with start_vllm_server(model_dir, **options) as server:
                yield server.base_url, model_dir
