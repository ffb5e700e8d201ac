"""
Stands in for a vLLM server: answers `/health`, and misbehaves as it is told. A script, standard library only.

Options: `--exit-at-start CODE`, `--never-healthy`, `--ignore-sigterm`, and `--engine own|same`, which starts a child
that ignores SIGTERM, in a session of its own or in the server's.
A POST must have the key of the environment, if there is one.
`GET /exit?CODE` ends it with that code, and leaves the child behind.
"""

import argparse
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('engine', flush=True); time.sleep(600)"
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--exit-at-start", type=int)
    parser.add_argument("--never-healthy", action="store_true")
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--engine", choices=["own", "same"])
    args = parser.parse_args()
    print(f"fake server on {args.port}", flush=True)
    if args.exit_at_start is not None:
        sys.exit(args.exit_at_start)
    if args.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if args.engine:
        argv, leaves = [sys.executable, "-c", STUBBORN], args.engine == "own"
        engine = subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=leaves)
        engine.stdout.readline()  # from here on it ignores SIGTERM

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.startswith("/exit"):
                print("OSError: as you wish", flush=True)
                os._exit(int(self.path.partition("?")[2]))
            self.send_response(503 if args.never_healthy else 200)
            self.end_headers()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            print(f"POST {self.path}", flush=True)
            key = os.environ.get("VLLM_API_KEY")
            self.send_response(200 if not key or self.headers["Authorization"] == f"Bearer {key}" else 401)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    HTTPServer(("127.0.0.1", args.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
