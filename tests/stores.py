"""A server of S3 on loopback that misbehaves on request: moto's, between it and the client a list of faults."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

BUCKET = "bucket"
Fault = Callable[[str, str], str | None]  # of method and path: "refuse" (500), "cut" in the middle, "slow", or None


class FaultyS3:
    """Answers as S3 does, except where `fault` says otherwise. `puts` are the objects that were written, in order."""

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            def log(self, *_: Any) -> None: ...

        self.fault: Fault = lambda method, path: None
        self.puts: list[str] = []
        self.refused: list[str] = []
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=Quiet)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        fault, size = self.fault(method, path), int(environ.get("CONTENT_LENGTH") or 0)
        if fault == "slow":
            time.sleep(0.3)
        elif fault is not None:
            self.refused.append(f"{method} {path}")
            if fault == "cut":
                environ["wsgi.input"].read(min(10, size))
                with contextlib.suppress(OSError):
                    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            else:
                environ["wsgi.input"].read(size)
            start_response("500 Internal Server Error", [("Content-Type", "text/plain")])
            return [b"broken"]
        answer = self._app(environ, start_response)
        if method == "PUT" and path.count("/") > 1:
            self.puts.append(path.split("/", 2)[2])
        return answer


@contextlib.contextmanager
def s3_server() -> Iterator[FaultyS3]:
    """A server with an empty bucket, and the environment by which every process finds it."""
    pytest.importorskip("s3fs")
    import boto3
    from moto.core.models import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    server = FaultyS3()
    variables = {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "AKIDTESTKEY",
        "AWS_SECRET_ACCESS_KEY": "verysecretvalue",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",  # Rung's own attempts are what is tested
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        try:
            boto3.client("s3").create_bucket(Bucket=BUCKET)
            yield server
        finally:
            server.stop()
            s3_backends[DEFAULT_ACCOUNT_ID]["aws"].reset()
